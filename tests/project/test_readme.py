"""What the README says of commands, decoders, settings and results is what the code says."""

from __future__ import annotations

import re
import sys
from pathlib import Path

import typer

from specbench.cli import build_app
from specbench.runs.settings import run_settings

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT / ".ci"))
README = (ROOT / "README.md").read_text()


def test_generated_blocks_are_fresh():
    from refresh_readme import refresh

    assert refresh(README) == README, "run `make docs`"


def test_every_command_and_flag_in_it_exists():
    group = typer.main.get_command(build_app())
    known = {name: command for name, command in group.commands.items()}
    for line in re.findall(r"specbench ([a-z].*)", " ".join(re.findall(r"`[^`]+`|^    .*$", README, re.MULTILINE))):
        words = line.split("`")[0].split()
        if words[0] not in known:
            continue
        flags = {name for parameter in known[words[0]].params for name in parameter.opts} | {"--help"}
        assert {word for word in words if word.startswith("--")} <= flags, line


def test_every_command_has_help():
    def commands(group):
        for command in group.commands.values():
            yield from commands(command) if hasattr(command, "commands") else [command]

    for command in commands(typer.main.get_command(build_app())):
        assert command.help, command.name
        for parameter in command.params:
            assert parameter.help, (command.name, parameter.name)


def test_the_options_of_run_are_frozen():
    """A new flag is a decision: add it here on purpose. Options of decoders come from the menu of components."""
    fixed = [setting.name for setting in run_settings() if not setting.panel.startswith("Decoder ")]
    assert fixed == [
        *("decoder", "prompts", "limit", "ids", "samples", "seed", "batch", "workers", "ray", "shard", "mode"),
        *("model", "weights", "revision", "random-weights", "scale", "dtype", "device", "threads", "compile"),
        *("cfg", "temperature", "top-k", "top-p"),
        *("out", "trace", "quiet", "json"),
    ]


def test_no_registry_host_or_private_path_is_named():
    words = ("pypi.org", "pythonhosted", "download.pytorch", "/root/", "/work/")
    for name in ("README.md", "Makefile", "pyproject.toml", "constraints.txt", ".ci/run"):
        text = (ROOT / name).read_text()
        assert not [word for word in words if word in text], name
