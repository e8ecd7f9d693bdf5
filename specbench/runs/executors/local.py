"""What goes to an executor and what comes back: chunks of images in, finished chunks out."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import chain, groupby
from typing import Protocol

import numpy as np

from specbench.decoding.continuous_batching import decode_each
from specbench.decoding.generation import Generation
from specbench.decoding.loop import Request, decode
from specbench.errors import BAD_INPUT, MISSING_PREREQUISITE, SpecbenchError
from specbench.models.interface import CompilableModel, ImageModel
from specbench.models.transformer.compilation import graph_bytes
from specbench.prompts import Prompt
from specbench.specs.run_spec import RunSpec
from specbench.store.schema import base_row, failed_row, sample_row, trace_row
from specbench.system import environment
from specbench.system.monitor import MachineMonitor

Unit = tuple[Prompt, int]
"""One image: a prompt and the number of the sample."""

WARM_UP_ID = "(warm-up)"


@dataclass(frozen=True)
class Chunk:
    """Images of one run that go to one worker; with `trace`, a trace of each is wanted."""

    spec: RunSpec
    units: tuple[Unit, ...]
    trace: bool = False


@dataclass
class Finished:
    """What `RunStore.append` takes, for the images of one chunk or some of them."""

    spec: RunSpec
    rows: list[dict[str, object]] = field(default_factory=list)
    images: dict[str, np.ndarray] = field(default_factory=dict)
    traces: list[dict[str, object]] = field(default_factory=list)


class Executor(Protocol):
    """Decodes chunks somewhere."""

    def portion(self, spec: RunSpec) -> int:
        """Images that a chunk of this run should have."""

    def warm_up(self, specs: Sequence[RunSpec], prompt: Prompt) -> dict[str, object]:
        """Get ready to decode these runs; nothing of it is measured.

        Returns:
            Facts about where images will be decoded, for `run.json`.

        Raises:
            SpecbenchError: a decoder's settings do not fit the model, or something it needs is missing.
        """

    def decode(self, chunks: Iterator[Chunk]) -> Iterator[Finished]:
        """Every image of every chunk, in any order, failed ones too. A chunk is taken only when somebody is free."""


def warm_up(model: ImageModel, specs: Sequence[RunSpec], prompt: Prompt) -> dict[str, object]:
    """Decode an image with each spec that is thrown away. What is wrong with one image may wait for its row; wrong
    settings may not.

    Returns:
        What was compiled meanwhile, if anything, how long that took, and the bytes that graphs captured on a GPU hold.
    """
    for spec in specs:
        try:
            request = Request(prompt.text, WARM_UP_ID)
            decode(model, [request] * spec.batch, spec.decoder, spec.sampling, spec.seed)
        except SpecbenchError as error:
            if error.exit_code in (BAD_INPUT, MISSING_PREREQUISITE):
                raise
        except Exception:  # shows again, and is recorded, with the first measured image
            pass
    steps = model.compiled if isinstance(model, CompilableModel) else ()
    if not steps:
        return {}
    seconds, forms = (sum(getattr(step, name) for step in steps) for name in ("seconds", "forms"))
    facts = {"compile_s": round(seconds, 3), "compiled_forms": forms}
    return facts | ({"graph_bytes": graph_bytes()} if model.device.type == "cuda" else {})


def decode_chunk(model: ImageModel, chunk: Chunk) -> Finished:
    """Decode a chunk, failed images included."""
    started_at = environment.now()
    watch = MachineMonitor(model.device)
    outcomes = _decode(model, chunk.spec, chunk.units, chunk.trace)
    return _finished(chunk, outcomes, started_at, watch.read())


def decode_refilled(model: ImageModel, chunks: Iterator[Chunk]) -> Iterator[Finished]:
    """Decode chunks of one image each, all of one run, `batch` at a time; each comes back when it is done."""
    begun: dict[tuple[str, int], tuple[Chunk, str, MachineMonitor]] = {}

    def requests(chunks: Iterator[Chunk]) -> Iterator[Request]:
        for chunk in chunks:
            [(prompt, sample)] = chunk.units
            begun[prompt.id, sample] = chunk, environment.now(), MachineMonitor(model.device)
            yield Request(prompt.text, prompt.id, sample)

    for first in chunks:
        spec, waiting = first.spec, chain([first], chunks)
        settings = spec.batch, spec.decoder, spec.sampling, spec.seed, first.trace
        try:
            for request, outcome in decode_each(model, requests(waiting), *settings):
                chunk, started_at, watch = begun.pop((request.prompt_id, request.sample))
                yield _finished(chunk, [outcome], started_at, watch.read())
        except Exception:  # what broke the batch is one of its images, or shows again with each
            broken = [chunk for chunk, _, _ in begun.values()]
            begun.clear()
            yield from (decode_chunk(model, chunk) for chunk in broken)


def _finished(
    chunk: Chunk, outcomes: Sequence[Generation | SpecbenchError], started_at: str, machine: Mapping[str, object]
) -> Finished:
    finished = Finished(chunk.spec)
    for (prompt, sample), outcome in zip(chunk.units, outcomes, strict=True):
        base = base_row(prompt, sample, chunk.spec.seed, started_at, machine)
        if isinstance(outcome, SpecbenchError):
            finished.rows.append(failed_row(base, outcome.what))
            continue
        finished.rows.append(sample_row(base, outcome, timed=chunk.spec.timed))
        if chunk.trace:
            finished.traces.append(trace_row(base, outcome))
        if outcome.image is not None:
            finished.images[finished.rows[-1]["image"]] = outcome.image
    return finished


def _decode(model: ImageModel, spec: RunSpec, units: Sequence[Unit], trace: bool) -> list[Generation | SpecbenchError]:
    """Each image or why it failed. When a batch breaks as a whole, its images are tried one by one."""
    requests = [Request(prompt.text, prompt.id, sample) for prompt, sample in units]
    try:
        rare = len(requests) < spec.batch
        return decode(model, requests, spec.decoder, spec.sampling, spec.seed, trace=trace, rare=rare)
    except SpecbenchError as error:
        failure = error
    except Exception as error:  # the one place where whatever breaks an image becomes its row
        failure = SpecbenchError(f"{type(error).__name__}: {error}")
    if len(units) == 1:
        return [failure]
    return [outcome for unit in units for outcome in _decode(model, spec, [unit], trace)]


class LocalExecutor:
    """Decodes here, images one after the other, or batches whose rows are refilled."""

    def __init__(self, model: ImageModel):
        self.model = model

    def portion(self, spec: RunSpec) -> int:
        return 1

    def warm_up(self, specs: Sequence[RunSpec], prompt: Prompt) -> dict[str, object]:
        return warm_up(self.model, specs, prompt)

    def decode(self, chunks: Iterator[Chunk]) -> Iterator[Finished]:
        for spec, run in groupby(chunks, key=lambda chunk: chunk.spec):
            if spec.batch > 1:
                yield from decode_refilled(self.model, run)
            else:
                yield from (decode_chunk(self.model, chunk) for chunk in run)
