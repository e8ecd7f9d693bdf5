"""Commands of the command line: the module that defines each, the first paragraph of its help, and the groups that hold
them.

`specbench --help` prints this and imports none of these modules.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import typer
from typer.core import TyperCommand, TyperGroup

COMPLETION = "_SPECBENCH_COMPLETE"
"""Variable by which a shell asks for completion of a line."""
COMMANDS = {
    "run": ("run", "Decode a prompt set with one or several decoders, and store images and measurements."),
    "merge": ("merge", "Merge the shards of runs, and print the run folders."),
    "score": ("results", "Score the images of runs; existing scores are kept."),
    "report": ("results", "Print the tables of runs: speed, quality, and the definition of each number."),
    "show": ("show", "Print settings and results of a run, or of one of its images."),
    "bench": (
        "bench",
        "Reproduce a paper's table: decode and score what is missing, and print measured beside printed values.",
    ),
    "compare": (
        "compare",
        "Compare two runs on their common images: speed-up, score differences, and their significance.",
    ),
    "forecast": (
        "forecast",
        "Forecast the speed of decoders on a device that is not here. Nothing is measured, nothing is stored.",
    ),
    "list": ("listing", "List models, decoders, metrics, prompt sets, papers' tables, or runs."),
    "export": ("official", "Export the images of a run in the layout of a benchmark's official evaluator."),
    "import": ("official", "Import the results of a benchmark's official evaluator as scores of a run."),
    "fetch": (
        "fetch",
        "Download models, prompts and metrics beforehand; complete files are kept after a cut.",
    ),
    "doctor": ("checks", "Check whether this machine is ready to run, and print how to fix problems."),
    "audit": ("checks", "Measure whether a decoder is lossless."),
    "check": ("checks", "Run the conformance tests on a decoder, a model, a metric or a prompt set."),
    "train-head": ("heads", "Train a draft head for a model, and print its folder."),
    "check-head": ("heads", "Measure the total variation between draft head and target by draft depth."),
    "demo": (
        "demo",
        "Compare decoders on the embedded model: run, score, print a table, draw an image grid. Takes a few minutes.",
    ),
    "prompts": ("prompts", "Download public prompt sets, and print prompts."),
    "shapes": ("shapes", "Render captions of the embedded model `shapes`."),
}
"""Module and first paragraph of help by command, in the order of `--help`."""


def help_of(command: str, *paragraphs: str) -> str:
    """Help of a command: its first paragraph and further ones."""
    return "\n\n".join((COMMANDS[command][1], *paragraphs))


class _PlainSwitches:
    """Mixin of commands: a switch is printed as --quiet, not as `--quiet <bool>`; --help is one of them."""

    def get_params(self, ctx: Any) -> list[Any]:
        parameters = super().get_params(ctx)  # type: ignore[misc]
        for one in parameters:
            if getattr(one, "is_flag", False) and one.metavar is None:
                one.metavar = ""
        return parameters


class Command(_PlainSwitches, TyperCommand):
    """A command of specbench."""


class Group(_PlainSwitches, TyperGroup):
    """A command of specbench that has commands of its own."""


class CommandLine(typer.Typer):
    """Group of commands; arguments as for `typer.Typer`."""

    def __init__(self, **settings: Any) -> None:
        super().__init__(cls=Group, **settings)

    def command(self, name: str | None = None, **settings: Any) -> Callable:
        return super().command(name, cls=Command, **settings)
