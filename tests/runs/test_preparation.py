"""`--window auto` takes the window with the lowest latency on the pilots, and shows what it saw."""

import json
from contextlib import contextmanager

import numpy as np
import pytest
import tiny
from refusals import refused

from specbench.errors import SpecbenchError
from specbench.models.catalog import find_model
from specbench.models.facts import ModelChoice
from specbench.models.interface import TokenLayout
from specbench.runs import memory_estimate, preparation
from specbench.runs.memory_estimate import footprint
from specbench.runs.plan import make_plan
from specbench.runs.preparation import tune_window, with_window
from specbench.runs.settings import merge, run_settings
from specbench.specs.presets import resolve
from specbench.store.run_info import describe_point


class Pilot:
    """The fields of a Generation that the choice reads."""

    def __init__(self, nfe: int, forward_ms: float):
        self.nfe, self.committed = nfe, 64
        self.tested, self.accepted = np.array([2, 2]) * (nfe < 64), np.array([2, 1]) * (nfe < 64)
        self.spans_ms = {"prefill": 0.0, "target": nfe * forward_ms, "verify": 0.5 * nfe * forward_ms}


def machine(monkeypatch, forward_ms: dict[int, float], nfe: dict[int, int]) -> list[int]:
    """Replace decoding by a table of costs; returns the list of windows as they are tried."""
    tried = []

    def decode(model, requests, decoder, sampling, seed, render=True):
        width = decoder.options.get("window", 1)
        tried.append(width)
        return [Pilot(nfe[width], forward_ms[width]) for _ in requests]

    monkeypatch.setattr(preparation, "decode", decode)
    return tried


class Model:
    layout = TokenLayout.plain(8, 8, 4)


WINDOWS = (2, 4, 8, 16, 32, 64)
COMPRESSED = {1: 64, 2: 40, 4: 26, 8: 20, 16: 18, 32: 18, 64: 18}


@pytest.mark.parametrize(("base", "each", "best", "widest"), [(10.0, 0.0, 16, 64), (1.0, 0.5, 4, 16)])
def test_the_window_of_the_lowest_latency_wins_and_the_search_stops_if_wider_ones_cost(
    base, each, best, widest, monkeypatch
):
    tried = machine(monkeypatch, {w: base + each * w for w in COMPRESSED}, COMPRESSED)
    chosen, curve = tune_window(Model(), tiny.prompts(), resolve("sjd"), tiny.SAMPLING, 0, WINDOWS)
    assert chosen == best and (max(tried) == widest or not each)
    assert each or all(point["window_cost"] == 1.0 for point in curve)
    refused("'ar' has no window", tune_window, Model(), tiny.prompts(), resolve("ar"), tiny.SAMPLING, 0, WINDOWS)


def test_the_curve_explains_the_latency(monkeypatch):
    machine(monkeypatch, {w: 1.0 + 0.1 * w for w in COMPRESSED}, COMPRESSED)
    _, curve = tune_window(Model(), tiny.prompts(), resolve("sjd"), tiny.SAMPLING, 0, WINDOWS)
    ar = curve[0]
    assert (ar["window"], ar["tokens_per_step"], ar["window_cost"]) == (1, 1.0, 1.0)
    for point in curve:
        predicted = point["tokens_per_step"] / (point["window_cost"] * point["overhead"])
        assert ar["latency_ms"] / point["latency_ms"] == pytest.approx(predicted)
        assert point["speed_up"] == pytest.approx(predicted)
    assert ar["acceptance"] is None and curve[1]["acceptance"] == 0.75


class Compiled(Model):
    """A compiled model that notes when only its forwards are."""

    compiles, compiled, alone = True, (), False

    def compile(self):
        raise AssertionError("it is compiled")

    def call_for(self, key, rows):
        raise AssertionError("decoding is replaced")

    @contextmanager
    def forwards_alone(self):
        self.alone = True
        yield
        self.alone = False


def test_of_a_compiled_model_forwards_alone_are_compiled_and_counted(monkeypatch):
    machine(monkeypatch, {w: 1.0 + 0.05 * w for w in COMPRESSED}, COMPRESSED)
    model, when = Compiled(), []
    decode = preparation.decode
    monkeypatch.setattr(preparation, "decode", lambda *args, **more: when.append(model.alone) or decode(*args, **more))
    _, curve = tune_window(model, tiny.prompts(), resolve("sjd"), tiny.SAMPLING, 0, WINDOWS)
    assert all(when) and not model.alone
    for point in curve:
        expected = COMPRESSED[point["window"]] * (1.0 + 0.05 * point["window"])
        assert point["overhead"] == 1 and point["latency_ms"] == pytest.approx(expected)


def test_the_curve_is_reported_kept_and_shown(cli, tmp_path, monkeypatch):
    monkeypatch.setattr(memory_estimate, "WINDOWS", (2, 4))
    monkeypatch.setattr(preparation, "others_at_work", lambda machine: "other processes used 1.5 cores")
    small = "run --decoder sjd --window auto --model llamagen --random-weights --scale tiny --prompts shapes --limit 1"
    outcome = cli(*small.split(), "--out", tmp_path)
    assert outcome.code == 0 and "sjd: meanwhile other processes used 1.5 cores" in outcome.err
    (run,) = tmp_path.iterdir()
    curve = json.loads((run / "run.json").read_text())["window_curve"]
    assert [point["window"] for point in curve] == [1, 2, 4]
    shown = " ".join(cli("show", run.name, "--out", tmp_path).out.split())
    for point in curve:
        assert f"sjd, window {point['window']}: {describe_point(point)}" in " ".join(outcome.err.split())
        assert f"{point['window']} {describe_point(point)}" in shown
    assert cli(*small.split(), "--out", tmp_path).out == outcome.out, "the chosen window is kept"


def test_windows_and_batch_are_planned_for_what_fits(monkeypatch, tmp_path):
    """The widest window that one image has room for is what memory is planned for, and wider ones are not tried."""
    janus = find_model("janus").configured(ModelChoice(random=True))
    needs = {w: footprint(janus, with_window(resolve("sjd"), w), janus.sampling(), "bfloat16") for w in (64, 96)}
    between = (needs[64].total(1) + needs[96].total(1)) / 2 / memory_estimate.MARGIN
    monkeypatch.setattr(memory_estimate, "free_memory", lambda device: int(between))
    settings = {"decoder": ["sjd", "ar"], "model": "janus", "random-weights": True, "window": "auto", "batch": "auto"}
    settings |= {"prompts": "shapes"}
    plan = make_plan(merge(run_settings(), settings | {"limit": 1, "out": str(tmp_path)}, env={}))
    assert plan.decoders[0].windows == (2, 4, 8, 16, 32, 64) and plan.decoders[1].windows == ()
    assert plan.decoders[0].widest.options["window"] == 64 and plan.memory["largest"] == 1
    monkeypatch.setattr(memory_estimate, "free_memory", lambda device: 2**20)
    with pytest.raises(SpecbenchError, match="window of 2 does not fit"):
        make_plan(merge(run_settings(), settings | {"limit": 1, "out": str(tmp_path)}, env={}))
