"""Fixtures of all tests: one thread, a clean environment, and the command line as a function."""

import gc
import importlib
import os
import pkgutil
import signal
import uuid
from contextlib import nullcontext, suppress
from dataclasses import dataclass

os.environ["OMP_NUM_THREADS"] = "1"

import pytest
from cpu_limit import CpuLimit

import specbench
import specbench.system.console
import specbench.system.signals
from specbench.models.catalog import models
from specbench.models.facts import REFERENCES
from specbench.specs.presets import PRESETS


def pytest_addoption(parser):
    parser.addoption("--cpu-limit", action="store_true", help="fail tests that take too many CPU seconds")


def pytest_configure(config):
    if config.getoption("--cpu-limit"):
        config.pluginmanager.register(CpuLimit())


@dataclass(frozen=True)
class Outcome:
    """Exit code and output of a call of the command line."""

    code: int
    out: str
    err: str

    def refused(self, *parts: str, code: int = 2, alone: bool = False) -> None:
        """Check the exit code and the one error, which holds all parts; `alone`: and nothing else is on stderr."""
        assert self.code == code and all(part in self.err for part in parts), self
        errors = [line for line in self.err.splitlines() if line.startswith("error: ")]
        assert len(errors) == 1 and "Traceback" not in self.err, self
        assert not alone or self.err.count("\n") == 1, self


@pytest.fixture(autouse=True, scope="session")
def _no_module_keeps_a_stand_in():
    """Load all modules first: a module first imported while a test has replaced what it imports would keep the
    replacement."""
    for module in pkgutil.walk_packages(specbench.__path__, "specbench."):
        if not module.name.endswith("__main__"):
            with suppress(ModuleNotFoundError) if module.name.endswith("x_omni_decoder") else nullcontext():
                importlib.import_module(module.name)  # the only module of an extra
    # Every run collects garbage before it loads a model: not again through all that was just imported.
    gc.collect()
    gc.freeze()


@pytest.fixture(autouse=True, scope="session")
def _ctrl_c_is_heard():
    """Even where the tests were started in the background of a shell, which makes them deaf to it."""
    signal.signal(signal.SIGINT, signal.default_int_handler)


@pytest.fixture(autouse=True, scope="module")
def _plug_ins_end_with_their_file():
    """Models and decoders of a file of tests are unknown in the next file, because pages list all that are known."""
    known = [(registry, dict(registry)) for registry in (models(), REFERENCES, PRESETS)]
    yield
    for registry, before in known:
        registry.clear()
        registry.update(before)


@pytest.fixture(autouse=True)
def _no_settings_from_outside(monkeypatch, tmp_path_factory):
    """No settings of the user who runs the tests, and separate caches for each test, also of the hub's client."""
    # A command that a test typed before may have been quiet, or have answered a signal.
    monkeypatch.setitem(specbench.system.console._progress, "shown", True)
    monkeypatch.setattr(specbench.system.signals, "_state", specbench.system.signals._State())
    by_commands = ("NO_COLOR", "TORCHINDUCTOR_CACHE_DIR")  # which they set for their process
    for variable in [name for name in os.environ if name.startswith("SPECBENCH_") or name in by_commands]:
        monkeypatch.delenv(variable)
    cache = str(tmp_path_factory.getbasetemp() / f"cache-{uuid.uuid4().hex}")
    monkeypatch.setenv("SPECBENCH_CACHE", cache)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", f"{cache}-hub")


@pytest.fixture(autouse=True)
def no_baseline(monkeypatch):
    """No AR in addition to the decoders that a test names; `--baseline N` still adds it."""
    monkeypatch.setattr("specbench.runs.decoder_args.BASELINE_PROMPTS", 0)


@pytest.fixture
def cli(capsys, monkeypatch):
    """`cli("run", "--limit", "1")` runs the command line in this process."""
    from specbench.cli import main

    monkeypatch.setenv("COLUMNS", "100")

    def call(*arguments: str) -> Outcome:
        with pytest.raises(SystemExit) as stopped:
            main([str(argument) for argument in arguments])
        streams = capsys.readouterr()
        return Outcome(stopped.value.code or 0, streams.out, streams.err)

    return call


@pytest.fixture(scope="session")
def undisturbed(tmp_path_factory) -> dict:
    """Contents of a results folder with `tiny.SPECS` and `tiny.REQUESTS`, decoded at once by this process."""
    import tiny
    from stored_rows import contents

    from specbench.runs.runner import run

    out = tmp_path_factory.mktemp("undisturbed")
    summary = run(tiny.executor(), tiny.SPECS, tiny.REQUESTS, out)
    assert (summary.done, summary.failed, summary.problem()) == (24, 0, None)
    rows = contents(out)
    assert len({str(facts["tokens"]) for facts, _ in rows.values()}) > 6, "comparisons are not of constant images"
    return rows
