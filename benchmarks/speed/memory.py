"""Peak memory of caches and laws while `shapes` decodes, against the formula of `specbench.memory`."""

from __future__ import annotations

import weakref
from dataclasses import asdict, replace

from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from specbench import memory
from specbench.config import Sampling
from specbench.decoding.loop import Loop, Request, decode
from specbench.decoding.presets import DecoderSpec, resolve
from specbench.models.base import ImageModel
from specbench.models.catalog import find_model, load_model

CAPTION, PROMPT = "a red circle left of a blue square", 16
"""A caption, and the elements that a prompt of `shapes` has."""
STEPS = 6
"""The memory of a few steps is that of all."""
DECODERS, BATCHES = ("ar", "sjd", "sjd-isp", "gsd", "scd-mc", "scd-gs", "eagle"), (1, 4, 16)


class Live(TorchDispatchMode):
    """Bytes of the tensors alive at once, at most."""

    def __init__(self):
        super().__init__()
        self.now = self.most = 0
        self._known: set[int] = set()

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        result = function(*args, **(kwargs or {}))
        for leaf in tree_leaves(result):
            if isinstance(leaf, Tensor):
                self._note(leaf.untyped_storage())
        return result

    def _note(self, storage) -> None:
        key = storage._cdata
        if key in self._known:
            return
        self._known.add(key)
        self.now += storage.nbytes()
        self.most = max(self.most, self.now)
        weakref.finalize(storage, self._forget, key, storage.nbytes())

    def _forget(self, key: int, size: int) -> None:
        self._known.discard(key)
        self.now -= size


class Enough(Exception):
    """As many steps as were wanted."""


def peak(model: ImageModel, decoder: DecoderSpec, sampling: Sampling, batch: int) -> int:
    """Bytes of the tensors that are alive at once, at most, besides the model's own."""
    left, step = iter(range(STEPS)), Loop.step

    def counted(self, *arguments):
        if next(left, None) is None:
            raise Enough
        return step(self, *arguments)

    Loop.step = counted
    try:
        with Live() as live:
            decode(model, [Request(CAPTION, "bench", sample) for sample in range(batch)], decoder, sampling, 0)
    except Enough:
        pass
    finally:
        Loop.step = step
    return live.most


def predicted(decoder: DecoderSpec, sampling: Sampling, batch: int) -> dict[str, int]:
    """Bytes by the formula, with the prompt's true length in place of the longest one that is planned for."""
    assumed, memory.PROMPT = memory.PROMPT, PROMPT
    try:
        need = memory.footprint(find_model("shapes"), decoder, sampling, "float32")
    finally:
        memory.PROMPT = assumed
    return {**asdict(replace(need, cache=batch * need.cache, laws=batch * need.laws)), "total": batch * need.per_image}


def bench_memory(sampling: Sampling, rounds: int) -> tuple[list[dict], list[str]]:
    """Measured and predicted bytes besides the weights; the same in every round, so there is one."""
    model, rows = load_model("shapes"), []
    lines = ["decoder, batch: MiB measured, MiB predicted, predicted over measured"]
    for name in DECODERS:
        decoder = resolve(name, {"G": 10, "d": "inf"} if name == "gsd" else {})
        for batch in BATCHES:
            measured, expected = peak(model, decoder, sampling, batch), predicted(decoder, sampling, batch)
            rows.append({"name": name, "batch": batch, "measured": measured, "predicted": expected})
            total = expected["total"]
            lines.append(f"{name}, {batch}: {measured / 2**20:.2f}, {total / 2**20:.2f}, {total / measured:.3f}")
    return rows, lines
