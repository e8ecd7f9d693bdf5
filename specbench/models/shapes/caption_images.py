"""Images of captions, drawn by the renderer of the training images (not by the model)."""

from __future__ import annotations

from pathlib import Path

import numpy as np
from PIL import Image

from specbench.errors import SpecbenchError
from specbench.models.shapes.captions import parse
from specbench.models.shapes.render import render
from specbench.models.shapes.scene import realize

MAX_COUNT, MAX_SCALE = 64, 32


def render_shapes(caption: str, out: str | Path = "shapes.png", seed: int = 0, count: int = 1, scale: int = 4) -> Path:
    """Render a caption as the training images of `shapes` are rendered (`specbench shapes render`).

    Args:
        caption: for example "three red circles".
        out: PNG file to write.
        seed: of the random positions and colours.
        count: number of images side by side.
        scale: screen pixels per image pixel.

    Returns:
        The file.

    Raises:
        SpecbenchError: a caption that `shapes` has no words for, a number out of range, or an unwritable file.
    """
    for name, value, low, high in (("count", count, 1, MAX_COUNT), ("scale", scale, 1, MAX_SCALE)):
        if not low <= value <= high:
            raise SpecbenchError(f"--{name} {value}: must be between {low} and {high}")
    request = parse(caption)
    scenes = [realize(request, np.random.default_rng((seed, index))) for index in range(count)]
    picture = np.concatenate([render(scene) for scene in scenes], axis=1).repeat(scale, 0).repeat(scale, 1)
    try:
        Image.fromarray(picture).save(out, format="png")
    except OSError as error:
        raise SpecbenchError(f"--out {out}: cannot write there ({error.strerror or error})") from None
    return Path(out)
