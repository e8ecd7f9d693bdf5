"""The rule of `tests/support/cpu_limit.py`: what a test is charged for, and when it fails."""

from pathlib import Path

import cpu_limit
import pytest

pytest_plugins = ["pytester"]
SUITE = """
import os, subprocess, sys, pytest

SPIN = "import time\\nwhile time.process_time() < 0.4: pass"

@pytest.fixture(scope="module")
def shared():
    subprocess.run([sys.executable, "-c", SPIN])

@pytest.mark.parametrize("n", range(4))
def test_shares(shared, n): pass

def test_starts_a_process(): subprocess.run([sys.executable, "-c", SPIN])
def test_named(): subprocess.run([sys.executable, "-c", SPIN])
@pytest.mark.slow
def test_slow(): subprocess.run([sys.executable, "-c", SPIN])
"""


@pytest.mark.parametrize(
    ("slowness", "too_long"), [(1, ["test_it.py::test_starts_a_process"]), (3, [])], ids=["quiet core", "slow core"]
)
def test_a_test_is_charged_for_its_processes_and_its_share_of_fixtures(pytester, monkeypatch, slowness, too_long):
    monkeypatch.setattr(cpu_limit, "_reference_s", lambda: slowness * cpu_limit._REFERENCE_S)
    pytester.makepyfile(test_it=SUITE)
    pytester.makeini("[pytest]\nmarkers = slow")
    done = pytester.inline_run("-p", "no:cacheprovider", plugins=[cpu_limit.CpuLimit(0.1, {"test_it.py::test_named"})])
    assert [report.nodeid for report in done.getfailures()] == too_long


def test_exceptions_are_few_and_name_tests_and_reasons():
    assert len(cpu_limit.EXCEPTIONS) <= cpu_limit.MOST_EXCEPTIONS
    for name, reason in cpu_limit.EXCEPTIONS.items():
        path, _, function = name.partition("::")
        assert f"def {function}(" in (Path(__file__).parents[1] / path).read_text() and reason
