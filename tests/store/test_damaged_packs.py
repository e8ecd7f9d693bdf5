"""Packed files of strangers are refused by the member that is wrong, in `verify`, `report` and `show` alike. It
concerns several modules: store/packed, checks/verify and what reports read."""

import hashlib
import json
import os
import struct
import zipfile
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from specbench import api
from specbench.store import packed
from specbench.store.packed import pack
from specbench.store.run_folders import find_runs


@pytest.fixture(scope="module")
def members(tmp_path_factory) -> dict[str, bytes]:
    """The members of a pack of two runs with an image each."""
    out = tmp_path_factory.mktemp("packed")
    api.run(decoder=["ar", "sjd"], limit=1, out=str(out), quiet=True)
    api.score(metrics="shapes-detector", out=out)
    pack((str(folder) for folder in find_runs(out)), str(out / "one.zip"))
    with zipfile.ZipFile(out / "one.zip") as archive:
        assert archive.getinfo("pack.json").external_attr >> 16 == 0o644, "readable after unzip"
        return {name: archive.read(name) for name in archive.namelist() if name != "pack.json"}


def written(path: Path, files: dict[str, bytes]) -> Path:
    about = {"specbench_pack": 1, "files": {name: hashlib.sha256(data).hexdigest() for name, data in files.items()}}
    with zipfile.ZipFile(path, "w") as archive:
        for name, data in files.items():
            if name.isascii():  # a zip file holds no name that is no Unicode, but its manifest may
                archive.writestr(name, data)
        archive.writestr("pack.json", json.dumps(about))
    return path


def mark(path: Path, bit: int) -> None:
    """Set a flag of all members."""
    data, at = bytearray(path.read_bytes()), 0
    while (at := data.find(b"PK\x01\x02", at)) >= 0:
        struct.pack_into("<H", data, at + 8, struct.unpack_from("<H", data, at + 8)[0] | bit)
        at += 4
    path.write_bytes(data)


def test_a_path_that_does_not_exist_is_named(tmp_path, cli):
    assert "gone does not exist (name a packed file, a results folder" in cli("verify", tmp_path / "gone").err


@pytest.mark.parametrize("year", [1900, 2200])
def test_files_of_any_time_are_packed(year, members, tmp_path, cli):
    """`touch -d @0`, archives without dates, a machine whose clock is wrong."""
    for name, data in members.items():
        (tmp_path / "runs" / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "runs" / name).write_bytes(data)
        os.utime(tmp_path / "runs" / name, ((year - 1970) * 31_556_952,) * 2)
    outcome = cli("pack", "--out", tmp_path / "runs", "--to", tmp_path / "x.zip")
    assert outcome.code == 0, outcome.err
    assert cli("verify", tmp_path / "x.zip").code == 0
    with zipfile.ZipFile(tmp_path / "x.zip") as archive:
        assert all(1980 <= member.date_time[0] <= 2107 for member in archive.infolist())


REFUSED = {
    "a file and a folder": ({"scores/a.parquet": b"", "scores/a.parquet/b.parquet": b""}, "a.parquet', a file and"),
    "a name that is no Unicode": ({"images/\ud800.png": b""}, "is missing"),
    "a long name": ({f"images/{'x' * 300}.png": b""}, "images/xxx"),
    "an audit that is none": ({"audit.json": b"{"}, "audit.json is damaged"),
    "scores that are none": ({"scores/a.parquet": b"PAR1"}, "scores/a.parquet is damaged"),
    "encrypted": ({}, "is encrypted"), "patched": ({}, "compressed patched data"),
}  # fmt: skip


@pytest.mark.parametrize("case", REFUSED)
def test_what_report_refuses_verify_finds_and_names(tmp_path, members, cli, case):
    added, problem = REFUSED[case]
    run = next(iter(members)).partition("/")[0]
    path = written(tmp_path / "x.zip", members | {f"{run}/{name}": data for name, data in added.items()})
    mark(path, {"encrypted": 1, "patched": 32}.get(case, 0))
    for command in ("verify", "report", "show"):
        outcome = cli(command, path)
        assert outcome.code in (2, 4) and "a bug" not in outcome.err, outcome
        errors = [line for line in outcome.err.splitlines() if line.startswith("error: ")]
        assert len(errors) == 1 and problem in errors[0], outcome


def test_a_score_that_is_null_is_missing(tmp_path, members, cli):
    name = next(name for name in members if "/scores/" in name)
    table = pq.read_table(pa.BufferReader(members[name]))
    nulls = pa.nulls(len(table), pa.float64())
    pq.write_table(table.set_column(table.schema.names.index("value"), "value", nulls), sink := pa.BufferOutputStream())
    path = written(tmp_path / "x.zip", members | {name: sink.getvalue().to_pybytes()})
    for command, code in (("verify", 4), ("report", 0), ("show", 0)):
        outcome = cli(command, path)
        assert outcome.code == code and "a bug" not in outcome.err, outcome


def test_a_file_that_is_not_there_is_no_unknown_run(tmp_path, cli):
    assert "none.zip does not exist" in cli("report", tmp_path / "none.zip").err
    assert "holds no runs" in cli("show", tmp_path).err
    (tmp_path / "runs.zip").touch()
    for outcome in (cli("show", tmp_path), cli("report", "--out", tmp_path)):
        assert f"--out {tmp_path / 'runs.zip'}" in outcome.err


def test_a_pack_without_a_run_and_a_cache_that_cannot_be_written_are_named(tmp_path, members, cli, monkeypatch):
    empty = written(tmp_path / "none.zip", {name: data for name, data in members.items() if "run.json" not in name})
    assert "contains no run" in cli("report", empty).err
    (tmp_path / "file").touch()
    monkeypatch.setenv("SPECBENCH_CACHE", str(tmp_path / "file"))
    assert "SPECBENCH_CACHE=DIR" in cli("report", written(tmp_path / "x.zip", members)).err


def test_a_pack_that_another_process_unpacks_meanwhile_is_read(members, tmp_path, monkeypatch):
    path, extract = written(tmp_path / "one.zip", members), packed.extract

    def beaten(path, folder):
        extract(path, folder)
        monkeypatch.setattr(packed, "extract", extract)
        packed.unpacked(path)

    monkeypatch.setattr(packed, "extract", beaten)
    folder = packed.unpacked(path)
    assert folder == packed.unpacked(path) and [*folder.rglob("run.json")] and not [*folder.parent.glob("tmp*")]
