"""Continuous batching: the next image starts in a complete row while the other rows continue.

Noise is addressed by image and steps are counted by row, so that an image does not depend on the rest of the batch.
"""

import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import islice
from typing import Any

import numpy as np
import torch

from specbench.decoding.build import Method, build
from specbench.decoding.generation import Generation
from specbench.decoding.interfaces import RestartableDrafter
from specbench.decoding.loop import Decoding, begin, checked, decode, decode_tokens, drawn, noise_keys
from specbench.decoding.recorder import NoRecorder
from specbench.decoding.timing import Spans
from specbench.errors import SpecbenchError
from specbench.models.interface import ImageModel
from specbench.models.transformer.host_sync import to_host
from specbench.prompts import Request
from specbench.specs.presets import DecoderSpec
from specbench.specs.run_spec import Sampling
from specbench.system.torch_state import PinnedTorch

Outcome = tuple[Request, Generation | SpecbenchError | np.ndarray]
"""A request with its image or error, or with its stream tokens [N] if nothing is measured."""


def refills(method: Method) -> bool:
    """Return whether single rows of this decoder can start other images.

    EAGLE cannot: an image's first step has no features, so the whole batch would make an AR step. ZipAR cannot: its
    forwards hold the active image rows of all images of the batch.
    """
    return isinstance(method.drafter, RestartableDrafter)


@PinnedTorch()
def decode_each(
    model: ImageModel,
    requests: Iterable[Request],
    rows: int,
    decoder: DecoderSpec,
    sampling: Sampling,
    seed: int,
    trace: bool = False,
    measure: bool = True,
    watch: Callable[[Any], object] | None = None,
) -> Iterator[Outcome]:
    """Decode `requests`, `rows` at a time, and yield each with its image or error once it is complete. A request is
    taken only when a row is free. Decoders whose rows cannot be refilled run in whole batches.

    Without `measure`, the same steps yield the stream tokens [N] instead of images; nothing is timed, recorded or
    rendered. After each step, `watch` is called with the committed tokens of the active images.
    """
    waiting, how = iter(requests), Decoding(model, decoder, sampling, seed, trace)
    if refills(build(decoder, model)):
        kind = ContinuousBatch if measure else TokenBatch
        yield from kind(how, waiting, rows, watch).run()
        return
    while batch := list(islice(waiting, rows)):
        rare = len(batch) < rows
        if measure:
            done = decode(model, batch, decoder, sampling, seed, trace=trace, rare=rare, watch=watch)
        else:
            done = decode_tokens(how, batch, rare).cpu().numpy()
        yield from zip(batch, done, strict=True)


@dataclass
class ImageSlot:
    """Image assigned to a row, and its share of the time by span, in milliseconds."""

    request: Request
    share_ms: dict[str, float] = field(default_factory=lambda: defaultdict(float))


class ContinuousBatch:
    """Batch with refilled rows.

    The time of a step is divided evenly among the active images; the time of encoding, prefill and rendering is divided
    among the images encoded, prefilled or rendered.
    """

    _loop: Any  # a `Loop`, after `_begin`

    def __init__(
        self, how: Decoding, waiting: Iterator[Request], rows: int, watch: Callable[[Any], object] | None = None
    ):
        self._how, self._model, self._waiting, self._rows, self._watch = how, how.model, waiting, rows, watch
        self._spans = Spans(self._model.device)
        self._steps_ms = 0.0
        self._known_ms: dict[str, float] = {}
        self._in_work: dict[int, ImageSlot] = {}

    def run(self) -> Iterator[Outcome]:
        """Decode until all requests are done."""
        if not self._begin():
            return
        length, behind = self._model.layout.length, 0
        while self._in_work:
            start = time.perf_counter()
            self._loop.step(behind)
            committed = to_host(self._loop.committed)
            if self._watch:
                self._watch([committed[row] for row in self._in_work])
            if done := [row for row in self._in_work if committed[row] >= length]:
                with self._spans("verify"):
                    self._loop.recorder.flush()
            self._steps_ms += (time.perf_counter() - start) * 1e3
            if done:
                yield from self._finish(done)
                for row in self._start_next(done):
                    committed[row] = 0
            behind = min((committed[row] for row in self._in_work), default=length)

    def _begin(self) -> bool:
        """Start the first requests; return False if there are no requests."""
        self._in_work = dict(enumerate(map(ImageSlot, islice(self._waiting, self._rows))))
        if not self._in_work:
            return False
        requests = [slot.request for slot in self._in_work.values()]
        self._loop = begin(self._how, requests, self._spans, rare=len(requests) < self._rows)
        self._share(list(self._in_work), "encode", "prefill")
        return True

    def _finish(self, done: Sequence[int]) -> list[Outcome]:
        """Return the images of the complete rows `done` and free the rows."""
        self._share_steps()
        model, loop = self._model, self._loop
        rows = torch.tensor(done, device=model.device)
        with self._spans("render"):
            requests = [self._in_work[row].request for row in done]
            tokens = loop.tokens[rows, : model.layout.length]
            pictures = drawn(model, tokens, requests, self._how.decoder, self._how.seed)
        self._share(done, "render")
        slots = [self._in_work.pop(row) for row in done]
        forced = np.array(model.layout.forced) >= 0
        images = loop.recorder.rows(rows, loop.tokens[:, : len(forced)], forced, [slot.share_ms for slot in slots])
        for image, (pixels, facts) in zip(images, pictures, strict=True):
            image.image, image.facts = pixels, image.facts | facts
        return [(request, checked(image, request, model)) for request, image in zip(requests, images, strict=True)]

    def _start_next(self, free: Sequence[int]) -> list[int]:
        """Start the next requests in free rows; return the rows refilled."""
        requests = list(islice(self._waiting, len(free)))
        if not requests:
            return []
        taken = list(free[: len(requests)])
        self._in_work |= zip(taken, map(ImageSlot, requests), strict=True)
        with self._spans("encode"):
            prefix = self._model.encode([request.text for request in requests])
        rows = torch.tensor(taken, device=self._model.device)
        with self._spans("prefill"):
            self._loop.session.refill(rows, prefix)
        self._loop.restart(rows, noise_keys(requests, self._how.seed))
        self._share(taken, "encode", "prefill")
        return taken

    def _share_steps(self) -> None:
        """Divide the time of the steps since the last call among the active images."""
        rows = list(self._in_work)
        spent = self._share(rows, "draft", "target", "verify", "trace")
        busy = spent["draft"] + spent["target"] + spent["verify"]
        host = max(0.0, self._steps_ms - busy) * self._scale(rows)
        for row in rows:
            share = self._in_work[row].share_ms
            share["host"] += host
            share["verify"] -= share.pop("trace", 0.0)
        self._steps_ms = 0.0

    def _share(self, rows: Sequence[int], *names: str) -> dict[str, float]:
        """Divide the time of the spans `names` since the last call among `rows`; return milliseconds by span."""
        totals = self._spans.totals_ms()
        spent = {name: totals.get(name, 0.0) - self._known_ms.get(name, 0.0) for name in names}
        self._known_ms |= {name: totals.get(name, 0.0) for name in names}
        scale = self._scale(rows)
        shares = {name: ms * scale for name, ms in spent.items()}
        for row in rows:
            share = self._in_work[row].share_ms
            for name, ms in shares.items():
                share[name] += ms
        return spent

    def _scale(self, rows: Sequence[int]) -> float:
        """Return the factor on a span's time: batch size over number of `rows`; readers divide by the batch size."""
        return len(self._loop.committed) / len(rows)


class TokenBatch(ContinuousBatch):
    """Continuous batch that yields the stream tokens [N] of each image and measures nothing."""

    def _begin(self) -> bool:
        begun = super()._begin()
        if begun and not self._how.trace:
            self._loop.recorder = NoRecorder()
        return begun

    def _finish(self, done: Sequence[int]) -> list[Outcome]:
        tokens = self._loop.tokens[done, : self._model.layout.length].cpu().numpy()
        return [(self._in_work.pop(row).request, image) for row, image in zip(done, tokens, strict=True)]

    def _share(self, rows: Sequence[int], *names: str) -> dict[str, float]:
        return dict.fromkeys(names, 0.0)
