"""File systems that lack locks or the syncing of folders: work goes on after one warning, and real failures stay
failures; no link is followed where something is written. A refusal of the operating system is reported as such, and
nobody is advised to delete a file for it: also by the readers of run folders and checkpoints."""

import builtins
import contextlib
import errno
import fcntl
import os
import resource
import stat
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from unittest.mock import Mock

import pyarrow as pa
import pytest
import tiny
import torch
from drawn import drawn_run
from refusals import refused
from stored_rows import contents

from specbench.decoding.verification.lantern import neighbour_table
from specbench.errors import SpecbenchError
from specbench.metrics import scoring
from specbench.metrics.score_store import read_scores
from specbench.models.checkpoint_files import Source
from specbench.prompts import requests_for
from specbench.runs.runner import run
from specbench.store.run_info import read_info
from specbench.store.run_store import RunStore, read_audit, read_image, write_audit
from specbench.system import files
from specbench.system.files import files_named, read_error
from specbench.system.json_values import parse_json

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
    assert refused("it is a folder", files.write_output, tmp_path, b"a folder").exit_code == 2
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


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    folder = drawn_run(tmp_path_factory.mktemp("runs"), n=1)
    scoring.score([folder], ["shapes-detector"])
    write_audit(folder, {"verdict": "consistent", "deviates": False, "fingerprint": "x", "tv": 0.0, "images": 1})
    return folder


READERS = {
    "samples/*.parquet": lambda folder: RunStore(folder).samples(), "scores/*.parquet": read_scores,
    "run.json": read_info, "audit.json": read_audit,
    "images/s0-0.png": lambda folder: read_image(folder, "images/s0-0.png", None),
}  # fmt: skip


@pytest.mark.parametrize("number", [errno.EACCES, errno.ENOMEM])
@pytest.mark.parametrize("name", READERS)
def test_what_cannot_be_read_is_not_called_damaged(folder, name, number, monkeypatch):
    victim = str(next(folder.glob(name)))
    honest_open, honest_os, honest_file = builtins.open, os.open, pa.OSFile

    def refusing(honest):
        def call(path, *rest, **more):
            if str(path) == victim or path == os.fsencode(victim):
                raise OSError(number, os.strerror(number), victim)
            return honest(path, *rest, **more)

        return call

    monkeypatch.setattr(builtins, "open", refusing(honest_open))
    monkeypatch.setattr(os, "open", refusing(honest_os))
    monkeypatch.setattr(pa, "OSFile", refusing(honest_file))
    monkeypatch.setattr(pa, "memory_map", refusing(pa.memory_map))
    error = refused("", READERS[name], folder)
    assert f"{victim} cannot be read: {os.strerror(number)}" in str(error)
    assert not any(word in str(error) for word in ("damaged", "delete", "move"))


@pytest.mark.parametrize("name", READERS)
def test_a_mistake_of_specbench_is_no_damage(folder, name, monkeypatch):
    """Nor is Ctrl-C; too little memory is reported as such."""

    def raising(error):
        def call(*_, **__):
            raise error

        for place in ("pyarrow.parquet.ParquetFile", "PIL.Image.open"):
            monkeypatch.setattr(place, call)
        monkeypatch.setattr("specbench.system.json_values._DECODER", SimpleNamespace(decode=call))

    for error in (NameError("x"), ImportError("y"), KeyboardInterrupt()):
        raising(error)
        with pytest.raises(type(error)):
            READERS[name](folder)
    raising(MemoryError())
    refused("cannot be read: not enough memory", READERS[name], folder)


@pytest.mark.parametrize("name", READERS)
def test_too_many_open_files_are_no_damage(folder, name):
    """A real refusal, which reaches through whatever library does the reading."""
    READERS[name](folder)  # imports on first use open further files
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    taken = [os.dup(0) for _ in range(3)]
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(taken) + 1, before[1]))
    try:
        with contextlib.suppress(OSError):
            while True:
                taken.append(os.dup(0))
        with pytest.raises((SpecbenchError, OSError)) as caught:
            READERS[name](folder)
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, before)
        for handle in taken:
            os.close(handle)
    assert "Too many open files" in str(caught.value) and "damaged" not in str(caught.value)


def test_a_folder_that_is_refused_is_not_taken_for_an_empty_one(tmp_path, monkeypatch):
    (tmp_path / "a.x").touch()
    (tmp_path / "b.y").touch()
    assert files_named(tmp_path, "*.x") == [tmp_path / "a.x"] and files_named(tmp_path / "none", "*.x") == []

    def refusing(path):
        raise OSError(errno.EIO, os.strerror(errno.EIO), path)

    monkeypatch.setattr(os, "listdir", refusing)
    refused("cannot be read: Input/output error", files_named, tmp_path, "*.x")


def test_errors_of_libraries_without_a_number_are_settled_by_a_look(tmp_path):
    there = tmp_path / "x"
    there.write_bytes(b"x")
    source = Source("the model", "owner/name", (), "MIT")
    assert "is damaged" in read_error(there, OSError("bad magic"), "is damaged").what
    assert "Is a directory" in read_error(tmp_path, OSError("bad magic"), "is damaged").what
    assert "not enough memory" in read_error(there, pa.ArrowMemoryError("x"), "is damaged").what
    assert f"repair or replace {there}" in str(source.damaged(there, ValueError("bad magic")))
    cached = tmp_path / "models--owner--name" / "snapshots" / "0" / "x"
    cached.parent.mkdir(parents=True)
    cached.write_bytes(b"x")
    assert "download it again: specbench fetch owner/name" in str(source.damaged(cached, ValueError("bad magic")))
    gone = source.damaged(tmp_path / "gone", RuntimeError("rust lost the number (os error 2)"))
    assert "cannot be read: No such file" in str(gone) and "download it again" not in str(gone)


@pytest.mark.parametrize("text", ["[" * 65 + "]" * 65, '{"a":' * 1000 + "1" + "}" * 1000, "[" * 10**6, '{"a":1,"a":2}'])
def test_json_that_nobody_writes_is_refused(text):
    with pytest.raises(ValueError, match=r"deep|repeated"):
        parse_json(text)
    assert parse_json("[" * 64 + "]" * 64)
