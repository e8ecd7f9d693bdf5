"""A refusal of the operating system is reported as such, and nobody is advised to delete a file for it. It
concerns several modules: files, and the readers of run folders and checkpoints."""

import builtins
import contextlib
import errno
import os
import resource
from pathlib import Path
from types import SimpleNamespace

import pyarrow as pa
import pytest
from drawn import drawn_run
from refusals import refused

from specbench.errors import SpecbenchError
from specbench.metrics import scoring
from specbench.metrics.score_store import read_scores
from specbench.models.checkpoint_files import Source
from specbench.store.run_info import read_info
from specbench.store.run_store import RunStore, read_audit, read_image, write_audit
from specbench.system.files import files_named, read_error
from specbench.system.json_values import parse_json

REASONS = (errno.EACCES, errno.ENOMEM)


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


@pytest.mark.parametrize("number", REASONS)
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
