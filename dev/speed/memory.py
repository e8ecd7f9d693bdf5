"""Peak memory while `shapes` decodes, besides the model's own weights, against the formula of `specbench.runs.memory_estimate`."""

from __future__ import annotations

import weakref
from dataclasses import asdict

from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from specbench.decoding.draft_tree import routes
from specbench.decoding.loop import Loop, Request, decode
from specbench.models.catalog import Model, find_model, load_model
from specbench.models.interface import ImageModel
from specbench.runs import memory_estimate
from specbench.specs.presets import DecoderSpec, resolve
from specbench.specs.run_spec import Sampling

CAPTION, PROMPT = "a red circle left of a blue square", 16
"""A caption, and the elements that a prompt of `shapes` has."""
STEPS = 4
"""Steps with a full window, after an image's last ones, of every width: as a process meets them that has made one."""
DECODERS = {
    "ar": resolve("ar"),
    "sjd": resolve("sjd"),
    "sjd-isp": resolve("sjd-isp"),
    "sjd, init left-sample": resolve("sjd", {"init": "left-sample"}),
    "gsd": resolve("gsd", {"d": "inf"}),
    "scd-mc": resolve("scd-mc"),
    "scd-gs": resolve("scd-gs"),
    "sjd-pac": resolve("sjd-pac"),
    "eagle": resolve("eagle"),
    "lantern": resolve("lantern"),
    "zipar": resolve("zipar"),
}
BATCHES = (1, 4, 16)


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


def peak(model: ImageModel, decoder: DecoderSpec, sampling: Sampling, batch: int) -> int:
    """Bytes of the tensors that are alive at once, at most, besides the model's own: from encoding to pixels."""
    length, run = model.layout.length, Loop.run
    routes.cache_clear()

    def ends(loop: Loop) -> None:
        window = loop.tokens.shape[1] - length
        for behind in (*range(length - window, length), *range(STEPS)):
            loop.committed.fill_(behind)
            loop.step(behind)

    Loop.run = ends
    try:
        with Live() as live:
            decode(model, [Request(CAPTION, "bench", sample) for sample in range(batch)], decoder, sampling, 0)
    finally:
        Loop.run = run
    return live.most


def predicted(model: Model, decoder: DecoderSpec, sampling: Sampling, batch: int) -> dict[str, int]:
    """Bytes by the formula, with the prompt's true length in place of the longest one that is planned for."""
    assumed, memory_estimate.PROMPT = memory_estimate.PROMPT, PROMPT
    try:
        need = memory_estimate.footprint(model, decoder, sampling, "float32")
    finally:
        memory_estimate.PROMPT = assumed
    return {**asdict(need), "besides": need.total(batch) - model.fixed_bytes("float32")}


def bench_memory(sampling: Sampling, rounds: int) -> tuple[list[dict], list[str]]:
    """Measured and predicted bytes besides the weights; the same in every round, so there is one. A new model each time
    has no draft head yet."""
    rows = []
    lines = ["decoder, batch: MiB measured, MiB predicted, predicted over measured"]
    for name, decoder in DECODERS.items():
        for batch in BATCHES:
            measured = peak(load_model("shapes"), decoder, sampling, batch)
            expected = predicted(find_model("shapes"), decoder, sampling, batch)
            rows.append({"name": name, "batch": batch, "measured": measured, "predicted": expected})
            total = expected["besides"]
            lines.append(f"{name}, {batch}: {measured / 2**20:.2f}, {total / 2**20:.2f}, {total / measured:.3f}")
    return rows, lines
