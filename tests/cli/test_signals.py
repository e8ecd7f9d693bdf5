"""The process around the command line: restart with docstrings, signals. It concerns several modules: __main__,
cli/__init__, system/signals and executors.ray_workers."""

import os
import signal
import subprocess
import sys
import time
from types import SimpleNamespace

import pytest
from refusals import refused

from specbench import __main__ as process
from specbench.runs.executors.ray_workers import RayWorkers
from specbench.system import signals


@pytest.mark.parametrize(("typed", "variable", "restarted"), [
    (["python", "-OO", "-m", "specbench", "list"], None, ["-m", "specbench", "list"]),
    (["python", "bin/specbench", "list"], "2", ["bin/specbench", "list"]),
    (["python", "-OOB", "-m", "specbench"], "1", None),
])  # fmt: skip
def test_without_docstrings_the_program_restarts_with_them_once(monkeypatch, typed, variable, restarted):
    calls = []
    monkeypatch.setattr(sys, "flags", SimpleNamespace(optimize=2))
    monkeypatch.setattr(sys, "orig_argv", typed)
    monkeypatch.setattr(os, "execve", lambda *call: calls.append(call))
    monkeypatch.delenv("PYTHONOPTIMIZE", raising=False)
    if variable:
        monkeypatch.setenv("PYTHONOPTIMIZE", variable)
    process._restart_with_docstrings()
    assert [call[1][1:] for call in calls] == ([restarted] if restarted else [])
    assert all(call[2]["PYTHONOPTIMIZE"] == "1" for call in calls)


@pytest.fixture
def handled(monkeypatch):
    """This process handles signals as the process of a command does, until the test ends."""
    before = {number: signal.getsignal(number) for number in (*signals.SIGNAL_NUMBERS, signal.SIGALRM)}
    monkeypatch.setattr(signals, "_state", signals._State())
    monkeypatch.setattr(signals, "_AGAIN_S", 0.05)
    monkeypatch.setattr(sys, "unraisablehook", sys.unraisablehook)
    monkeypatch.setattr(sys, "excepthook", sys.excepthook)
    for number in signals.SIGNAL_NUMBERS:  # also those that whoever started the tests ignores, as nohup does
        signal.signal(number, signal.SIG_DFL)
    signals.install()
    yield
    signal.setitimer(signal.ITIMER_REAL, 0)
    for number, handler in before.items():
        signal.signal(number, handler)


class Swallowing:
    """Interrupted in its destructor, as the regex package's objects were."""

    def __init__(self, number):
        self.number = number

    def __del__(self):
        os.kill(os.getpid(), self.number)
        time.sleep(1)


@pytest.mark.parametrize("number", signals.SIGNAL_NUMBERS)
def test_a_signal_that_a_destructor_swallows_still_ends_the_command(handled, cli, monkeypatch, number):
    def command(*_):
        del self_destroying[0]
        time.sleep(30)

    self_destroying = [Swallowing(number)]
    monkeypatch.setattr("specbench.reporting.status.status", command)
    start = time.monotonic()
    outcome = cli("status")
    assert outcome.code == 128 + number and time.monotonic() - start < 10
    name = "interrupted" if number == signal.SIGINT else f"stopped by {signal.Signals(number).name}"
    assert outcome.err == f"error: {name} (finished work is kept; run the same command again to resume)\n"


def test_an_interrupt_that_a_library_turns_into_an_error_is_an_interrupt(handled, cli, monkeypatch):
    def command(*_):
        try:
            os.kill(os.getpid(), signal.SIGTERM)
            time.sleep(30)
        except KeyboardInterrupt:
            raise ImportError("numpy failed to import") from None

    monkeypatch.setattr("specbench.reporting.status.status", command)
    cli("status").refused("error: stopped by SIGTERM (", code=143, alone=True)


def test_what_a_process_was_started_to_ignore_stays_ignored_and_a_fork_dies_quietly(handled, cli):
    signal.signal(signal.SIGHUP, signal.SIG_IGN)
    signals.install()
    assert signal.getsignal(signal.SIGHUP) is signal.SIG_IGN
    if not (child := os.fork()):
        os.kill(os.getpid(), signal.SIGTERM)
        os._exit(0)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == -signal.SIGTERM and not signals.asked()


def test_handlers_that_a_library_sets_are_taken_back(handled):
    ray = object.__new__(RayWorkers)

    def init(**_):
        signal.signal(signal.SIGTERM, lambda number, _frame: sys.exit(number))
        os.kill(os.getpid(), signal.SIGTERM)

    ray._ray = SimpleNamespace(init=init)
    error = refused("stopped by SIGTERM", ray._connect, None, 2)
    assert error.exit_code == 143 and signal.getsignal(signal.SIGTERM) is signals._on_signal


def test_a_signal_to_the_process_group_spares_processes_that_were_started_for_the_run():
    with signals.kept_from_children():
        child = subprocess.Popen(["sleep", "60"], start_new_session=True)
    os.killpg(child.pid, signal.SIGUSR1)
    child.terminate()
    assert child.wait(10) == -signal.SIGTERM and signal.pthread_sigmask(signal.SIG_BLOCK, ()) == set()
