"""No test of `make test` takes more than a few CPU seconds, its child processes and its share of fixtures counted.
Processor time, not time on the clock: other work on the machine hardly changes it. The remaining effect is measured if
a test is about to fail. A fixture of a module or class is shared by the tests that use it; what a whole session shares
is nobody's."""

import os
from collections import Counter
from collections.abc import Container

import pytest

LIMIT_S = 3.0
"""CPU seconds that a test may take on a quiet core."""
MARGIN = 3.0
"""A test fails if it takes so many times the limit: threads of a core slow each other, and a test of 3.6 CPU seconds
on one machine took 6.1 on another of the same kind."""
EXCEPTIONS = {
    "cli/test_commands.py::test_interrupting_says_how_to_resume": "a signal is answered by a whole process",
    "cli/test_commands.py::test_a_full_disk_behind_a_stream_is_one_line_or_nothing_and_ends_no_run": "whole processes",
    "cli/test_fuzzed_input.py::test_every_input_is_accepted_rightly_or_refused_in_one_line": "each reader and case",
    "models/test_compilation.py::test_a_compiled_model_may_be_changed_in_place": "the test that compiles a network",
    "models/test_eight_bits.py::test_a_run_is_another_model_and_the_audit_measures_how_far_it_is_from_the_plain_one": (
        "three runs and two audits, the only ones in eight bits"
    ),
    "project/test_docs.py::test_generated_blocks_are_fresh": "README's block is a report of 832 images",
    "reporting/test_paper.py::test_an_own_table_is_measured_and_each_mistake_is_a_line": "two runs, each mistake once",
    "stats/test_speed.py::test_a_figure_of_a_busy_machine_is_not_kept": "times a machine as long as doctor does",
    "project/test_user_path.py::test_from_a_checkpoint_and_published_prompts_to_a_scored_report": "a user's every step",
}
"""Tests that may take longer, each with its reason."""
_REFERENCE_S = 0.065
"""CPU seconds of `_reference_s` on a quiet core of a server of 2023."""


def cpu_seconds() -> float:
    """CPU seconds of this process and of its children that have ended."""
    return sum(os.times()[:4])


def _reference_s() -> float:
    since = cpu_seconds()
    sum(number * number % 7 for number in range(1_200_000))
    return cpu_seconds() - since


class CpuLimit:
    """Plugin that fails tests over a limit, in CPU seconds."""

    def __init__(self, limit: float = LIMIT_S, exceptions: Container[str] = frozenset(EXCEPTIONS)) -> None:
        self._limit, self._exceptions = limit, exceptions
        self._users: Counter[object] = Counter()
        self._made: Counter[object] = Counter()
        self._since, self._shared = 0.0, 0.0

    def pytest_collection_finish(self, session: pytest.Session) -> None:
        for item in session.items:
            self._users.update(_fixtures(item))

    @pytest.hookimpl(wrapper=True)
    def pytest_fixture_setup(self, fixturedef):
        since, below = cpu_seconds(), self._shared
        try:
            return (yield)
        finally:
            if fixturedef.scope != "function":
                taken = cpu_seconds() - since - (self._shared - below)  # without those that it asked for
                self._shared += taken
                self._made[fixturedef] += 0 if fixturedef.scope == "session" else taken

    @pytest.hookimpl(wrapper=True, tryfirst=True)
    def pytest_runtest_setup(self, item):
        self._since, self._shared = cpu_seconds(), 0.0
        return (yield)

    @pytest.hookimpl(wrapper=True, trylast=True)
    def pytest_runtest_call(self, item):
        outcome = yield
        share = sum(self._made[fixture] / self._users[fixture] for fixture in _fixtures(item))
        taken = cpu_seconds() - self._since - self._shared + share
        name = item.nodeid.partition("[")[0].removeprefix("tests/")
        exempt = item.get_closest_marker("slow") or name in self._exceptions
        if taken > self._limit * MARGIN and not exempt:
            taken /= max(1.0, min(_reference_s() for _ in range(3)) / _REFERENCE_S)
            if taken > self._limit * MARGIN:
                advice = "make it smaller, mark it slow, or name it among the EXCEPTIONS of cpu_limit with a reason"
                pytest.fail(f"{taken:.1f} CPU seconds, more than {self._limit:g}: {advice}", pytrace=False)
        return outcome


def _fixtures(item: pytest.Item) -> list[object]:
    """Fixtures of a test that others also use."""
    info = getattr(item, "_fixtureinfo", None)
    named = info.name2fixturedefs.values() if info else ()
    return [definitions[-1] for definitions in named if definitions[-1].scope != "function"]
