"""Runs whose images are drawn by the renderer of `shapes`."""

from collections.abc import Callable
from pathlib import Path

import numpy as np
import synthetic

from specbench.models.shapes import render, scene
from specbench.prompts import Prompt


def drawn_run(
    out: Path,
    n: int = 6,
    wrong: tuple[int, ...] = (),
    spec=synthetic.SJD,
    samples: int = 1,
    meta: Callable[[int], dict] = lambda number: {},
) -> Path:
    """A run whose images are drawn by the renderer: what was asked for, or an empty ground where `wrong`. `meta` is
    added to the metadata of each prompt."""
    rng = np.random.default_rng(0)
    requests = [
        scene.SceneRequest((scene.Clause("circle", "red"),)),
        scene.SceneRequest((scene.Clause("square", None, 2),)),
    ]
    asked = [requests[number % 2] for number in range(n)]
    prompts = [
        Prompt(f"s{number}", "drawn", request.category, {"scene": request.to_json()} | meta(number))
        for number, request in enumerate(asked)
    ]

    def picture(image: int) -> np.ndarray:
        number = image // samples
        shown = scene.Scene((), "smooth") if number in wrong else scene.realize(asked[number], rng)
        return np.moveaxis(render.render(shown), -1, 0)

    return synthetic.pictured(out, prompts, samples, spec, picture)
