"""What a batch takes is known before it runs: predicted against the tensors, and refused where it cannot fit."""

from __future__ import annotations

import json
import runpy
from pathlib import Path

import pytest

from specbench import memory
from specbench.config import Sampling
from specbench.decoding.loop import Loop, Request, decode
from specbench.decoding.presets import resolve
from specbench.models.cache import PositionLayer
from specbench.models.catalog import find_model, load_model

BENCH = runpy.run_path(str(Path(__file__).parents[1] / "benchmarks" / "speed" / "memory.py"))
CAPTION = "a red circle left of a blue square"


def stop_after(steps: int, monkeypatch) -> None:
    """Break the decode off: the memory of a few steps is that of all."""
    left = iter(range(steps))
    step = Loop.step

    def counted(self, *args):
        if next(left, None) is None:
            raise KeyboardInterrupt
        return step(self, *args)

    monkeypatch.setattr(Loop, "step", counted)


@pytest.mark.parametrize(("name", "guidance"), [("ar", 1.0), ("sjd", 3.0), ("scd-mc", 3.0), ("eagle", 3.0)])
def test_the_cache_is_predicted_within_a_tenth(name, guidance, monkeypatch):
    held = []
    allocate = PositionLayer.lazy_initialization

    def counting(self, keys, values):
        allocate(self, keys, values)
        held.append(self.keys.nbytes + self.values.nbytes)

    monkeypatch.setattr(PositionLayer, "lazy_initialization", counting)
    monkeypatch.setattr(memory, "PROMPT", 16)
    model, decoder, sampling = load_model("shapes"), resolve(name), Sampling(guidance, top_k=256)
    requests = [Request(CAPTION, "p", sample) for sample in range(2)]
    stop_after(2, monkeypatch)
    with pytest.raises(KeyboardInterrupt):
        decode(model, requests, decoder, sampling, 0)
    need = memory.footprint(find_model("shapes"), decoder, sampling, "float32")
    assert 2 * need.cache == pytest.approx(sum(held), rel=0.1)


@pytest.mark.parametrize("name", ["sjd", "gsd", "scd-gs", "sjd-isp", "eagle"])
def test_the_peak_of_caches_and_laws_is_predicted_within_a_tenth(name):
    changed = {} if name == "eagle" else {"window": 64} | ({"G": 10} if name == "gsd" else {})
    decoder, sampling = resolve(name, changed), find_model("shapes").sampling()
    measured = BENCH["peak"](load_model("shapes"), decoder, sampling, 4)
    assert BENCH["predicted"](decoder, sampling, 4)["total"] == pytest.approx(measured, rel=0.1)


def test_the_largest_batch_fits_and_one_more_does_not():
    need = memory.Footprint(weights=100, cache=30, laws=10)
    assert memory.largest_batch([need], 1000) == 20
    assert need.total(20) <= 900 < need.total(21)
    assert memory.largest_batch([need, memory.Footprint(100, 60, 20)], 1000) == 10
    assert memory.largest_batch([need], 50) < 1


def test_a_batch_that_cannot_fit_is_refused_before_anything_runs(cli, tmp_path, monkeypatch):
    monkeypatch.setattr(memory, "free_memory", lambda device: 64 * 2**20)
    outcome = cli("run", "--batch", "64", "--limit", "2", "--out", tmp_path / "out")
    assert outcome.code == 2 and outcome.err.count("\n") == 1 and not (tmp_path / "out").exists()
    assert "--batch 64: " in outcome.err and "fits" in outcome.err
    assert cli("run", "--model", "lumina", "--random-weights", "--batch", "auto", "--out", tmp_path / "o").code == 2


def test_auto_takes_what_fits_and_takes_it_again(cli, tmp_path, monkeypatch):
    asked = ("run", "--decoder", "ar", "--batch", "auto", "--threads", "1", "--out", tmp_path, "--json", "-q")
    outcome = cli(*asked, "--limit", "2")
    assert outcome.code == 0, outcome.err
    (first,) = json.loads(outcome.out)
    monkeypatch.setattr(memory, "free_memory", lambda device: 200 * 2**20)
    (again,) = json.loads(cli(*asked, "--limit", "3").out)
    assert first == again
    info = json.loads((tmp_path / first["run_id"] / "run.json").read_text())
    assert info["spec"]["batch"] == 2 and info["memory"]["largest"] >= 2


def test_auto_is_refused_where_nobody_has_counted(cli, tmp_path):
    tiny_one = ("--model", "llamagen", "--random-weights", "--scale", "tiny")
    outcome = cli("run", *tiny_one, "--batch", "auto", "--out", tmp_path / "out")
    assert outcome.code == 2 and "--batch auto" in outcome.err
