"""`specbench fetch`, and `specbench prompts show`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from specbench.cli import completion
from specbench.cli.commands import CommandLine, help_of
from specbench.cli.options import Json, Quiet, flags, metric_option, option, protocol_option, switch
from specbench.cli.output import print_json, print_table
from specbench.errors import SpecbenchError
from specbench.runs.settings import COLUMN, DRAWN, merge
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
_From = Annotated[
    Path | None, option("--from", "PATH", "Import this local copy of a prompt set, or with --images of its images.")
]
_Images = Annotated[bool, switch("--images", "With a prompt set: its reference images too.")]
_Scores = Annotated[bool, switch("--scores", "With a model: the networks of the metrics of its images too.")]


def add_to(app: typer.Typer) -> None:
    app.command(name="fetch", help=_HELP)(fetch)
    prompts = CommandLine(help=help_of("prompts"), no_args_is_help=True)
    prompts.callback()(lambda: None)
    prompts.command(
        name="show", help="Print the prompts of a set or file, or those that a run with the same options decodes."
    )(show)
    app.add_typer(prompts, name="prompts")


def fetch(
    names: _Names = None,
    metric: Annotated[list[str] | None, metric_option("A metric; may be repeated.")] = None,
    protocol: Annotated[str | None, protocol_option("The metrics")] = None,
    source: _From = None,
    images: _Images = False,
    scores: _Scores = False,
    quiet: Quiet = False,
    json: Json = False,
) -> None:
    if not (names or metric or protocol):
        raise SpecbenchError("nothing to fetch", "name a model, a table or a prompt set: specbench fetch janus")
    if source:
        from specbench.prompts import fetch_prompts

        if len(names or ()) != 1:
            raise SpecbenchError("--from is a copy of one prompt set", "name it: specbench fetch coco --from COPY")
        return print(fetch_prompts(names[0], images, source))
    from specbench.papers import downloads

    rows = downloads.fetch(names or (), metric or (), protocol, images, scores)
    if json:
        return print_json(rows)
    asked = ", ".join([*(names or ()), *(metric or ()), *([f"protocol {protocol}"] if protocol else [])])
    if not quiet:
        console.say(f"{asked}: complete on this disk")
    for folder in dict.fromkeys(str(row["folder"]) for row in rows):
        print(folder)


_NameOrFile = Annotated[
    str,
    typer.Argument(
        metavar="NAME|FILE", help="Prompt set, or file with prompts.", autocompletion=completion.prompt_sets
    ),
]


@flags((COLUMN, *DRAWN))
def show(flags: dict, name: _NameOrFile, json: Json = False) -> None:
    from specbench import api

    values = merge((COLUMN, *DRAWN), flags)
    chosen = {setting.name: values[setting.name].value for setting in DRAWN}
    rows = api.show_prompts(
        name, chosen["limit"], chosen["offset"], chosen["sample"], chosen["per-category"], chosen["category"],
        chosen["ids"], values["prompt-column"].value,
    )  # fmt: skip
    if json:
        print_json(rows)
    else:
        print_table([row | {"text": " ".join(row["text"].split())} for row in rows], ("id", "category", "text"))
