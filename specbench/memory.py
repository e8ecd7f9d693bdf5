"""How many images fit into memory at once, counted before anything is loaded. No torch here, except to ask a GPU.

    peak = weights + batch x (cache + laws)
    cache = guidance rows x (prompt + stream slots + 2 x columns) x bytes per token and row, of all layers
            and, for a draft head, of one more
    laws  = distributions in flight x columns x vocabulary x 4 bytes

Columns are those of the widest forward: the window, or the nodes of a tree. A rule that looks at all former
distributions of an image keeps one per stream slot besides.
"""

from __future__ import annotations

import os
from collections.abc import Iterable
from dataclasses import asdict, dataclass

from specbench.config import Sampling
from specbench.decoding.presets import DecoderSpec
from specbench.decoding.tree_paths import node_paths
from specbench.errors import SpecbenchError
from specbench.models.catalog import Model

PROMPT = 256
"""Elements a prompt may have, by assumption; families take up to about 130."""
LAWS = 12
"""Distributions per column alive at once in the heaviest step: logits of both guidance rows, p before and after
truncation, its sort, the draft's law, the residual and the race."""
MARGIN = 0.9
"""Share of the free memory that is planned with."""
MOST = 4096


@dataclass(frozen=True)
class Footprint:
    """Bytes: `weights` once, `cache` and `laws` per image decoded together."""

    weights: int
    cache: int
    laws: int

    @property
    def per_image(self) -> int:
        return self.cache + self.laws

    def total(self, batch: int) -> int:
        return self.weights + batch * self.per_image


def footprint(model: Model, decoder: DecoderSpec, sampling: Sampling, dtype: str) -> Footprint | None:
    """The memory of one decoder; None where the model has not been counted."""
    kv, columns = model.kv_bytes(dtype), most_columns(decoder, model)
    if kv is None:
        return None
    if decoder.drafter == "eagle":
        kv += kv // model.layers
    rows = 1 if sampling.guidance == 1 else 2
    laws = LAWS * columns + (model.stream + columns if decoder.init.endswith("-sample") else 0)
    return Footprint(
        model.fixed_bytes(dtype), rows * (PROMPT + model.stream + 2 * columns) * kv, 4 * laws * model.v_image
    )


def most_columns(decoder: DecoderSpec, model: Model) -> int:
    """Columns of the widest forward."""
    options = dict(decoder.options)
    if "tree" in options:
        return 1 + len(node_paths(str(options["tree"])))
    if decoder.drafter == "zipar":
        return model.stream
    window = int(options.get("window", 1))
    return window + (int(options.get("siblings", 1)) - 1) * min(int(options.get("depth", 0)), window - 1)


def free_memory(device: str) -> int | None:
    """Bytes free on the device; None where nobody says."""
    if device.startswith("cuda"):
        import torch

        return torch.cuda.mem_get_info(device)[0] if torch.cuda.is_available() else None
    try:
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_AVPHYS_PAGES")
    except (ValueError, OSError, AttributeError):
        return None


def largest_batch(needs: Iterable[Footprint], free: int) -> int:
    """The most images at once for which every footprint fits; 0 where not even one does."""
    return min(int((MARGIN * free - need.weights) // need.per_image) for need in needs)


def settle_batch(
    batch: int | str, model: Model, decoders: Iterable[DecoderSpec], sampling: Sampling, dtype: str, device: str
) -> tuple[int, dict[str, object] | None]:
    """The batch to decode in, "auto" being the largest that fits, and the reckoning where there was one to make.

    Raises:
        SpecbenchError: the batch does not fit, or "auto" where sizes or the free memory are not known.
    """
    needs = [need for decoder in decoders if (need := footprint(model, decoder, sampling, dtype))]
    free = free_memory(device) if needs else None
    if batch == 1 or free is None:
        if batch == "auto":
            raise SpecbenchError(f"--batch auto: the memory that {model.name} needs here is not known", "--batch N")
        return int(batch), None
    most = largest_batch(needs, free)
    heaviest = max(needs, key=lambda need: need.per_image)
    if most < (1 if batch == "auto" else int(batch)):
        raise SpecbenchError(
            f"--batch {batch}: {_gib(heaviest.weights)} of weights and {_gib(heaviest.per_image)} per image do not fit "
            f"into {MARGIN:.0%} of the {_gib(free)} free on {device}",
            f"--batch {most} fits" if most > 0 else "another device, or a smaller model",
        )
    chosen = min(most, MOST) if batch == "auto" else int(batch)
    return chosen, {"batch": chosen, "largest": most, "free": free, "margin": MARGIN} | asdict(heaviest)


def _gib(size: int) -> str:
    return f"{size / 2**30:.2f} GiB"
