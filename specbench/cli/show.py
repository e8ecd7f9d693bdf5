"""Command `specbench show`: the card of a run or of one of its images."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console, RenderableType

from specbench.cli import completion
from specbench.cli.commands import help_of
from specbench.cli.options import Json, Out, Run, option
from specbench.cli.output import print_json
from specbench.errors import SpecbenchError

# Imports inside functions: each command waits only for what it needs, `--help` and completion for nothing.

_PLAIN_WIDTH = 120
_Prompt = Annotated[
    str | None,
    typer.Argument(
        metavar="PROMPT",
        help="Prompt id, prefix of an id, or words of the prompt.",
        show_default="the run",
        autocompletion=completion.prompt_ids,
    ),
]


def add_to(app: typer.Typer) -> None:
    app.command(name="show", help=help_of("show"))(show)


def show(
    run: Run,
    prompt: _Prompt = None,
    sample: Annotated[int, option("--sample", "N", "Sample index of the image.", min=0)] = 0,
    out: Out = "results",
    json: Json = False,
) -> None:
    from specbench.store.run_folders import find_runs

    folders = find_runs(out, [run])
    if prompt is None:
        _show_runs(folders, json)
    elif len(folders) > 1:
        raise SpecbenchError(f"'{run}' matches {len(folders)} runs", "name the run of the image")
    else:
        _show_image(folders[0], prompt, sample, json)


def _show_runs(folders: list[Path], as_json: bool) -> None:
    from specbench.reporting.cards import card

    cards = [card(folder) for folder in folders]
    if as_json:
        return print_json(cards)
    from specbench.reporting.terminal import run_view

    for one in cards:
        _print(_console(), run_view(one))


def _show_image(folder: Path, prompt: str, sample: int, as_json: bool) -> None:
    from specbench.reporting.cards import image_card

    card, tile = image_card(folder, prompt, sample)
    if as_json:
        return print_json([card])
    from specbench.reporting.terminal import image_view

    console = _console()
    _print(console, image_view(card, tile, console))


def _console() -> Console:
    return Console(highlight=False, width=None if sys.stdout.isatty() else _PLAIN_WIDTH)


def _print(console: Console, view: RenderableType) -> None:
    """Print a view without trailing spaces."""
    with console.capture() as text:
        console.print(view)
    print("\n".join(line.rstrip() for line in text.get().splitlines()))
