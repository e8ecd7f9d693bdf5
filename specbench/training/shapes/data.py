"""Training data: rendered scenes, their captions and their tokens, in shards that depend on nothing but their index."""

from __future__ import annotations

from dataclasses import dataclass, fields
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from specbench.models.shapes import captions
from specbench.models.shapes.render import coverage, object_mask, render
from specbench.models.shapes.scene import COLORS, MAX_COUNT, SHAPES, Scene, describe, realize, sample_request
from specbench.models.shapes.tokenizer import GRID, PATCH, TOKENS, ShapesTokenizer

SHARD = 4096
WORDINGS = 4
OWNED = 0.15


def render_batch(count: int, seed: int) -> tuple[Tensor, Tensor]:
    """Images uint8 [N, 3, 64, 64] and object coverage uint8 [N, 64, 64]."""
    rng = np.random.default_rng(seed)
    scenes = [realize(sample_request(rng), rng) for _ in range(count)]
    masks = np.stack([(object_mask(s) * 255).astype(np.uint8) for s in scenes])
    return pixels(scenes), torch.from_numpy(masks)


def pixels(scenes: list[Scene]) -> Tensor:
    """Scenes rendered as uint8 [N, 3, 64, 64]."""
    return torch.from_numpy(np.stack([render(s) for s in scenes])).permute(0, 3, 1, 2).contiguous()


@dataclass
class Shard:
    """N scenes ready for training.

    Attributes:
        tokens: uint16 [N, 256].
        ids: uint8 [N, WORDINGS, 16], captions of the scene, none of them held out.
        owner: uint8 [N, 256], 1 + index of the object that covers a token's patch, 0 for background.
        shape, color: uint8 [N, 4], attributes of each object.
    """

    tokens: Tensor
    ids: Tensor
    owner: Tensor
    shape: Tensor
    color: Tensor

    def save(self, path: Path) -> None:
        torch.save({f.name: getattr(self, f.name) for f in fields(self)}, path)

    @staticmethod
    def load(path: Path) -> Shard:
        return Shard(**torch.load(path))


def owners(scene: Scene) -> np.ndarray:
    """Per token, 1 + index of the object that covers more than `OWNED` of its patch, else 0: uint8 [256]."""
    owner = np.zeros(TOKENS, np.uint8)
    for index, item in enumerate(scene.items):
        share = coverage(item).reshape(GRID, PATCH, GRID, PATCH).mean((1, 3)).reshape(-1)
        owner[share > OWNED] = index + 1
    return owner


def wordings(scene: Scene, rng: np.random.Generator) -> list[list[int]] | None:
    """`WORDINGS` encoded captions of a scene, or None where every try was a held-out meaning."""
    found = []
    for _ in range(40):
        request = describe(scene, rng)
        if not request.held_out():
            found.append(captions.encode(captions.caption(request)))
        if len(found) == WORDINGS:
            return found
    return None


def make_shard(index: int, tokenizer: ShapesTokenizer, plain: float, size: int = SHARD, device: str = "cpu") -> Shard:
    """Shard number `index`; `plain` is the share of scenes forced onto a smooth background."""
    rng = np.random.default_rng([7, index])
    scenes, ids = [], []
    while len(scenes) < size:
        scene = realize(sample_request(rng, plain), rng)
        worded = wordings(scene, rng)
        if worded:
            scenes.append(scene)
            ids.append(worded)
    tokens = [tokenizer.encode(pixels(scenes[i : i + 128]).to(device)).cpu() for i in range(0, size, 128)]
    shape, color = np.zeros((size, MAX_COUNT), np.uint8), np.zeros((size, MAX_COUNT), np.uint8)
    for row, scene in enumerate(scenes):
        for column, item in enumerate(scene.items):
            shape[row, column], color[row, column] = SHAPES.index(item.shape), COLORS.index(item.color)
    return Shard(
        torch.cat(tokens).to(torch.uint16),
        torch.tensor(ids, dtype=torch.uint8),
        torch.from_numpy(np.stack([owners(s) for s in scenes])),
        torch.from_numpy(shape),
        torch.from_numpy(color),
    )
