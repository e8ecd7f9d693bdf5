"""`specbench fetch`."""

from __future__ import annotations

from typing import Annotated

import typer

from specbench.cli import completion
from specbench.cli.commands import help_of
from specbench.cli.options import Json, Quiet, metric_option, protocol_option, switch
from specbench.cli.output import print_json
from specbench.errors import SpecbenchError
from specbench.system import console

_HELP = help_of(
    "fetch",
    "A model, a table of a paper (its models, prompts and metrics), a prompt set, a metric, or a repository or file of "
    "weights that one of these reads. 'run', 'bench' and 'score' download what they lack by themselves.",
)
_Names = Annotated[
    list[str] | None,
    typer.Argument(metavar="NAME", help="What to download.", show_default=False, autocompletion=completion.fetchable),
]
_Images = Annotated[bool, switch("--images", "With a prompt set: its reference images too.")]

_Scores = Annotated[bool, switch("--scores", "With a model: the networks of the metrics of its images too.")]


def add_to(app: typer.Typer) -> None:
    app.command(name="fetch", help=_HELP)(fetch)


def fetch(
    names: _Names = None,
    metric: Annotated[list[str] | None, metric_option("A metric; may be repeated.")] = None,
    protocol: Annotated[str | None, protocol_option("The metrics")] = None,
    images: _Images = False,
    scores: _Scores = False,
    quiet: Quiet = False,
    json: Json = False,
) -> None:
    if not (names or metric or protocol):
        raise SpecbenchError("nothing to fetch", "name a model, a table or a prompt set: specbench fetch janus")
    if quiet:
        console.show_progress(False)
    from specbench.papers import downloads

    rows = downloads.fetch(names or (), metric or (), protocol, images, scores)
    if json:
        return print_json(rows)
    asked = ", ".join([*(names or ()), *(metric or ()), *([f"protocol {protocol}"] if protocol else [])])
    if not quiet:
        console.say(f"{asked}: complete on this disk")
    for folder in dict.fromkeys(str(row["folder"]) for row in rows):
        print(folder)
