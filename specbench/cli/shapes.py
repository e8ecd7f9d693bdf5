"""Command `specbench shapes`: renderer of the embedded model's training images."""

from __future__ import annotations

from pathlib import Path

import typer

from specbench.errors import SpecbenchError
from specbench.runs.settings import MAX_SEED


def add_to(parent: typer.Typer) -> None:
    app = typer.Typer(help="Render captions of the embedded model `shapes`.", no_args_is_help=True)
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
    for name, value, low, high in (("seed", seed, 0, MAX_SEED), ("count", count, 1, 64), ("scale", scale, 1, 32)):
        if not low <= value <= high:
            raise SpecbenchError(f"--{name} {value}: must be between {low} and {high}")
    import numpy as np
    from PIL import Image

    from specbench.models.shapes import captions
    from specbench.models.shapes.render import render as draw
    from specbench.models.shapes.scene import realize

    try:
        request = captions.parse(caption)
    except captions.CaptionError as error:
        raise SpecbenchError(str(error)) from None
    drawn = [draw(realize(request, np.random.default_rng((seed, index)))) for index in range(count)]
    picture = np.concatenate(drawn, axis=1).repeat(scale, 0).repeat(scale, 1)
    try:
        Image.fromarray(picture).save(out, format="png")
    except OSError as error:
        raise SpecbenchError(f"--out {out}: cannot write there ({error.strerror or error})") from None
    print(out)
