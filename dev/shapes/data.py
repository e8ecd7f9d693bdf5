"""Training data: rendered scenes, their captions and their tokens, in shards that depend only on their index.

`python -m dev.shapes.data` makes shards ahead of a training run, in a separate process. It uses the tokenizer
of the run, or the shipped tokenizer if the run has no tokenizer.
"""

from __future__ import annotations

import argparse
import json
import os
from dataclasses import dataclass, fields
from pathlib import Path

import numpy as np
import torch
from safetensors.torch import save_file
from torch import Tensor

from specbench.models.shapes import captions
from specbench.models.shapes.network import WEIGHTS, ShapesNetwork, load_tokenizer
from specbench.models.shapes.render import ground, render
from specbench.models.shapes.scene import (
    COLORS,
    MAX_COUNT,
    SHAPES,
    SIZE,
    Scene,
    describe,
    realize,
    realize_in_order,
    sample_request,
    worded_in_reading_order,
)
from specbench.models.shapes.tokenizer import GRID, PATCH, TOKENS, ShapesTokenizer

SHARD = 4096
WORDINGS = 4


def save(network: ShapesNetwork, tokenizer: ShapesTokenizer, extra: dict, folder: Path = WEIGHTS) -> None:
    """Write both modules as fp16 safetensors and config.json with the entries of `extra`."""
    folder.mkdir(parents=True, exist_ok=True)
    for name, module in (("network", network), ("tokenizer", tokenizer)):
        state = {key: value.detach().cpu().half().contiguous() for key, value in module.state_dict().items()}
        save_file(state, folder / f"{name}.safetensors", metadata={"format": "pt"})
    config = {"network": network.config, "tokenizer": tokenizer.config, **extra}
    (folder / "config.json").write_text(json.dumps(config, indent=2) + "\n")


def card_mask(scene: Scene) -> np.ndarray:
    """Object whose card covers each pixel: 1 + index of the object, 0 for background, uint8 [64, 64]."""
    owner = np.zeros((SIZE, SIZE), np.uint8)
    for index, item in enumerate(scene.items):
        left, top, right, bottom = item.card
        owner[top:bottom, left:right] = index + 1
    return owner


def noisy_rows(scene: Scene) -> tuple[int, int]:
    """First and last (exclusive) token row of the noisy part of the background; equal if no part is noisy."""
    if scene.texture not in ("cloudy", "grainy"):
        return 0, 0
    _, rows = ground(np.random.default_rng(scene.seed))
    whole = SIZE // PATCH
    return (0, rows) if scene.texture == "cloudy" else (whole - rows, whole)


def render_batch(count: int, seed: int) -> tuple[Tensor, Tensor]:
    """Images uint8 [N, 3, 64, 64] and which pixels show an object and its card, bool [N, 64, 64]."""
    rng = np.random.default_rng(seed)
    scenes = [realize(sample_request(rng), rng) for _ in range(count)]
    masks = np.stack([card_mask(s) > 0 for s in scenes])
    return pixels(scenes), torch.from_numpy(masks)


def pixels(scenes: list[Scene]) -> Tensor:
    """Scenes rendered as uint8 [N, 3, 64, 64]."""
    return torch.from_numpy(np.stack([render(s) for s in scenes])).permute(0, 3, 1, 2).contiguous()


@dataclass
class Shard:
    """N scenes ready for training.

    Attributes:
        tokens: uint16 [N, 256].
        ids: uint8 [N, WORDINGS, 16], captions of the scene; no held-out caption is among them.
        owner: uint8 [N, 256], 1 + index of the object whose card a token shows, 0 for background.
        noisy: bool [N, 256], whether a token shows a noisy part of the background.
        shape, color: uint8 [N, 4], attributes of each object.
    """

    tokens: Tensor
    ids: Tensor
    owner: Tensor
    noisy: Tensor
    shape: Tensor
    color: Tensor

    def save(self, path: Path) -> None:
        torch.save({f.name: getattr(self, f.name) for f in fields(self)}, path)

    @staticmethod
    def load(path: Path) -> Shard:
        return Shard(**torch.load(path))


def owners(scene: Scene) -> np.ndarray:
    """Per token, 1 + index of the object whose card it shows, else 0: uint8 [256]."""
    return card_mask(scene)[::PATCH, ::PATCH].reshape(-1)


def noisy_tokens(scene: Scene) -> np.ndarray:
    """Per token, whether it shows a noisy part of the background: bool [256]."""
    first, last = noisy_rows(scene)
    rows = np.arange(TOKENS) // GRID
    return (rows >= first) & (rows < last) & (owners(scene) == 0)


def wordings(scene: Scene, rng: np.random.Generator) -> list[list[int]] | None:
    """`WORDINGS` encoded captions of a scene, or None if every try had a held-out meaning."""
    encoded = []
    for _ in range(40):
        request = worded_in_reading_order(describe(scene, rng), scene)
        if not request.held_out():
            encoded.append(captions.encode(captions.caption(request)))
        if len(encoded) == WORDINGS:
            return encoded
    return None


def make_shard(index: int, tokenizer: ShapesTokenizer, size: int = SHARD, device: str = "cpu") -> Shard:
    """Shard number `index`, of scenes and captions in reading order."""
    rng = np.random.default_rng([7, index])
    scenes, ids = [], []
    while len(scenes) < size:
        scene = realize_in_order(sample_request(rng), rng)
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
        torch.from_numpy(np.stack([noisy_tokens(s) for s in scenes])),
        torch.from_numpy(shape),
        torch.from_numpy(color),
    )


def shard_file(out: Path, index: int) -> Path:
    """The file of shard `index` of a run in folder `out`."""
    return out / "shards" / f"{index:07d}.pt"


def write_shard(out: Path, index: int, tokenizer: ShapesTokenizer, device: str = "cpu") -> None:
    """Make a shard and write its file atomically."""
    path = shard_file(out, index)
    path.parent.mkdir(exist_ok=True, parents=True)
    part = path.with_suffix(f".{os.getpid()}")
    make_shard(index, tokenizer, device=device).save(part)
    part.replace(path)


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m dev.shapes.data", description=__doc__)
    parser.add_argument("--out", type=Path, default=Path("shapes-training"), help="folder of the training run")
    parser.add_argument("--first", type=int, default=0, help="first shard; each has 4096 scenes")
    parser.add_argument("--count", type=int, default=100)
    args = parser.parse_args()
    torch.set_num_threads(1)
    if (args.out / "tokenizer.pt").exists():
        tokenizer = ShapesTokenizer().eval()
        tokenizer.load_state_dict(torch.load(args.out / "tokenizer.pt", map_location="cpu")["model"])
    else:
        tokenizer = load_tokenizer()
    for index in range(args.first, args.first + args.count):
        if not shard_file(args.out, index).exists():
            write_shard(args.out, index, tokenizer)


if __name__ == "__main__":
    main()
