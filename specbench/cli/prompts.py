"""Command `specbench prompts`: download public prompt sets, and print prompts."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from specbench.cli import completion
from specbench.cli.commands import CommandLine, help_of
from specbench.cli.options import Json, Offline, flags, option, switch
from specbench.cli.output import print_json, print_table
from specbench.runs.settings import COLUMN, DRAWN, merge
from specbench.system import console

_Name = Annotated[
    str,
    typer.Argument(
        metavar="NAME", help="Prompt set, one of 'specbench list prompts'.", autocompletion=completion.prompt_sets
    ),
]
_NameOrFile = Annotated[
    str,
    typer.Argument(
        metavar="NAME|FILE", help="Prompt set, or file with prompts.", autocompletion=completion.prompt_sets
    ),
]


def add_to(parent: typer.Typer) -> None:
    app = CommandLine(help=help_of("prompts"), no_args_is_help=True)
    app.callback()(lambda: None)
    app.command(
        name="fetch",
        help="Download a public prompt set and verify its digests; resumes a partial download.",
    )(fetch)
    app.command(
        name="show", help="Print the prompts of a set or file, or those that a run with the same options decodes."
    )(show)
    parent.add_typer(app, name="prompts")


def fetch(
    name: _Name,
    source: Annotated[Path | None, option("--from", "PATH", "Import this local copy instead of downloading.")] = None,
    images: Annotated[bool, switch("--images", "Download the reference images of the set instead.")] = False,
    offline: Offline = False,
) -> None:
    from specbench.prompts import downloadable, fetch_prompts

    found = downloadable(name)
    if images:
        size = f", {found.images.archive.size / 1e6:.0f} MB" if found.images else ""
        licence = f": {found.images.count} images{size}; {found.images.licence}" if found.images else ""
        console.say(f"reference images of {found.name}{licence}")
    elif source is None:
        size = f"{found.download_size / 1e6:.0f} MB, " if found.download_size else ""
        console.say(f"{found.name}: {found.prompts} prompts ({size}{found.licence}; {found.page})")
    with console.transfer("images" if images else found.name) as progress:
        folder = fetch_prompts(name, images, source, offline, progress)
    console.say(f"{'images' if images else 'prompts'} of {found.name} are complete")
    print(folder)


@flags((COLUMN, *DRAWN))
def show(
    flags: dict,
    name: _NameOrFile,
    json: Json = False,
) -> None:
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
