"""The public Python API covers the commands, is documented, and costs nothing to import."""

import inspect

import pytest
import typer

import specbench
from specbench import cli

FUNCTIONS = [name for name in specbench.__all__ if not name.startswith("_") and name != "SpecbenchError"]
OF_COMMAND = {
    "figure": "report",  # its frame has `.plot()` and `.images()`
    "import": "import_results",
    "list": "available",
    "merge": "merge_runs",
    "methods": "methods_paragraph",
    "prompts show": "show_prompts",
}


def test_every_command_has_its_function():
    app = typer.main.get_command(cli.build_app())
    parts = {name: getattr(command, "commands", [""]) for name, command in app.commands.items()}
    names = [" ".join(filter(None, (name, part))) for name in parts for part in parts[name]]
    assert {OF_COMMAND.get(name, name.replace("-", "_")) for name in names} <= set(FUNCTIONS)


@pytest.mark.parametrize("name", FUNCTIONS)
def test_every_function_says_what_it_takes_returns_and_raises(name):
    function = getattr(specbench, name)
    text = inspect.getdoc(function)
    assert "Returns:" in text and "Raises:" in text, name
    assert not inspect.signature(function).parameters or "Args:" in text or name == "report_page"


def test_an_unknown_name_is_an_attribute_error():
    with pytest.raises(AttributeError, match="no attribute 'nothing'"):
        specbench.nothing  # noqa: B018
