"""Decoders are compiled side by side: what was never compiled here, by other processes, and once."""

import os
import time
from pathlib import Path
from types import SimpleNamespace

import pytest
import tiny

from specbench.runs.executors import compile_ahead
from specbench.runs.executors.compile_ahead import compiled_ahead
from specbench.runs.executors.local import warm_up

SPECS = [tiny.spec("ar"), tiny.spec("sjd"), tiny.spec("gsd", G=50)]


def load():
    """The model; each process that loads it leaves its number."""
    Path(os.environ["SPECBENCH_CACHE"], f"loaded {os.getpid()}").touch()
    return tiny.tiny_model()


@pytest.fixture
def cache(tmp_path, monkeypatch):
    monkeypatch.setenv("SPECBENCH_CACHE", str(tmp_path))
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(Path(__file__).parent), str(Path(tiny.__file__).parent)]))
    compile_ahead.compiled_folder().mkdir(parents=True)
    return tmp_path


def test_forms_are_reported_as_they_are_compiled_and_counted_for_the_next_time(cache):
    from torch._dynamo.callback import callback_handler

    part, calls = SimpleNamespace(forms=2), []
    model = SimpleNamespace(compiled=[part])
    for _ in ("first", "again"):
        with compile_ahead.told_forms(model, SPECS[:2], lambda *call: calls.append(call)) as keep:
            for spec, forms in zip(SPECS, (1, 2), strict=False):
                for _ in range(forms):
                    callback_handler.run_start_callbacks(None)
                    part.forms += 1
                keep(spec)
        callback_handler.run_start_callbacks(None)
    told = [(done, total) for total in (6, 3) for done in range(3)]
    assert [call[1:] for call in calls] == told, "nothing afterwards"
    assert all(what.startswith("forms compiled") and ("first" in what) == (done == 0) for what, done, _ in calls)


@pytest.mark.slow
def test_decoders_that_were_never_compiled_here_are_compiled_by_another_process_and_once(cache, monkeypatch):
    monkeypatch.setattr(compile_ahead, "available_threads", lambda: 2)
    model = tiny.tiny_model()
    for _ in ("first", "again"):
        with compiled_ahead(load, warm_up, model, SPECS, ["a cat"]) as wait:
            while not compile_ahead._mark(SPECS[-1]).exists():
                time.sleep(0.05)
            for spec in SPECS[1:]:
                wait(spec)
            assert compile_ahead._mark(SPECS[-1]).exists(), "by the other process, before this one is done"
        [loaded] = cache.glob("loaded *")
        assert loaded.name != f"loaded {os.getpid()}"


@pytest.mark.slow
def test_a_process_that_fails_holds_nobody_up(cache, monkeypatch):
    monkeypatch.setattr(compile_ahead, "available_threads", lambda: 2)
    monkeypatch.setenv("PYTHONPATH", "")  # so that it finds no `load`
    with compiled_ahead(load, warm_up, tiny.tiny_model(), SPECS, ["a cat"]) as wait:
        wait(SPECS[1])
        wait(SPECS[1])
    assert not list(cache.glob("loaded *"))


def test_one_core_compiles_alone_and_of_several_processes_the_first_that_begins(cache, monkeypatch, tmp_path):
    assert [compile_ahead._claim(str(tmp_path), spec) for spec in (*SPECS, *SPECS)] == [True] * 3 + [False] * 3
    monkeypatch.setattr(compile_ahead, "available_threads", lambda: 1)
    monkeypatch.setattr(compile_ahead, "_start", None)
    with compiled_ahead(load, warm_up, tiny.tiny_model(), SPECS, ["a cat"]) as wait:
        wait(SPECS[1])
