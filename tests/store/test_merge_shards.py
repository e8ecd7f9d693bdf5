"""Shards, run anywhere and merged in any order, are the rows of an undivided run."""

import json
import random
import shutil
from pathlib import Path

import pytest
import tiny
from refusals import refused
from stored_rows import contents
from tiny import REQUESTS, SPECS

from specbench.errors import PARTIAL
from specbench.reporting.status import status
from specbench.runs.runner import run
from specbench.runs.shards import shard_folder
from specbench.store.merge_shards import incomplete_shards, merge_runs
from specbench.store.run_info import read_info
from specbench.store.run_store import RunStore


def shard(out: Path, number: int, shards: int, trace: bool = False) -> Path:
    folder = out / shard_folder(number, shards)
    run(tiny.executor(), SPECS, REQUESTS[number - 1 :: shards], folder, trace=trace)
    return folder


def whole(out: Path) -> Path:
    """`out` without its shards."""
    for folder in out.glob("shard-*"):
        shutil.rmtree(folder)
    return out


@pytest.mark.parametrize("shards", [2, 5])
def test_merged_shards_are_the_undivided_run(tmp_path, undisturbed, shards):
    numbers = list(range(1, shards + 1))
    random.Random(1).shuffle(numbers)
    for number in numbers:
        shard(tmp_path, number, shards, trace=shards == 2)
    merged = merge_runs((), tmp_path)
    assert [(outcome.copied, outcome.rows) for outcome in merged] == [(12, 12), (12, 12)]
    assert [outcome.copied for outcome in merge_runs((), tmp_path)] == [0, 0]
    assert [len(RunStore(outcome.folder).traces()) for outcome in merged] == [12 * (shards == 2)] * 2
    assert len(read_info(merged[0].folder).invocations) == shards and contents(whole(tmp_path)) == undisturbed


def test_a_merge_takes_what_came_later_and_a_run_makes_what_is_missing(tmp_path, undisturbed):
    shard(tmp_path, 1, 3)
    merge_runs((), tmp_path)
    shard(tmp_path, 3, 3)
    assert [outcome.rows for outcome in merge_runs((), tmp_path)] == [8, 8]
    summary = run(tiny.executor(), SPECS, REQUESTS, tmp_path)
    assert (summary.resumed, summary.done) == (16, 8) and contents(whole(tmp_path)) == undisturbed


def test_shards_that_are_missing_are_named_by_merge_and_report(cli, tmp_path):
    shard(tmp_path, 2, 8)
    shutil.rmtree(next(shard(tmp_path, 4, 8).iterdir()))
    merged = cli("merge", "--out", tmp_path)
    assert merged.code == PARTIAL and len(merged.out.splitlines()) == 2
    (problem,) = [line for line in merged.err.splitlines() if line.startswith("error: ")]
    assert "missing shards: 1, 3, 5-8 of 8; unfinished shards: 4 of 8 (" in problem
    assert "missing shards: 1, 3, 5-8 of 8: the tables lack" in cli("report", "--out", tmp_path).err
    states = [(row["part"], row["state"]) for row in status(tmp_path)]
    assert states == [(None, "missing shards: 1, 3, 5-8 of 8; unfinished shards: 4 of 8")] * 2, "parts are merged"
    assert incomplete_shards([shard(tmp_path / "all", n, 3) for n in (1, 2, 3)]) == []
    again = cli("merge", tmp_path, "--out", tmp_path / "elsewhere")
    assert again.code == PARTIAL and "missing shards: 1, 3, 5-8 of 8; unfinished shards: 4 of 8 (" in again.err


def test_a_named_results_folder_is_merged_with_the_shards_in_it(tmp_path, undisturbed):
    shard(tmp_path / "node", 1, 2)
    merge_runs((), tmp_path / "node")
    shard(tmp_path / "node", 2, 2)
    merge_runs([tmp_path / "node"], tmp_path / "out")
    assert contents(tmp_path / "out") == undisturbed
    shutil.copytree(shard(tmp_path / "node", 2, 2), tmp_path / "only" / "shard-2-of-2")
    assert [run.rows for run in merge_runs([tmp_path / "only"], tmp_path / "half")] == [6, 6]


def test_overlapping_shards_of_different_sizes_make_no_row_twice(tmp_path, undisturbed):
    folders = [shard(tmp_path / "a", n, 2) for n in (1, 2)] + [shard(tmp_path / "b", n, 3) for n in (1, 2, 3)]
    merge_runs(folders, tmp_path / "out")
    assert contents(tmp_path / "out") == undisturbed


def test_a_good_image_replaces_a_failed_one_and_never_the_other_way(tmp_path, undisturbed):
    good, bad = tmp_path / "good", tmp_path / "bad"
    shard(good, 1, 1)
    shutil.copytree(good, bad)
    for folder in bad.iterdir():
        store = RunStore(folder)
        rows = [row | {"status": "failed", "image": None} for batch in store.batches(None) for row in batch.to_pylist()]
        store.append(rows)
    for order in ([bad, good], [good, bad]):
        out = tmp_path / f"out-{order[0].name}"
        merge_runs(order, out)
        assert contents(out) == undisturbed


def test_a_merge_that_was_cut_off_is_done_by_merging_again(tmp_path, undisturbed, monkeypatch):
    shard(tmp_path, 1, 1)
    healthy, calls = RunStore.append, []

    def dying(self, rows, *rest, **more):
        calls.append(rows)
        if len(calls) == 2:
            raise KeyboardInterrupt
        return healthy(self, rows, *rest, **more)

    monkeypatch.setattr("specbench.store.merge_shards._ROWS", 5)
    monkeypatch.setattr(RunStore, "append", dying)
    with pytest.raises(KeyboardInterrupt):
        merge_runs([tmp_path], tmp_path / "out")
    monkeypatch.undo()
    merge_runs([tmp_path], tmp_path / "out")
    assert contents(tmp_path / "out") == undisturbed


def test_what_is_not_a_shard_is_refused(tmp_path):
    (tmp_path / "empty").mkdir()
    refused("no runs in", merge_runs, [tmp_path / "empty"], tmp_path)
    refused("no shards in", merge_runs, (), tmp_path)
    refused("no folder given", merge_runs, [], tmp_path)
    ours, other = tmp_path / "one", tmp_path / "other"
    for out, seed in ((ours, 0), (other, 1)):
        run(tiny.executor(), [tiny.spec("ar", seed=seed)], REQUESTS[:1], out)
    theirs = next(other.iterdir())
    (theirs / "run.json").write_text((theirs / "run.json").read_text().replace(theirs.name, next(ours.iterdir()).name))
    refused("seed is 0 there, 1 here", merge_runs, [ours, other], tmp_path / "out")
    assert not list((tmp_path / "out").glob("*/samples/*"))


def test_shards_are_a_partition_of_the_plan(cli, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    command = ("run", "--decoder", "ar", "--limit", "5", "--samples", "3", "--dry-run", "--json")
    counts = [json.loads(cli(*command, "--shard", f"{n}/4").out)[0]["images"] for n in (1, 2, 3, 4)]
    assert sum(counts) == json.loads(cli(*command).out)[0]["images"] == 15 and max(counts) - min(counts) <= 1
