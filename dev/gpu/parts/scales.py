"""Sizes of the trials, and the random model of Lumina's size."""

from dataclasses import dataclass

import torch
from llama import PROMPT, RandomLlama

from specbench.specs.run_spec import Sampling
from specbench.system.device_peaks import find_peak

GIB = 2**30
AIM = 1.45
"""Goal for the ratio of AR's step to the time to read weights and cache: the value that gpt-fast and torchao publish
at batch 1 for 7 billion weights in bfloat16 on an A100."""
SIDE = 48
"""Tokens in an image row of Lumina-mGPT at 768 pixels."""


@dataclass(frozen=True)
class Scale:
    """Sizes of the trials.

    Attributes:
        images: number of images of each table of an audit setting.
        decoders: audited decoders; all presets if empty.
        families: decoded families; if empty, one family of every loading module.
        llama: sizes of the random model that replaces Lumina.
        dtype: dtype of that model.
        rounds: timed rounds of each contender.
        batches: rows of the batches.
        card_batches: batches of Lumina-mGPT that are tried in the memory of a smaller card.
        memory: models whose memory is planned and measured, with random weights if possible.
    """

    images: int
    decoders: tuple[str, ...]
    families: tuple[str, ...]
    llama: dict[str, int]
    dtype: torch.dtype
    rounds: int
    batches: tuple[int, ...]
    card_batches: tuple[int, ...]
    memory: tuple[str, ...]


_LUMINA = {"vocabulary": 8192, "side": 8, "width": 4096, "inner": 11_008, "layers": 32, "heads": 32}
_TINY = {"vocabulary": 32, "side": 3, "width": 32, "inner": 48, "layers": 2, "heads": 2}
SCALES = {
    "full": Scale(6000, (), (), _LUMINA, torch.bfloat16, 3, (1, 16, 64), (1, 4, 16), ("shapes", "lumina")),
    "tiny": Scale(60, ("ar", "sjd"), ("lumina",), _TINY, torch.float32, 1, (1, 2), (2,), ("shapes",)),
}


def random_llama(device: str, scale: Scale, side: int | None = None) -> RandomLlama:
    """The random model; `side`: tokens of an image row, if different from the scale."""
    sizes = scale.llama if side is None else scale.llama | {"side": side}
    return RandomLlama(**sizes, device=device, dtype=scale.dtype)


def filtered(scale: Scale) -> Sampling:
    """Lumina's sampling, with its top-k limited to small vocabularies."""
    return Sampling(3.0, 1.0, min(2000, scale.llama["vocabulary"] // 2))


def floor_ms(model: RandomLlama, device: str, scale: Scale, cache: bool = True) -> float | None:
    """Milliseconds to read the weights, and with `cache` an image's mean KV cache, at the device's peak bandwidth; None
    if the peak is unknown."""
    peak = find_peak(device, str(scale.dtype).removeprefix("torch."), torch.get_num_threads())
    visible = PROMPT + model.layout.length / 2 if cache else 0
    read = model.size.read(1, 2, visible, scale.dtype.itemsize)
    return None if peak is None else 1e3 * read / peak.bandwidth(read)


def has_graphs(device: str) -> bool:
    """Whether steps are captured as CUDA graphs on the device."""
    return device.startswith("cuda")
