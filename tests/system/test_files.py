"""File systems that lack locks or the syncing of folders: work goes on after one warning, and real failures stay
failures; no link is followed where something is written."""

import errno
import fcntl
import os
import stat
import subprocess
import sys
from pathlib import Path
from unittest.mock import Mock

import pytest
import tiny
import torch
from refusals import refused
from stored_rows import contents

from specbench.decoding.verification.lantern import neighbour_table
from specbench.errors import SpecbenchError
from specbench.prompts import requests_for
from specbench.runs.runner import run
from specbench.system import digests, files

REQUESTS = requests_for(tiny.prompts(), 1)
LOCKS, SYNCS = "may write here at the same time", "a power failure may destroy"


@pytest.fixture(autouse=True)
def _nothing_was_said(monkeypatch):
    monkeypatch.setattr(files, "_warned", set())


def without(monkeypatch, number: int, locks: bool, syncs: bool) -> None:
    """A file system that answers a missing call with `number`."""
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
def test_a_run_goes_on_with_a_warning_that_names_what_is_missing(tmp_path, monkeypatch, capsys, number, locks, syncs):
    run(tiny.executor(), [tiny.spec()], REQUESTS, tmp_path / "whole")
    without(monkeypatch, number, locks, syncs)
    for _ in range(2):
        run(tiny.executor(), [tiny.spec()], REQUESTS, tmp_path / "out")
    errors = capsys.readouterr().err
    assert errors.count("warning") == locks + syncs and (LOCKS in errors, SYNCS in errors) == (locks, syncs)
    assert contents(tmp_path / "out") == contents(tmp_path / "whole")


@pytest.mark.parametrize("number", [errno.EIO, errno.ENOSPC])
def test_a_disk_that_fails_is_no_missing_call(tmp_path, monkeypatch, number):
    without(monkeypatch, number, locks=False, syncs=True)
    refused(os.strerror(number), files.write_atomically, tmp_path / "x", b"x")


def test_links_that_were_planted_are_not_written_through(tmp_path):
    precious = tmp_path / "precious"
    precious.write_text("precious")
    (tmp_path / "x").symlink_to(precious)
    files.write_atomically(tmp_path / "x", b"x")
    (tmp_path / ".lock").symlink_to(precious)
    with pytest.raises(OSError, match="symbolic links"):
        files.take_lock(tmp_path / ".lock", "busy")
    assert precious.read_text() == "precious" and (tmp_path / "x").read_bytes() == b"x"


def test_many_writers_of_one_file_and_nobody_reads_a_part(tmp_path):
    script = "import sys; from pathlib import Path; from specbench.system.files import write_atomically as w\n"
    script += "for _ in range(60): w(Path(sys.argv[1]), sys.argv[2].encode() * 300_000)"
    writers = [subprocess.Popen([sys.executable, "-c", script, tmp_path / "x", letter]) for letter in "abc"]
    while any(writer.poll() is None for writer in writers):
        if (tmp_path / "x").exists():
            content = (tmp_path / "x").read_bytes()
            assert len(content) == 300_000 and len(set(content)) == 1
    assert not any(writer.returncode for writer in writers) and [path.name for path in tmp_path.iterdir()] == ["x"]


def test_output_goes_where_the_user_said(tmp_path, monkeypatch, capfdbinary):
    files.write_output(tmp_path / "new" / "x", b"new")
    (link := tmp_path / "link").symlink_to(tmp_path / "new" / "x")
    files.write_output(link, b"linked")
    assert link.is_symlink() and (tmp_path / "new" / "x").read_bytes() == b"linked"
    for sink in ("/dev/stdout", "-"):
        files.write_output(Path(sink), b"out ")
    if not os.getuid():  # no device of the machine's own, which root would replace
        os.mknod(device := tmp_path / "device", 0o666 | stat.S_IFCHR, os.makedev(1, 3))
        files.write_output(device, b"out ")
        assert device.is_char_device()
    (circle := tmp_path / "circle").symlink_to("circle")
    refused("cannot write", files.write_output, circle, b"x")
    assert circle.is_symlink()

    monkeypatch.setattr(os, "replace", Mock(side_effect=OSError(errno.EBUSY, os.strerror(errno.EBUSY))))
    files.write_output(link, b"mounted")
    assert link.read_bytes() == b"mounted" and len(list((tmp_path / "new").iterdir())) == 1
    refused("cannot write", files.write_output, tmp_path, b"a folder")
    assert capfdbinary.readouterr().out == b"out out "


@pytest.mark.parametrize("mask", [0o002, 0o077])
def test_the_umask_decides_who_else_may_lock_a_folder_and_read_a_cached_table(tmp_path, mask):
    before = os.umask(mask)
    try:
        os.close(files.take_lock(tmp_path / ".lock", "busy"))
        neighbour_table(torch.eye(3), folder=tmp_path)
    finally:
        os.umask(before)
    assert {stat.S_IMODE(path.stat().st_mode) for path in tmp_path.iterdir()} == {0o666 & ~mask}
    assert len(list(tmp_path.iterdir())) == 2


@pytest.mark.parametrize("number", [errno.EIO, errno.EBUSY, errno.ENOSPC, errno.EDQUOT])
def test_only_a_full_disk_is_to_be_freed(tmp_path, monkeypatch, number):
    monkeypatch.setattr(os, "replace", Mock(side_effect=OSError(number, os.strerror(number))))
    error = refused(os.strerror(number), files.write_atomically, tmp_path / "x", b"x")
    assert ("free some space" in error.try_this) == (number in (errno.ENOSPC, errno.EDQUOT))


def test_a_digest_that_takes_time_is_reported_once(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(digests, "_LARGE_BYTES", 0)
    monkeypatch.setattr(digests, "_SMALL_BYTES", 0)
    (tmp_path / "model.safetensors").write_bytes(b"weights")
    assert len({digests.sha256_of(tmp_path / "model.safetensors") for _ in range(2)}) == 1
    errors = capsys.readouterr().err
    assert errors.count("computing the digest of") == 1 and "model.safetensors (0.0 GB), once on this machine" in errors


@pytest.mark.parametrize("made", [Path.touch, Path.mkdir])
@pytest.mark.parametrize("left", [Path.touch, Path.mkdir, lambda place: place.symlink_to(place.parent)])
def test_what_a_killed_writer_left_aside_is_removed_whatever_it_is(tmp_path, left, made):
    """A pack and an export may have had one name."""
    left(tmp_path / ".out.tmp")
    with files.replacing(tmp_path / "out", "busy") as aside, pytest.raises(SpecbenchError, match="busy"):
        made(aside)
        with files.replacing(tmp_path / "out", "busy"):
            pass
    assert os.listdir(tmp_path) == ["out"] and (tmp_path / "out").is_dir() == (made is Path.mkdir)


@pytest.mark.parametrize("name", ["図" * 80 + ".csv", "é" * 125 + ".csv", "a" * 251 + ".csv"], ids=["3", "2", "1"])
def test_a_name_that_the_file_system_takes_is_written_whatever_its_letters(tmp_path, name):
    files.write_atomically(tmp_path / name, b"1")
    with files.replacing(tmp_path / name, "busy") as aside:
        aside.write_bytes(b"2")
    assert [(path.name, path.read_bytes()) for path in tmp_path.iterdir()] == [(name, b"2")]
