"""The public Python API covers the commands, is documented, and costs nothing to import."""

from __future__ import annotations

import inspect
import subprocess
import sys

import pytest

import specbench
from specbench import cli

FUNCTIONS = [name for name in specbench.__all__ if not name.startswith("_") and name != "SpecbenchError"]
OF_COMMAND = {"import": "import_results", "list": "available", "merge": "merge_runs"}
WITHOUT_FUNCTION = {"show", "demo", "prompts", "shapes", "train-head", "check-head"}


def test_every_command_has_its_function():
    commands = {command for found in cli._MODULES.values() for command in found} - WITHOUT_FUNCTION
    assert {OF_COMMAND.get(command, command) for command in commands} <= set(FUNCTIONS)


@pytest.mark.parametrize("name", FUNCTIONS)
def test_every_function_says_what_it_takes_returns_and_raises(name):
    function = getattr(specbench, name)
    text = inspect.getdoc(function)
    assert "Returns:" in text and "Raises:" in text, name
    assert not inspect.signature(function).parameters or "Args:" in text or name == "report_page"


def test_importing_it_brings_nothing_heavy():
    code = "import sys, specbench, specbench.api; print(sorted({'torch', 'pandas', 'pyarrow'} & set(sys.modules)))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


def test_an_unknown_name_is_an_attribute_error():
    with pytest.raises(AttributeError, match="no attribute 'nothing'"):
        specbench.nothing  # noqa: B018
