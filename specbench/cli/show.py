"""Command `specbench show`: the card of a run or of one of its images."""

from __future__ import annotations

import sys
from typing import Annotated

import typer
from rich.console import Console

from specbench.cli import completion
from specbench.cli.commands import help_of
from specbench.cli.options import Json, Out, Run, option
from specbench.cli.output import print_json
from specbench.errors import SpecbenchError

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
    from specbench.reporting import cards as cards_of
    from specbench.reporting.terminal import image_view, run_view
    from specbench.store.run_folders import find_runs

    folders = find_runs(out, [run])
    if prompt is not None and len(folders) > 1:
        raise SpecbenchError(f"'{run}' matches {len(folders)} runs", "name the run of the image")
    screen = Console(highlight=False, width=None if sys.stdout.isatty() else _PLAIN_WIDTH)
    if prompt is None:
        cards = [cards_of.card(folder) for folder in folders]
        views = map(run_view, cards)
    else:
        card, tile = cards_of.image_card(folders[0], prompt, sample)
        cards, views = [card], [image_view(card, tile, screen)]
    if json:
        return print_json(cards)
    for view in views:
        with screen.capture() as text:
            screen.print(view)
        print("\n".join(line.rstrip() for line in text.get().splitlines()))
