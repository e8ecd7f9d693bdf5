"""Command `specbench shapes`: renderer of the embedded model's training images."""

from __future__ import annotations

from pathlib import Path

import typer

from specbench.cli.commands import CommandLine, help_of
from specbench.errors import SpecbenchError
from specbench.runs.settings import MAX_SEED

# Imports inside functions: each command waits only for what it needs, `--help` and completion for nothing.


def add_to(parent: typer.Typer) -> None:
    app = CommandLine(help=help_of("shapes"), no_args_is_help=True)
    app.callback()(lambda: None)
    app.command(name="render", help="Render a caption as a PNG file, and print its path.")(render)
    parent.add_typer(app, name="shapes")


def render(
    caption: str = typer.Argument(metavar="CAPTION", help="For example: three red circles"),
    out: Path = typer.Option(
        Path("shapes.png"), "--out", metavar="FILE", help="PNG file to write.", show_default="shapes.png"
    ),
    seed: int = typer.Option(
        0, "--seed", metavar="N", help="Seed of the random positions and colours.", show_default=True
    ),
    count: int = typer.Option(1, "--count", metavar="N", help="Number of images side by side.", show_default=True),
    scale: int = typer.Option(4, "--scale", metavar="N", help="Screen pixels per image pixel.", show_default=True),
) -> None:
    if not 0 <= seed <= MAX_SEED:
        raise SpecbenchError(f"--seed {seed}: must be between 0 and {MAX_SEED}")
    from specbench.models.shapes.caption_images import render_shapes

    print(render_shapes(caption, out, seed, count, scale))
