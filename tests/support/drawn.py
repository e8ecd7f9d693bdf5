"""Runs whose images are drawn by the renderer of `shapes`."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import synthetic

from specbench.models.shapes import render, scene
from specbench.prompts import Prompt, Request
from specbench.store.run_store import RunStore
from specbench.store.schema import base_row, sample_row


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
    with RunStore(out / spec.run_id).lock(spec).begin(spec, synthetic.INVOCATION) as store:
        for number in range(n):
            request = requests[number % 2]
            prompt = Prompt(f"s{number}", "drawn", request.category, {"scene": request.to_json()} | meta(number))
            for sample in range(samples):
                picture = scene.Scene((), "smooth") if number in wrong else scene.realize(request, rng)
                item = synthetic.generation(4, 40.0)
                item.image = np.moveaxis(render.render(picture), -1, 0)
                row = sample_row(
                    base_row(Request.of(prompt, sample), 0, synthetic.INVOCATION["started_at"]), item, True
                )
                store.append([row], {row["image"]: item.image})
    return store.folder
