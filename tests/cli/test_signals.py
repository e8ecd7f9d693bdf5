"""The process around the command line: restart with docstrings."""

from __future__ import annotations

import os
import sys
from types import SimpleNamespace

import pytest

from specbench import __main__ as process


@pytest.mark.parametrize(
    ("typed", "variable", "restarted"),
    [
        (["python", "-OO", "-m", "specbench", "list"], None, ["-m", "specbench", "list"]),
        (["python", "bin/specbench", "list"], "2", ["bin/specbench", "list"]),
        (["python", "-OOB", "-m", "specbench"], "1", None),
    ],
)
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
