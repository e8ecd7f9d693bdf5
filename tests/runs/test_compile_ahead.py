"""Decoders are compiled side by side: what was never compiled here, by other processes, and once."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import tiny

from specbench.runs.executors import compile_ahead
from specbench.runs.executors.compile_ahead import compiled_ahead

SPECS = [tiny.spec("ar"), tiny.spec("sjd"), tiny.spec("gsd", G=50)]


def load():
    return tiny.tiny_model()


def note(model, specs, texts):
    for spec in specs:
        Path(os.environ["SPECBENCH_CACHE"], f"{spec.decoder.name} {os.getpid()}").touch()


@pytest.mark.slow
def test_decoders_that_were_never_compiled_here_are_compiled_by_other_processes(tmp_path, monkeypatch):
    monkeypatch.setenv("SPECBENCH_CACHE", str(tmp_path))
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(Path(__file__).parent), str(Path(tiny.__file__).parent)]))
    monkeypatch.setattr(compile_ahead, "available_threads", lambda: 2)
    compile_ahead.compiled_folder().mkdir(parents=True)
    for turn in ("first", "again"):
        with compiled_ahead(load, load(), SPECS, ["a cat"], note) as wait:
            for spec in SPECS:
                wait(spec)
        found = {path.name.split()[0]: int(path.name.split()[1]) for path in tmp_path.glob("* *")}
        assert found.keys() == {"sjd", "gsd"} and os.getpid() not in found.values(), turn
    assert len(list(tmp_path.glob("* *"))) == 2, "again they are known"


def test_one_core_compiles_alone(tmp_path, monkeypatch):
    monkeypatch.setenv("SPECBENCH_CACHE", str(tmp_path))
    monkeypatch.setattr(compile_ahead, "available_threads", lambda: 1)
    monkeypatch.setattr(compile_ahead, "ProcessPoolExecutor", None)
    with compiled_ahead(load, load(), SPECS, ["a cat"], note) as wait:
        wait(SPECS[1])
