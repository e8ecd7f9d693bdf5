"""How far runs are, from what is on disk: another process may be decoding."""

import json
import os
from datetime import UTC, datetime, timedelta

import pytest
import synthetic
from synthetic import AR, SJD

from specbench.prompts import Request
from specbench.reporting.status import status
from specbench.store.run_store import RunStore
from specbench.store.schema import base_row, sample_row

BEGUN = datetime(2026, 1, 1, tzinfo=UTC)


def decoding(out, spec, images, seconds: float, asked: int = 6, finished: bool = False) -> RunStore:
    """A run that began an image every `seconds` and wrote the last row that long after its begin."""
    call = synthetic.INVOCATION | {"started_at": BEGUN.isoformat(), "wanted": asked}
    store = RunStore(out / spec.run_id).lock(spec).begin(spec, call)
    for number, image in enumerate(images):
        begun = (BEGUN + timedelta(seconds=seconds * number)).isoformat()
        store.append([sample_row(base_row(Request("a cat", f"p{number}"), 0, begun), image, True)])
    store.close(finished=finished)
    written = (BEGUN + timedelta(seconds=seconds * len(images))).timestamp()
    os.utime(store.folder / "samples", (written, written))
    return store


def test_a_run_in_work_says_what_is_left_and_how_fast_it_is(tmp_path, monkeypatch):
    decoding(tmp_path, AR, synthetic.ar(4), 10)
    decoding(tmp_path, SJD, synthetic.sjd(3), 10)
    monkeypatch.setattr("specbench.reporting.status._now", lambda: (BEGUN + timedelta(seconds=45)).timestamp())
    ar, sjd = sorted(status(tmp_path), key=lambda row: row["decoder"])
    assert [row["state"] for row in (ar, sjd)] == ["decoding", "decoding"]
    assert (sjd["images"], sjd["wanted"], sjd["seconds_left"]) == (3, 6, pytest.approx(30))
    assert sjd["speedup"] == pytest.approx(3 * 45 / (35 + 35 + 52)) and sjd["speedup_low"] is None
    assert ar["tokens_per_second"] == pytest.approx(1e3 * 4 / 45)


def test_a_run_without_a_sign_of_life_is_silent_and_one_that_ended_early_stopped(tmp_path, cli):
    decoding(tmp_path / "shard-1-of-2", AR, synthetic.ar(4), 10)
    decoding(tmp_path / "shard-2-of-2", AR, synthetic.ar(4), 10, finished=True)
    decoding(tmp_path, SJD, synthetic.sjd(3), 10, asked=3, finished=True)
    rows = json.loads(cli("status", "--out", tmp_path, "--json").out)
    assert [(row["part"], row["state"]) for row in rows] == [
        (None, "done"), ("shard-1-of-2", "silent"), ("shard-2-of-2", "stopped")
    ]  # fmt: skip
    assert rows[0]["speedup"] is None and "4 of 6" in cli("status", "--out", tmp_path).out
