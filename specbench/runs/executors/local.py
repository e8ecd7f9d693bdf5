"""Decoding of chunks: requests in, rows of the store out. `LocalExecutor` decodes them in this process."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import chain, groupby
from typing import Protocol

import numpy as np

from specbench.decoding.continuous_batching import decode_each
from specbench.decoding.generation import Generation
from specbench.decoding.loop import decode
from specbench.errors import BAD_INPUT, MISSING_PREREQUISITE, SpecbenchError
from specbench.models.interface import CompilableModel, ImageModel
from specbench.models.transformer.compilation import graph_bytes
from specbench.prompts import Request
from specbench.specs.run_spec import RunSpec
from specbench.store.schema import base_row, failed_row, sample_row, trace_row
from specbench.system import environment
from specbench.system.monitor import MachineMonitor

WARM_UP_ID = "(warm-up)"


@dataclass(frozen=True)
class Chunk:
    """Images of one run that one worker decodes.

    Attributes:
        spec: of the run.
        requests: the images.
        trace: whether to record traces.
    """

    spec: RunSpec
    requests: tuple[Request, ...]
    trace: bool = False


@dataclass
class DecodedChunk:
    """Images of one run, ready for `specbench.store.run_store.RunStore.append`.

    Attributes:
        spec: of the run.
        rows: one per image, failed ones included, with the columns of `specbench.store.schema.SAMPLES`.
        images: uint8 [3, H, W] by file name as in the rows; none for failed images.
        traces: with the columns of `specbench.store.schema.TRACES`, if traces are recorded.
    """

    spec: RunSpec
    rows: list[dict[str, object]] = field(default_factory=list)
    images: dict[str, np.ndarray] = field(default_factory=dict)
    traces: list[dict[str, object]] = field(default_factory=list)


class Executor(Protocol):
    """Decodes chunks, in this process or in others."""

    def portion(self, spec: RunSpec) -> int:
        """Number of images per chunk of this run."""

    def warm_up(self, specs: Sequence[RunSpec], text: str) -> dict[str, object]:
        """Prepare to decode these runs with the text of a prompt; nothing is measured or stored.

        Returns:
            Facts about where images will be decoded, for `run.json`.

        Raises:
            SpecbenchError: a decoder's settings do not fit the model, or something it needs is missing.
        """

    def decode(self, chunks: Iterator[Chunk]) -> Iterator[DecodedChunk]:
        """Decode every image of every chunk, in any order, failed ones included; a chunk is taken only when a worker
        is free."""


def warm_up(model: ImageModel, specs: Sequence[RunSpec], text: str) -> dict[str, object]:
    """Decode and discard one batch with each spec. Errors of an image show again in its row; wrong settings are raised.

    Returns:
        `compile_s` and `compiled_forms` if anything was compiled, and `graph_bytes` of CUDA graphs on a GPU.
    """
    for spec in specs:
        try:
            request = Request(text, WARM_UP_ID)
            decode(model, [request] * spec.batch, spec.decoder, spec.sampling, spec.seed)
        except SpecbenchError as error:
            if error.exit_code in (BAD_INPUT, MISSING_PREREQUISITE):
                raise
        except Exception:  # recurs, and is recorded, with the first measured image
            pass
    steps = model.compiled if isinstance(model, CompilableModel) else ()
    if not steps:
        return {}
    seconds, forms = (sum(getattr(step, name) for step in steps) for name in ("seconds", "forms"))
    facts = {"compile_s": round(seconds, 3), "compiled_forms": forms}
    graphs = graph_bytes() if model.device.type == "cuda" else None
    return facts if graphs is None else facts | {"graph_bytes": graphs}


def decode_chunk(model: ImageModel, chunk: Chunk) -> DecodedChunk:
    """Decode a chunk, failed images included."""
    started_at = environment.now()
    monitor = MachineMonitor(model.device)
    outcomes = _decode(model, chunk.spec, chunk.requests, chunk.trace)
    return _rows(chunk, outcomes, started_at, monitor.read())


def decode_refilled(model: ImageModel, chunks: Iterator[Chunk]) -> Iterator[DecodedChunk]:
    """Decode chunks of one image each, all of one run, with continuous batching; each is yielded when complete."""
    begun: dict[tuple[str, int], tuple[Chunk, str, MachineMonitor]] = {}

    def requests(chunks: Iterator[Chunk]) -> Iterator[Request]:
        for chunk in chunks:
            [request] = chunk.requests
            begun[request.key] = chunk, environment.now(), MachineMonitor(model.device)
            yield request

    for first in chunks:
        spec, waiting = first.spec, chain([first], chunks)
        settings = spec.batch, spec.decoder, spec.sampling, spec.seed, first.trace
        try:
            for request, outcome in decode_each(model, requests(waiting), *settings):
                chunk, started_at, monitor = begun.pop(request.key)
                yield _rows(chunk, [outcome], started_at, monitor.read())
        except Exception:  # one image broke the batch, or each of them fails: decode them one by one
            broken = [chunk for chunk, _, _ in begun.values()]
            begun.clear()
            yield from (decode_chunk(model, chunk) for chunk in broken)


def _rows(
    chunk: Chunk, outcomes: Sequence[Generation | SpecbenchError], started_at: str, machine: Mapping[str, object]
) -> DecodedChunk:
    done = DecodedChunk(chunk.spec)
    for request, outcome in zip(chunk.requests, outcomes, strict=True):
        base = base_row(request, chunk.spec.seed, started_at, machine)
        if isinstance(outcome, SpecbenchError):
            done.rows.append(failed_row(base, outcome.what))
            continue
        done.rows.append(sample_row(base, outcome, timed=chunk.spec.timed))
        if chunk.trace:
            done.traces.append(trace_row(base, outcome))
        if outcome.image is not None:
            done.images[done.rows[-1]["image"]] = outcome.image
    return done


def _decode(
    model: ImageModel, spec: RunSpec, requests: Sequence[Request], trace: bool
) -> list[Generation | SpecbenchError]:
    """Return each image or its error. If a whole batch fails, its images are decoded one by one."""
    try:
        rare = len(requests) < spec.batch
        return decode(model, requests, spec.decoder, spec.sampling, spec.seed, trace=trace, rare=rare)
    except SpecbenchError as error:
        failure = error
    except Exception as error:  # any failure of an image becomes its row
        failure = SpecbenchError(f"{type(error).__name__}: {error}")
    if len(requests) == 1:
        return [failure]
    return [outcome for request in requests for outcome in _decode(model, spec, [request], trace)]


class LocalExecutor:
    """`Executor` in this process: images one by one, or continuous batches."""

    def __init__(self, model: ImageModel):
        self.model = model

    def portion(self, spec: RunSpec) -> int:
        return 1

    def warm_up(self, specs: Sequence[RunSpec], text: str) -> dict[str, object]:
        return warm_up(self.model, specs, text)

    def decode(self, chunks: Iterator[Chunk]) -> Iterator[DecodedChunk]:
        for spec, run in groupby(chunks, key=lambda chunk: chunk.spec):
            if spec.batch > 1:
                yield from decode_refilled(self.model, run)
            else:
                yield from (decode_chunk(self.model, chunk) for chunk in run)
