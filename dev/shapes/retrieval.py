"""Measure how well the small CLIP distinguishes captions, on fresh renders and meanings that training never saw."""

from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from dev.shapes.negatives import near_misses
from dev.shapes.train_clip import request_of, scenes_with_captions, true_pairs
from specbench.metrics.openclip import (
    folder_tokenizer,
    image_embeddings,
    load_folder_model,
    normalised,
    text_embeddings,
)
from specbench.metrics.shapes import CLIP_FOLDER
from specbench.models.shapes import captions
from specbench.models.shapes.render import render
from specbench.models.shapes.scene import SceneRequest

GALLERY = 64
MISSES = 4


def retrieval(folder: Path = CLIP_FOLDER, batches: int = 8, seed: int = 1) -> dict[str, object]:
    """Shares of correct choices by cosine, in batches of 64 renders with held-out captions.

    Returns:
        `caption_of_64` and `image_of_64`: the right item is nearest among 64, ignoring items that are also right;
        `near_misses`: the caption beats a false caption that differs in a single attribute, by category of the caption;
        a guess scores 0.5.
    """
    rng = np.random.default_rng([14, seed])
    model, words = load_folder_model(folder, "cpu"), folder_tokenizer(folder)
    hits: dict[str, list[bool]] = {"caption": [], "image": []}
    beaten: dict[str, list[bool]] = {}
    for _ in range(batches):
        scenes = scenes_with_captions(GALLERY, rng, held_out=True)
        requests = [request for scene in scenes if (request := request_of(scene, rng, held_out=True))]
        images = image_embeddings(model, [normalised(render(scene)) for scene in scenes], "cpu")

        def embed(asked: list[SceneRequest]) -> Tensor:
            return text_embeddings(model, [captions.caption(request) for request in asked], "cpu", words)

        cosines = images @ embed(requests).T
        others = true_pairs(requests, scenes) & ~torch.eye(GALLERY, dtype=torch.bool)
        target = torch.arange(GALLERY)
        hits["caption"] += (cosines.masked_fill(others, -2).argmax(1) == target).tolist()
        hits["image"] += (cosines.masked_fill(others, -2).argmax(0) == target).tolist()
        for row, (request, scene) in enumerate(zip(requests, scenes, strict=True)):
            wrong = near_misses(request, scene, MISSES, rng)
            below = (embed(wrong) @ images[row] < cosines[row, row]).tolist() if wrong else []
            beaten.setdefault(request.category, []).extend(below)
    pairs = [hit for rows in beaten.values() for hit in rows]
    return {
        "caption_of_64": _share(hits["caption"]),
        "image_of_64": _share(hits["image"]),
        "near_misses": {"all": _share(pairs)} | {name: _share(rows) for name, rows in sorted(beaten.items())},
    }


def _share(hits: list[bool]) -> float:
    return round(float(np.mean(hits)), 4)
