"""However a run is cut up, shuffled, killed or repeated, its rows equal the rows of an undisturbed run."""

import itertools
import json
import multiprocessing
import os
import random
import shutil
import signal
import time
import weakref
from collections import Counter
from contextlib import contextmanager
from pathlib import Path
from unittest.mock import Mock

import pytest
import tiny
from refusals import refused
from stored_rows import contents

from specbench.errors import INTERRUPTED, PARTIAL, SpecbenchError
from specbench.prompts import requests_for
from specbench.runs import preparation, runner
from specbench.runs.executors import local
from specbench.runs.run_progress import Reporter, RunSummary
from specbench.runs.runner import run
from specbench.runs.settings import merge, run_settings
from specbench.runs.sweep import sweep_plans
from specbench.store import parquet_log
from specbench.store.run_folders import find_runs
from specbench.store.run_store import RunStore
from specbench.system import signals

DECODERS = ("ar", "scd-mc")
SAMPLES = 3


def go(out: Path, prompts=None, samples: int = SAMPLES, batch: int = 1, **kwargs):
    specs = [tiny.spec(decoder, batch=batch) for decoder in DECODERS]
    return run(tiny.executor(), specs, requests_for(prompts or tiny.prompts(), samples), out, **kwargs)


def test_a_second_run_leaves_a_complete_folder_untouched(tmp_path, undisturbed):
    go(tmp_path)
    before = {path: path.stat().st_mtime_ns for path in tmp_path.rglob("*")}
    summary = go(tmp_path)
    assert (summary.resumed, summary.done) == (24, 0)
    assert {path: path.stat().st_mtime_ns for path in tmp_path.rglob("*")} == before
    assert contents(tmp_path) == undisturbed
    for folder in tmp_path.glob("*/images"):
        shutil.rmtree(folder)
    assert go(tmp_path).done == 0, "a run kept without its pictures stays complete"


def test_a_decoder_with_other_components_has_its_own_name_and_no_prefix_of_it_is_ambiguous(tmp_path):
    plain, isp, grouped = tiny.spec(), tiny.spec("sjd-isp"), tiny.spec(verifier="grouped", refine="couple")
    assert plain.run_id.startswith("enumerable-sjd-") and grouped.run_id.startswith("enumerable-sjd+grouped+couple-")
    run(tiny.executor(), [plain, isp, grouped], requests_for(tiny.prompts(1)), tmp_path)
    named = tmp_path / grouped.run_id
    named = named.rename(tmp_path / grouped.earlier_ids[0])  # as it was called before
    again = run(tiny.executor(), [grouped], requests_for(tiny.prompts(2)), tmp_path)
    assert again.folders == [named] and again.resumed == 1, "it is continued"
    assert find_runs(tmp_path, ["enumerable-sjd"]) == [tmp_path / plain.run_id]
    assert find_runs(tmp_path, ["enumerable-sjd-isp"]) == [tmp_path / isp.run_id]
    assert find_runs(tmp_path, [grouped.earlier_ids[0][:-2]]) == [named]
    refused("ambiguous", find_runs, tmp_path, ["enumerable-s"])


def test_halves_in_any_order_make_a_whole(tmp_path, undisturbed):
    prompts = tiny.prompts()[::-1]
    go(tmp_path, prompts[:2], samples=2)
    go(tmp_path, prompts[::3] + prompts[1:3], samples=1)
    assert go(tmp_path).resumed == 2 * (4 + 2) and contents(tmp_path) == undisturbed


def test_batches_hold_the_same_rows_and_have_no_latency(tmp_path, undisturbed):
    """Enumerable models have no kernels to round differently, so a batch of 3 gives the very tokens of batch 1."""
    go(tmp_path, batch=3)
    strip = {(key[0].rsplit("-", 1)[0], *key[1:]): value for key, value in contents(tmp_path).items()}
    assert strip == {(key[0].rsplit("-", 1)[0], *key[1:]): value for key, value in undisturbed.items()}
    for folder in tmp_path.iterdir():
        rows = RunStore(folder).samples()
        assert rows[["latency_ms", "latency_e2e_ms"]].isna().all(axis=None)
        assert (rows["target_ms"] > 0).all() and set(rows["batch"]) == {3}


def _child(out: str, kill_at: int, answers) -> None:
    """Run, and die by SIGKILL just before the `kill_at`-th time the disk is asked for something."""
    parquet_log._FAN_IN, parquet_log._LEVELS = 3, (3, 9)
    asked = itertools.count(1)
    for name in ("fsync", "replace", "unlink", "open", "mkdir"):
        original = getattr(os, name)

        def counted(*args, _original=original, **kwargs):
            if next(asked) == kill_at:
                os.kill(os.getpid(), signal.SIGKILL)
            return _original(*args, **kwargs)

        setattr(os, name, counted)
    go(Path(out), samples=1)
    answers.send(next(asked) - 1)


def _spawn(out: Path, kill_at: int = 0) -> int | None:
    """Requests to the disk of a child that came to its end, or None for one that was killed."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["pytest", "specbench.runs.runner", "specbench.checks.enumerable_model"])
    receive, send = context.Pipe(duplex=False)
    child = context.Process(target=_child, args=(str(out), kill_at, send))
    child.start()
    send.close()
    child.join(120)
    assert child.exitcode in (0, -signal.SIGKILL), child.exitcode
    return receive.recv() if child.exitcode == 0 else None


def test_killed_anywhere_and_run_again(tmp_path, undisturbed):
    expected = {key: value for key, value in undisturbed.items() if key[2] == 0}
    requests = _spawn(tmp_path / "count")
    assert requests > 60
    draw = random.Random(20)
    kills, rounds = 0, 0
    while kills < 16:
        out = tmp_path / f"round{rounds}"
        while _spawn(out, kill_at=draw.randint(1, requests // 2)) is None:
            kills += 1
        assert contents(out) == expected, f"after {kills} kills"
        assert not list(out.rglob(".*.tmp"))
        rounds += 1
    assert rounds >= 2


def test_readers_of_an_unfinished_run_see_every_finished_row_once(tmp_path, monkeypatch):
    monkeypatch.setattr(parquet_log, "_FAN_IN", 3)
    monkeypatch.setattr(parquet_log, "_LEVELS", (3, 9))

    def check(seen):
        assert sum(len(RunStore(folder).samples(["status"])) for folder in tmp_path.iterdir()) == seen

    go(tmp_path, reporter=(watcher := tiny.OnRow(check)))
    assert watcher.rows == 24


def test_a_failed_image_is_a_row_and_is_retried_once_per_run(tmp_path, monkeypatch, undisturbed):
    healthy = local.decode
    calls = []

    def failing(model, requests, *args, **kwargs):
        calls.append([request.prompt_id for request in requests])
        if any(request.prompt_id == "CAT" for request in requests):
            raise RuntimeError("no luck")
        return healthy(model, requests, *args, **kwargs)

    monkeypatch.setattr(local, "decode", failing)
    summary = go(tmp_path)
    assert (summary.done, summary.failed) == (18, 6)
    problem = summary.problem()
    assert problem.exit_code == PARTIAL and "6 of 24 images failed" in problem.what and "no luck" in problem.what
    for folder in tmp_path.iterdir():
        rows = RunStore(folder).samples()
        bad = rows[rows["status"] == "failed"]
        assert set(bad["prompt_id"]) == {"CAT"} and set(bad["error"]) == {"RuntimeError: no luck"}
        assert bad[["nfe", "latency_ms", "latency_e2e_ms", "batch", "image", "tokens", "logp"]].isna().all(axis=None)
    calls.clear()
    assert go(tmp_path).failed == 6 and calls.count(["CAT"]) == 6
    monkeypatch.setattr(local, "decode", healthy)
    summary = go(tmp_path)
    assert (summary.resumed, summary.done, summary.failed, summary.problem()) == (18, 6, 0, None)
    assert contents(tmp_path) == undisturbed


def test_settings_that_do_not_fit_the_model_write_nothing(tmp_path, monkeypatch):
    error = SpecbenchError("top-k 9 is more than the vocabulary")
    monkeypatch.setattr(local, "warm_up_steps", Mock(side_effect=error))
    refused("top-k 9", go, tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_ctrl_c_finishes_the_row_and_says_how_to_go_on(tmp_path, undisturbed):
    before = signal.getsignal(signal.SIGINT)
    summary = go(tmp_path, reporter=tiny.interrupt_after(7))
    assert signal.getsignal(signal.SIGINT) is before and 7 <= summary.done <= 8 and summary.interrupted
    problem = summary.problem()
    assert problem.exit_code == INTERRUPTED and "again to resume" in problem.try_this
    go(tmp_path)
    assert contents(tmp_path) == undisturbed


def test_sigterm_ends_a_run_in_time_and_drops_only_what_is_unfinished(tmp_path, undisturbed, monkeypatch):
    """An image that would take for ever, in a batch of which others are done."""
    healthy, limits = local.StepWatch.__call__, []

    class Told(tiny.OnRow):
        def stopping(self, within_s):
            limits.append(within_s)

    def stuck(watch, committed):
        if reporter.rows >= 3:
            os.kill(os.getpid(), signal.SIGTERM)
            time.sleep(60)
        healthy(watch, committed)

    monkeypatch.setattr(local.StepWatch, "__call__", stuck)
    monkeypatch.setattr(signals, "TERMINATION_S", 0.3)
    reporter, start, before = Told(), time.monotonic(), signal.getsignal(signal.SIGTERM)
    with pytest.raises(KeyboardInterrupt):
        go(tmp_path, reporter=reporter, batch=2)
    assert time.monotonic() - start < 30 and limits == [0.3]
    assert signal.getsignal(signal.SIGTERM) is before and signal.getitimer(signal.ITIMER_REAL) == (0, 0)
    monkeypatch.undo()
    assert go(tmp_path, batch=2).resumed == reporter.rows >= 3


def test_ctrl_c_in_the_warm_up_ends_it_at_once_and_leaves_nothing(tmp_path):
    class Impatient(Reporter):
        def part(self, what, done, total, images=0):
            os.kill(os.getpid(), signal.SIGINT)

    with pytest.raises(KeyboardInterrupt):
        go(tmp_path, reporter=Impatient())
    assert not list(tmp_path.rglob("*"))


def test_run_json_says_what_was_run_by_what(tmp_path):
    spec = tiny.spec("sjd++", tau=float("inf"))
    facts = {spec.run_id: {"origins": {"seed": "flag --seed"}, "window_curve": [{"window": 2, "cost": float("inf")}]}}
    run(tiny.executor(), [spec], requests_for(tiny.prompts()[:1]), tmp_path, run_facts=facts)
    run(tiny.executor(), [spec], requests_for(tiny.prompts()[:2]), tmp_path)

    text = (tmp_path / spec.run_id / "run.json").read_text()
    info = json.loads(text, parse_constant=lambda constant: pytest.fail(f"{constant} is not JSON"))
    assert info["spec"]["decoder"]["options"] == {"fresh-q": "uniform", "tau": "inf", "window": 3}
    assert info["spec"]["sampling"]["guidance"] == 2.0 and info["origins"] == {"seed": "flag --seed"}
    assert len(info["invocations"]) == 2
    for invocation in info["invocations"]:
        assert invocation["started_at"] <= invocation["finished_at"]
        assert invocation["versions"]["torch"] and invocation["hardware"]["cores"] >= 1
        assert set(invocation["git"]) == {"revision", "dirty"}


def test_run_json_is_there_before_the_first_image(tmp_path, monkeypatch):
    healthy = local.decode

    def watching(model, requests, *args, **kwargs):
        if requests[0].prompt_id != local.WARM_UP_ID:
            assert len(list(tmp_path.glob("*/run.json"))) == len(DECODERS)
        return healthy(model, requests, *args, **kwargs)

    monkeypatch.setattr(local, "decode", watching)
    assert go(tmp_path).failed == 0


def test_the_memory_of_a_model_is_free_before_the_next_one_is_loaded(tmp_path, monkeypatch):
    """Groups of a sweep, of which one machine may hold a single model."""
    loaded, alive, honest = [], [], preparation.load_model

    def load(*arguments):
        alive.append([model() for model in loaded if model() is not None])
        model = honest(*arguments)
        model.compiled_for = lambda: model  # as compiled steps do
        loaded.append(weakref.ref(model))
        return model

    monkeypatch.setattr(preparation, "load_model", load)
    tiny_model = {"model": "janus", "random-weights": True, "scale": "tiny", "threads": 1, "prompts": "shapes"}
    named = tiny_model | {"decoder": ["ar", "sjd"], "limit": 1, "out": str(tmp_path), "compile": "off", "device": "cpu"}
    plans = sweep_plans(merge(run_settings(), named), {"dtype": ["float32", "bfloat16"]})
    assert runner.run_plans(plans).done == 4 and alive == [[], []]


def test_of_very_many_runs_some_at_a_time_take_turns_on_one_model(tmp_path, monkeypatch):
    opened, ran = [], []

    @contextmanager
    def open_executor(plan, reporter):
        opened.append(plan)
        yield "executor", None

    def run_some(executor, specs, *_):
        ran.append([spec.seed for spec in specs])
        folders = [tmp_path / spec.run_id for spec in specs]
        return RunSummary(folders, len(specs), 0, len(specs), interrupted=signal.SIGINT * (len(ran) == 2))

    monkeypatch.setattr(preparation, "open_executor", open_executor)
    monkeypatch.setattr(runner, "run", run_some)
    monkeypatch.setattr(runner, "_AT_ONCE", 2)
    settings = {"decoder": ["ar"], "limit": 1, "baseline": 0, "out": str(tmp_path)}
    summary = runner.run_plans(sweep_plans(merge(run_settings(), settings), {"seed": range(5)}))
    assert ran == [[0, 1], [2, 3]] and len(opened) == 1
    assert (summary.done, summary.total, summary.interrupted) == (4, 5, signal.SIGINT) and len(summary.folders) == 4


def test_decoders_take_turns_in_a_balanced_order_that_a_resumed_run_keeps(tmp_path):
    order = []

    class Watcher(Reporter):
        def row(self, run_id, row):
            order.append((run_id.split("-")[1], row["prompt_id"], row["sample"], json.loads(row["machine"])["turn"]))
            if len(order) == 7:
                os.kill(os.getpid(), signal.SIGINT)

    assert go(tmp_path, reporter=Watcher()).interrupted == signal.SIGINT
    assert go(tmp_path, reporter=Watcher()).done + 7 >= 24
    assert [name for name, *_ in order] == ["ar", "scd", "scd", "ar"] * 6
    assert [turn for *_, turn in order[8:]] == [1, 2] * 8
    alone = run(tiny.executor(), [tiny.spec("ar")], requests_for(tiny.prompts(), 1), tmp_path / "alone")
    [folder] = alone.folders
    assert all("turn" not in json.loads(text) for text in RunStore(folder).samples(["machine"])["machine"])


@pytest.mark.parametrize("count", [1, 2, 3, 4, 7])
def test_each_decoder_has_each_turn_and_follows_each_other_one_equally_often(count):
    cycle = [runner.balanced_order(range(count), number) for number in range(count * (1 + count % 2))]
    places = Counter((item, place) for order in cycle for place, item in enumerate(order))
    followed = Counter(pair for order in cycle for pair in itertools.pairwise(order))
    assert len(places) == count**2 and len(set(places.values())) == 1
    assert len(followed) == count * (count - 1) and len(set(followed.values())) <= 1
