"""Damage, strangers, locks and full disks: each is one clear line, and what was written before stays whole."""

import errno
import json
import os
import random
import shutil
import subprocess
import sys
from contextlib import suppress
from pathlib import Path

import pandas as pd
import pyarrow as pa
import pytest
import tiny
from refusals import refused
from stored_rows import rewritten

from specbench.errors import BAD_INPUT, FAILURE, PARTIAL, SpecbenchError
from specbench.prompts import requests_for
from specbench.reporting import render, report_rows
from specbench.runs.runner import run
from specbench.store import parquet_log
from specbench.store.parquet_log import ParquetLog
from specbench.store.run_folders import find_runs
from specbench.store.run_info import read_info
from specbench.store.run_store import RunStore
from specbench.store.schema import SAMPLES

KEYED = pa.schema([("id", pa.string()), ("value", pa.int64())])


def small_run(out: Path, n: int = 3) -> Path:
    return run(tiny.executor(), [tiny.spec()], requests_for(tiny.prompts()[:n]), out).folders[0]


@pytest.mark.parametrize("keep", [0, 1, 100, -1])
def test_a_truncated_part_is_named_and_made_again_once_it_is_deleted(tmp_path, keep):
    folder = small_run(tmp_path)
    before, part = RunStore(folder).samples()["tokens"].map(list).tolist(), next((folder / "samples").iterdir())
    part.write_bytes(part.read_bytes()[:keep])
    for reader in (lambda: small_run(tmp_path), lambda: report_rows(find_runs(tmp_path))):
        error = refused("", reader)
        assert str(part) in error.what and "damaged" in error.what
        assert "delete it and run again" in error.try_this and error.exit_code == BAD_INPUT
    part.unlink()
    assert RunStore(small_run(tmp_path)).samples()["tokens"].map(list).tolist() == before


@pytest.mark.parametrize("text", [b"", b"[]", b'{"schema": 1, "spec": {}}', b"[" * 10**5, b"\xff\xfe\x00"])
def test_a_garbage_run_json_is_named(tmp_path, text):
    folder = small_run(tmp_path)
    (folder / "run.json").write_bytes(text)
    for reader in (lambda: small_run(tmp_path), lambda: report_rows([folder])):
        error = refused("", reader)
        assert str(folder / "run.json") in error.what and error.exit_code == BAD_INPUT
    (folder / "run.json").unlink()
    refused("no run.json", small_run, tmp_path)


def _places(value, path=()):
    yield path
    for key in value if isinstance(value, dict) else range(len(value)) if isinstance(value, list) else ():
        yield from _places(value[key], (*path, key))


@pytest.mark.parametrize("junk", [None, -1.5, "\0", {}, 10**400, [1]])
def test_no_value_in_a_run_json_brings_a_reader_down(tmp_path, junk):
    folder = small_run(tmp_path, 1)
    whole = json.loads((folder / "run.json").read_text())
    for number, (*parents, name) in enumerate(filter(None, _places(whole))):
        info = json.loads(json.dumps(whole))
        place = info
        for key in parents:
            place = place[key]
        place[name] = junk
        (folder / "run.json").write_text(json.dumps(info))
        with suppress(SpecbenchError):
            render(report_rows([folder]), ("markdown", "csv", "json")[number % 3])


def test_no_flipped_bytes_in_a_part_go_unnoticed(tmp_path):
    folder = small_run(tmp_path, 2)
    part = next((folder / "samples").iterdir())
    whole, before = part.read_bytes(), RunStore(folder).samples().to_json()
    assert len(before) > 1000
    draw = random.Random(0)
    for _ in range(150):
        damaged = bytearray(whole)
        for _ in range(draw.choice([1, 4, 64])):
            damaged[draw.randrange(len(damaged))] ^= draw.randrange(1, 256)
        part.write_bytes(damaged)
        if damaged != whole:
            assert str(part) in refused("", RunStore(folder).samples).what
    part.write_bytes(whole)
    assert RunStore(folder).samples().to_json() == before


def replace_column(folder: Path, name: str, value: pa.Scalar) -> None:
    """Give all rows one value in a column."""
    rewritten(folder, lambda t: t.set_column(t.schema.get_field_index(name), name, pa.repeat(value, t.num_rows)))


@pytest.mark.parametrize(("name", "value"), [
    *(("facts", text) for text in ("nonsense", "{}\nnull", '{"a": {"b": 1}}', '{"a": 1e999}')),
    *(("machine", text) for text in ("nonsense", "[]", '{"taken_cores": -1}')),
    *(("machine", text) for text in ('{"gpu_slowed": 5}', '{"gpu_mhz": []}', '{"gpu_others": 1e999}')),
    *((name, -5.0) for name in ("latency_ms", "latency_e2e_ms", "target_ms")),
    *((name, float("inf")) for name in ("latency_ms", "latency_e2e_ms")), *(("nfe", count) for count in (-1, 0)),
])  # fmt: skip
def test_facts_readings_and_times_that_cannot_be_are_refused(tmp_path, name, value):
    folder = small_run(tmp_path)
    replace_column(folder, name, pa.scalar(value, SAMPLES.field(name).type))
    for reader in (lambda: report_rows([folder]), RunStore(folder).samples)[: 1 + (name == "facts")]:
        refused(f"column '{name}'", reader)


def test_a_version_of_many_digits_is_refused(tmp_path):
    folder = small_run(tmp_path)
    rewritten(folder, lambda table: table.replace_schema_metadata({"specbench.schema": "9" * 5000}))
    refused("schema version 99", report_rows, [folder])
    info = (folder / "run.json").read_text()
    for version, said in (("99", "schema version 99.*use a newer specbench"), ("9" * 5000, "run.json")):
        (folder / "run.json").write_text(info.replace('"schema": ', f'"schema": {version}'))
        refused(said, read_info, folder)


@pytest.mark.parametrize("name", ["prompt_id", "prompt", "error"])
def test_text_that_is_not_utf_8_is_refused(tmp_path, name):
    folder = small_run(tmp_path)
    replace_column(folder, name, pa.array([b"\xe8\x01"]).view(pa.string())[0])
    refused("is damaged", RunStore(folder).samples)


def test_a_folder_of_another_run_is_refused(tmp_path):
    folder = small_run(tmp_path)
    before = {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()}
    error = refused("", RunStore(folder).lock, tiny.spec(seed=7))
    assert "holds another run: seed is 0 there, 7 here" in error.what and error.exit_code == BAD_INPUT
    assert {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()} == before


@pytest.mark.parametrize("lost", [".", "samples", "images", "out", "run.json"])
@pytest.mark.parametrize("moved", [True, False])
def test_a_folder_that_goes_while_it_is_written_stops_the_run(tmp_path, lost, moved):
    out = tmp_path / "out"

    class Leaving(tiny.LocalExecutor):
        def decode(self, chunks, reporter):
            for number, done in enumerate(super().decode(chunks, reporter)):
                yield done
                if number == 1:
                    folder = out if lost == "out" else out / done.spec.run_id / lost
                    remove = Path.unlink if lost == "run.json" else shutil.rmtree
                    folder.rename(tmp_path / "old") if moved else remove(folder)

    requests = requests_for(tiny.prompts(), 4)
    error = refused("", run, Leaving(tiny.tiny_model()), [tiny.spec()], requests, out)
    assert error.exit_code == PARTIAL and "removed while this run" in error.what
    if lost == "run.json":
        return
    assert (str(tmp_path / "old") in error.what) == moved, error.what
    if moved and lost in (".", "out"):
        kept = tmp_path / "old" / (tiny.spec().run_id if lost == "out" else ".")
        assert (len(RunStore(kept).samples()) == 2 and not out.exists()) or not any(out.iterdir())
    if lost == "images" and moved:
        (tmp_path / "old").rename(out / tiny.spec().run_id / "images")
    assert small_run(out, 4)


def test_a_folder_whose_name_is_not_utf_8_is_written_and_an_out_that_is_a_file_refused(tmp_path):
    out = tmp_path / os.fsdecode(b"caf\xe9")
    folder = small_run(out)
    assert small_run(out, 4) == folder and len(RunStore(folder).samples()) == 4 and len(report_rows([folder])) == 1
    (tmp_path / "out").write_text("mine")
    error = refused("", small_run, tmp_path / "out")
    assert "cannot write to" in error.what and "--out" in error.try_this and error.exit_code == BAD_INPUT
    assert (tmp_path / "out").read_text() == "mine"


def test_a_second_writer_is_refused_and_the_lock_dies_with_its_owner(tmp_path):
    folder = small_run(tmp_path)
    code = (
        "import sys; from specbench.system.files import take_lock; from pathlib import Path\n"
        "take_lock(Path(sys.argv[1]), 'x'); print('held', flush=True); sys.stdin.read()"
    )
    command = [sys.executable, "-c", code, str(folder / ".lock")]
    other = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    try:
        assert other.stdout.readline() == b"held\n"
        error = refused("", small_run, tmp_path, 4)
        assert f"being written by another process (pid {other.pid})" in error.what and error.exit_code == BAD_INPUT
        assert len(report_rows([folder])) == 1
    finally:
        other.kill()
        other.wait()
    small_run(tmp_path, 4)
    assert len(RunStore(folder).samples()) == 4


@pytest.mark.parametrize("place", ["images", "samples", ""])
def test_a_full_disk_is_one_line_and_can_be_resumed(tmp_path, monkeypatch, place):
    """The disk fills up half-way through a file of each kind in turn."""
    out = tmp_path / "out"
    small_run(out, 2)
    folder = find_runs(out)[0]
    honest = os.fsync

    def full(handle):
        path = Path(os.readlink(f"/proc/self/fd/{handle}"))
        if path.parent == folder / place and path.suffix == ".tmp":
            os.truncate(path, 10)
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return honest(handle)

    monkeypatch.setattr(os, "fsync", full)
    error = refused("", small_run, out, 4)
    assert "No space left" in error.what and "resume" in error.try_this and error.exit_code == FAILURE
    monkeypatch.undo()
    assert not list(out.rglob(".*.tmp")) and len(RunStore(folder).samples()) == 2
    small_run(out, 4)
    assert len(pd.read_parquet(folder / "samples")) == 4


@pytest.mark.parametrize("name", ["nope", "../nowhere", "a\0b", "x" * 5000])
def test_an_unknown_run_is_refused(tmp_path, name):
    small_run(tmp_path)
    error = refused("", find_runs, tmp_path, [name])
    assert ("does not exist" if "/" in name else "unknown run") in error.what and error.exit_code == BAD_INPUT


def test_runs_are_found_by_id_by_start_by_decoder_and_by_folder(tmp_path):
    folder = small_run(tmp_path)
    for name in (folder.name, "enumerable-sjd", "sjd", str(folder), str(tmp_path)):
        assert find_runs(tmp_path, [name]) == [folder]
    refused("no runs in", find_runs, tmp_path / "nothing")
    assert find_runs(tmp_path) == find_runs(tmp_path, None) == [folder]
    for nothing in ([], pd.Series([], dtype=str), iter([])):  # a filter that matched no run does not choose all
        refused("no run given", find_runs, tmp_path, nothing)


@pytest.mark.parametrize("fan_in", [2, 3, 64])
def test_the_log_keeps_order_and_the_last_row_of_a_key(tmp_path, monkeypatch, fan_in):
    monkeypatch.setattr(parquet_log, "_FAN_IN", fan_in)
    monkeypatch.setattr(parquet_log, "_LEVELS", (fan_in, fan_in**2))
    log = ParquetLog(tmp_path, KEYED, ("id",))
    for number in range(40):
        log.append([{"id": f"k{number % 30}", "value": number}])
        assert log.read().num_rows == min(number + 1, 30)
    log.compact()
    assert pd.read_parquet(tmp_path)["value"].tolist() == list(range(10, 40))
    assert len(list(tmp_path.iterdir())) <= max(2, 40 // fan_in**2 + 1)


def test_a_merge_cut_off_before_its_clean_up_shows_no_row_twice(tmp_path, monkeypatch):
    log = ParquetLog(tmp_path, KEYED, ("id",))
    for number in range(5):
        log.append([{"id": f"k{number}", "value": number}])
    with monkeypatch.context() as patch:
        patch.setattr(Path, "unlink", lambda self, missing_ok=False: None)
        log.compact()
    assert len(list(tmp_path.iterdir())) == 6 and log.read()["value"].to_pylist() == list(range(5))
    (tmp_path / ".00000009-00000009.parquet.tmp").write_bytes(b"half")
    log.clean()
    (left,) = tmp_path.iterdir()
    assert left.name.startswith("00000000-00000004-")
    log.append([{"id": "k5", "value": 5}])
    assert log.read()["value"].to_pylist() == list(range(6))
