"""How much of everything is tried, and the random model of Lumina's size."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from llama import RandomLlama

from specbench.specs.run_spec import Sampling

GIB = 2**30
SIDE = 48
"""Tokens in an image row of Lumina-mGPT at 768 pixels."""


@dataclass(frozen=True)
class Scale:
    """How much of everything.

    Attributes:
        images: of each table of an audit setting.
        decoders: that are audited; all presets if empty.
        families: that decode; one of every loading module if empty.
        llama: sizes of the random model in the place of Lumina's.
        dtype: of it.
        rounds: timed rounds of each contender.
        batches: rows of the batches.
        memory: models whose memory is planned and measured, at random weights if they have any.
    """

    images: int
    decoders: tuple[str, ...]
    families: tuple[str, ...]
    llama: dict[str, int]
    dtype: torch.dtype
    rounds: int
    batches: tuple[int, ...]
    memory: tuple[str, ...]


_LUMINA = {"vocabulary": 8192, "side": 8, "width": 4096, "inner": 11_008, "layers": 32, "heads": 32}
_TINY = {"vocabulary": 32, "side": 3, "width": 32, "inner": 48, "layers": 2, "heads": 2}
SCALES = {
    "full": Scale(6000, (), (), _LUMINA, torch.bfloat16, 3, (1, 16, 64), ("shapes", "lumina")),
    "tiny": Scale(60, ("ar", "sjd"), ("lumina",), _TINY, torch.float32, 1, (1, 2), ("shapes",)),
}


def random_llama(device: str, scale: Scale, side: int | None = None) -> RandomLlama:
    """The random model; `side`: tokens of an image row, if not those of the scale."""
    sizes = scale.llama if side is None else scale.llama | {"side": side}
    return RandomLlama(**sizes, device=device, dtype=scale.dtype)


def filtered(scale: Scale) -> Sampling:
    """Lumina's sampling, its top-k cut to small vocabularies."""
    return Sampling(3.0, 1.0, min(2000, scale.llama["vocabulary"] // 2))


def has_graphs(device: str) -> bool:
    """Whether steps are captured as CUDA graphs there."""
    return device.startswith("cuda")
