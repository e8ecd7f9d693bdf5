"""File systems that lack locks or the syncing of folders: work goes on after one warning, and real failures stay
failures; no link is followed where something is written."""

from __future__ import annotations

import errno
import fcntl
import os
import stat

import pytest
import tiny
from stored_rows import contents

from specbench.errors import SpecbenchError
from specbench.prompts import requests_for
from specbench.runs.runner import run
from specbench.system import files

REQUESTS = requests_for(tiny.prompts(), 1)
LOCKS, SYNCS = "at once are not kept apart", "lost in a power failure"


@pytest.fixture(autouse=True)
def _nothing_was_said(monkeypatch):
    monkeypatch.setattr(files, "_warned", False)


def without(monkeypatch, number: int, locks: bool, syncs: bool) -> None:
    """A file system that answers `number` where it lacks a call."""
    honest = os.fsync

    def refuse(*_):
        raise OSError(number, os.strerror(number))

    def fsync(handle):
        if stat.S_ISDIR(os.fstat(handle).st_mode):
            refuse()
        honest(handle)

    if locks:
        monkeypatch.setattr(fcntl, "flock", refuse)
    if syncs:
        monkeypatch.setattr(os, "fsync", fsync)


@pytest.mark.parametrize("number", [errno.ENOLCK, errno.EOPNOTSUPP, errno.ENOSYS, errno.EINVAL])
@pytest.mark.parametrize(("locks", "syncs"), [(True, False), (False, True), (True, True)])
def test_a_run_goes_on_with_one_warning_that_names_what_is_missing(tmp_path, monkeypatch, capsys, number, locks, syncs):
    run(tiny.executor(), [tiny.spec()], REQUESTS, tmp_path / "whole")
    without(monkeypatch, number, locks, syncs)
    for _ in range(2):
        run(tiny.executor(), [tiny.spec()], REQUESTS, tmp_path / "out")
    said = capsys.readouterr().err
    assert said.count("warning") == 1 and (LOCKS in said, SYNCS in said) == (locks, syncs)
    assert contents(tmp_path / "out") == contents(tmp_path / "whole")


@pytest.mark.parametrize("number", [errno.EIO, errno.ENOSPC])
def test_a_disk_that_fails_is_no_missing_call(tmp_path, monkeypatch, number):
    without(monkeypatch, number, locks=False, syncs=True)
    with pytest.raises(SpecbenchError, match=os.strerror(number)):
        files.write_atomically(tmp_path / "x", b"x")


def test_links_that_were_planted_are_not_written_through(tmp_path):
    precious = tmp_path / "precious"
    precious.write_text("precious")
    (tmp_path / ".x.tmp").symlink_to(precious)
    files.write_atomically(tmp_path / "x", b"x")
    (tmp_path / ".lock").symlink_to(precious)
    with pytest.raises(OSError, match="symbolic links"):
        files.take_lock(tmp_path / ".lock", "busy")
    assert precious.read_text() == "precious" and (tmp_path / "x").read_bytes() == b"x"
