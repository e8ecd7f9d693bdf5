"""Peak memory of decoding `shapes` without the weights, against the estimate of `specbench.runs.memory_estimate`."""

import weakref
from collections.abc import Iterator
from dataclasses import asdict

from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from specbench.decoding.draft_tree import routes
from specbench.decoding.loop import Loop, decode
from specbench.decoding.recorder import StepRecorder
from specbench.models.catalog import find_model, load_model
from specbench.models.facts import ModelFacts
from specbench.models.interface import ImageModel
from specbench.prompts import Request
from specbench.runs import memory_estimate
from specbench.specs.presets import DecoderSpec, resolve
from specbench.specs.run_spec import Sampling

CAPTION, PROMPT = "a red circle left of a blue square", 16
"""A caption, and the number of tokens of a `shapes` prompt."""
STEPS = 4
"""Steps measured: the last steps of an image with windows of every width, then steps with a full window."""
DECODERS = {
    "ar": resolve("ar"),
    "sjd": resolve("sjd"),
    "sjd-isp": resolve("sjd-isp"),
    "sjd, init left-sample": resolve("sjd", {"init": "left-sample"}),
    "gsd": resolve("gsd", {"d": "inf"}),
    "scd-mc": resolve("scd-mc"),
    "scd-gs": resolve("scd-gs"),
    "sjd-pac": resolve("sjd-pac"),
    "best-lossless": resolve("best-lossless"),
    "eagle": resolve("eagle"),
    "lantern": resolve("lantern"),
    "zipar": resolve("zipar"),
}
BATCHES = (1, 4, 16)


class Live(TorchDispatchMode):
    """Tracks the peak number of bytes of live tensors."""

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
    """Measure the peak bytes of live tensors from encoding to rendering, without the weights; steps are recorded one by
    one, as on a GPU."""
    length, run = model.layout.length, Loop.run
    routes.cache_clear()

    def ends(loop: Loop) -> Iterator[Tensor]:
        window = loop.tokens.shape[1] - length
        for behind in (*range(length - window, length), *range(STEPS)):
            loop.committed.fill_(behind)
            loop.step(behind)
            yield loop.committed

    Loop.run, StepRecorder.collects = ends, False
    try:
        with Live() as live:
            decode(model, [Request(CAPTION, "bench", sample) for sample in range(batch)], decoder, sampling, 0)
    finally:
        Loop.run, StepRecorder.collects = run, True
    return live.most


def predicted(
    model: ModelFacts,
    decoder: DecoderSpec,
    sampling: Sampling,
    batch: int,
    dtype: str = "float32",
    device: str = "cpu",
) -> dict[str, int]:
    """Estimate the bytes, with the true prompt length instead of the assumed maximum."""
    assumed, memory_estimate.ASSUMED_PROMPT_TOKENS = memory_estimate.ASSUMED_PROMPT_TOKENS, PROMPT
    try:
        need = memory_estimate.footprint(model, decoder, sampling, dtype, device)
    finally:
        memory_estimate.ASSUMED_PROMPT_TOKENS = assumed
    return {**asdict(need), "besides": need.total(batch) - model.fixed_bytes(dtype)}


def bench_memory(sampling: Sampling, rounds: int) -> tuple[list[dict], list[str]]:
    """Compare measured and estimated bytes without the weights, in one round because they are deterministic. Each
    decoder gets a new model without a loaded draft head."""
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
