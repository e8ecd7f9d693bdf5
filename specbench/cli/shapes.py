"""Command `specbench shapes`: renderer of the embedded model's training images."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from specbench.cli.commands import CommandLine, help_of
from specbench.cli.options import option
from specbench.errors import SpecbenchError
from specbench.runs.settings import MAX_SEED


def add_to(parent: typer.Typer) -> None:
    app = CommandLine(help=help_of("shapes"), no_args_is_help=True)
    app.callback()(lambda: None)
    app.command(name="render", help="Render a caption as a PNG file, and print its path.")(render)
    parent.add_typer(app, name="shapes")


def render(
    caption: Annotated[str, typer.Argument(metavar="CAPTION", help="For example: three red circles")],
    out: Annotated[Path, option("--out", "FILE", "PNG file to write.")] = Path("shapes.png"),
    seed: Annotated[int, option("--seed", "N", "Seed of the random positions and colours.")] = 0,
    count: Annotated[int, option("--count", "N", "Number of images side by side.")] = 1,
    scale: Annotated[int, option("--scale", "N", "Screen pixels per image pixel.")] = 4,
) -> None:
    if not 0 <= seed <= MAX_SEED:
        raise SpecbenchError(f"--seed {seed}: must be between 0 and {MAX_SEED}")
    from specbench.models.shapes.caption_images import render_shapes

    print(render_shapes(caption, out, seed, count, scale))
