"""Decode chunks: requests become rows of the store. `LocalExecutor` decodes in this process."""

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import nullcontext
from copy import copy
from dataclasses import dataclass, field
from itertools import chain, groupby
from typing import Any, Protocol

import numpy as np
from torch import Tensor

from specbench.decoding.continuous_batching import decode_each
from specbench.decoding.generation import Generation
from specbench.decoding.loop import WARM_UP_STEPS, Decoding, decode, warm_up_steps
from specbench.errors import BAD_INPUT, MISSING_PREREQUISITE, PARTIAL, CompileError, SpecbenchError
from specbench.models.interface import CompilableModel, CuttingModel, ImageModel
from specbench.models.transformer.compilation import compile_facts
from specbench.models.transformer.host_sync import AsyncHostCopy
from specbench.prompts import Request
from specbench.runs.compiler import remember_compiled
from specbench.runs.executors.compile_ahead import compiled_ahead, told_forms
from specbench.runs.run_progress import Reporter
from specbench.specs.presets import decoder_code
from specbench.specs.run_spec import RunSpec
from specbench.store.schema import base_row, failed_row, sample_row, trace_row
from specbench.system import environment
from specbench.system.device_failures import check_alive, is_out_of_memory, out_of_memory, release_memory
from specbench.system.foreign_code import require_code
from specbench.system.monitor import MachineMonitor
from specbench.system.plugins import foreign_place

WARM_UP_ID = "(warm-up)"
MISFITS = 2  # After this number of batches that did not fit in memory, a run decodes images one by one
_FIRST_S, _EVERY_S = 1.0, 0.5  # Seconds to the first report of an image's tokens, and between reports

Tell = Callable[[str, int, int], None]  # Receives the progress of a warm-up
_SILENT = Reporter()


@dataclass(frozen=True)
class Chunk:
    """Images of one run that one worker decodes."""

    spec: RunSpec  # of the run
    requests: tuple[Request, ...]  # the images
    trace: bool = False  # whether to record traces
    turn: int | None = None  # position, from 1, among the decoders of the same image; None if decoders do not alternate


@dataclass
class DecodedChunk:
    """Images of one run, ready for `specbench.store.run_store.RunStore.append`."""

    spec: RunSpec  # of the run
    # a row per image, including failed images, with the columns of `specbench.store.schema.SAMPLES`
    rows: list[dict[str, Any]] = field(default_factory=list)
    # {file name in the rows: uint8 [3, H, W]}, without failed images
    images: dict[str, np.ndarray] = field(default_factory=dict)
    # with the columns of `specbench.store.schema.TRACES`, if traces are recorded
    traces: list[dict[str, Any]] = field(default_factory=list)
    hardware: Mapping[str, object] | None = None  # hardware of the worker, if it differs from the first worker's


class Executor(Protocol):
    """Decodes chunks, in this process or in other processes."""

    def portion(self, spec: RunSpec) -> int:
        """Number of images per chunk of this run."""

    def warm_up(self, specs: Sequence[RunSpec], texts: Sequence[str], tell: Tell = _SILENT.part) -> dict[str, Any]:
        """Prepare to decode these runs without storing anything. `texts`: prompts, the longest first. Return facts for
        `run.json` about the machine and software that decode."""

    def decode(self, chunks: Iterator[Chunk], reporter: Reporter = _SILENT) -> Iterator[DecodedChunk]:
        """Decode every image of every chunk, in any order; failed images are included. The next chunk is taken from the
        iterator when a worker is free. `reporter` receives the tokens of images in progress, if known."""


def warm_up(
    model: ImageModel,
    specs: Sequence[RunSpec],
    texts: Sequence[str],
    tell: Tell = _SILENT.part,
    wait: Callable[[RunSpec], None] = lambda spec: None,
) -> dict[str, Any]:
    """Call `wait(spec)` and run some steps, for each spec. Return `compile_facts`. Wrong settings raise an error; other
    errors will recur with the first image and be stored in its row."""
    for spec in specs:
        require_code(f"decoder '{spec.decoder.name}'", spec.decoder_code, decoder_code(spec.decoder))
    compiles = model if isinstance(model, CompilableModel) and model.compiles else None
    # On a GPU, steps have other input shapes if a prompt fills more blocks of the KV cache.
    with told_forms(compiles, specs, tell) if compiles else nullcontext() as keep:
        for spec, text in ((spec, text) for spec in specs for text in (texts if compiles else texts[:1])):
            what = f"warm-up steps of {spec.decoder.name} ({specs.index(spec) + 1} of {len(specs)})"
            request, shared = Request(text, WARM_UP_ID), spec is specs[0]
            wait(spec)
            try:
                how = Decoding(model, spec.decoder, spec.sampling, spec.seed)
                for done in warm_up_steps(how, [request] * spec.batch, render=shared):
                    if keep is None:
                        tell(what, done, WARM_UP_STEPS)
            except SpecbenchError as error:
                if error.exit_code in (BAD_INPUT, MISSING_PREREQUISITE):
                    raise
            except (Exception, SystemExit) as error:  # recurs with the first image, whose row records it
                check_alive(model.device, error)
            if keep is not None and text == texts[-1]:
                keep(spec)
    if compiles:
        remember_compiled(specs)
    return compile_facts(model.compiled if isinstance(model, CompilableModel) else (), model.device)


class StepWatch:
    """Reports the tokens of images in progress twice a second, without device synchronisation."""

    def __init__(self, reporter: Reporter, length: int):
        """`length`: number of tokens of an image."""
        self._reporter, self._length, self._due = reporter, length, time.monotonic() + _FIRST_S
        self._copy = AsyncHostCopy(latest=([], 0.0))

    def __call__(self, committed: Tensor | Sequence[int]) -> None:
        """Receive the number of committed tokens of each row after a step."""
        if (now := time.monotonic()) < self._due:
            return
        self._due = now + _EVERY_S
        counts = self._copy.latest(committed.flatten(), now)[0] if isinstance(committed, Tensor) else committed
        if counts:
            self._reporter.part("tokens", sum(counts), len(committed) * self._length, len(committed))


def decode_chunk(model: ImageModel, chunk: Chunk, reporter: Reporter = _SILENT) -> DecodedChunk:
    """Decode a chunk; the result includes failed images."""
    started_at = environment.now()
    monitor = MachineMonitor(model.device)
    outcomes = _decode(model, chunk.spec, chunk.requests, chunk.trace, reporter)
    turn = {} if chunk.turn is None else {"turn": chunk.turn}
    return _rows(model, chunk, outcomes, started_at, monitor.read() | turn)


def decode_refilled(model: ImageModel, chunks: Iterator[Chunk], reporter: Reporter = _SILENT) -> Iterator[DecodedChunk]:
    """Decode the one-image chunks of a run with continuous batching; yield each chunk when it is complete."""
    begun: dict[tuple[str, int], tuple[Chunk, str, MachineMonitor]] = {}

    def requests(chunks: Iterator[Chunk]) -> Iterator[Request]:
        for chunk in chunks:
            [request] = chunk.requests
            begun[request.key] = chunk, environment.now(), MachineMonitor(model.device)
            yield request

    misfits = 0
    for first in chunks:
        spec, waiting = first.spec, chain([first], chunks)
        settings = spec.batch, spec.decoder, spec.sampling, spec.seed, first.trace
        try:
            watch = StepWatch(reporter, model.layout.length)
            for request, outcome in decode_each(model, requests(waiting), *settings, watch=watch):
                chunk, started_at, monitor = begun.pop(request.key)
                yield _rows(model, chunk, [outcome], started_at, monitor.read())  # type: ignore[list-item]
        except (Exception, SystemExit) as error:  # an image broke the batch, or all images fail: decode them one by one
            check_alive(model.device, error)
            if is_out_of_memory(error):
                misfits += 1
                after = "its images" if misfits < MISFITS else "all further images"
                problem = out_of_memory(f"a batch of {spec.batch}", model.device, error, "a smaller --batch")
                reporter.note(f"{problem}; {after} are decoded one by one")
        # Outside `except`, because the traceback holds the batch's tensors.
        broken = [chunk for chunk, _, _ in begun.values()]
        begun.clear()
        if broken:
            release_memory()
        yield from (decode_chunk(model, chunk, reporter) for chunk in broken)
        if misfits == MISFITS:
            yield from (decode_chunk(model, chunk, reporter) for chunk in chunks)


def _rows(
    model: ImageModel,
    chunk: Chunk,
    outcomes: Sequence[Generation | SpecbenchError],
    started_at: str,
    machine: Mapping[str, object],
) -> DecodedChunk:
    done = DecodedChunk(chunk.spec)
    for request, outcome in zip(chunk.requests, outcomes, strict=True):
        base = base_row(request, chunk.spec.seed, started_at, machine)
        if isinstance(outcome, SpecbenchError):
            done.rows.append(failed_row(base, outcome.what))
            continue
        if isinstance(model, CuttingModel):
            outcome.facts = outcome.facts | {"caption_tokens_cut": model.tokens_cut(request.text)}
        done.rows.append(sample_row(base, outcome, timed=chunk.spec.timed))
        if chunk.trace:
            done.traces.append(trace_row(base, outcome))
        if outcome.image is not None:
            done.images[done.rows[-1]["image"]] = outcome.image
    return done


def _decode(
    model: ImageModel, spec: RunSpec, requests: Sequence[Request], trace: bool, reporter: Reporter
) -> list[Generation | SpecbenchError]:
    """Return each image or its error. If a whole batch fails, its images are decoded one by one."""
    try:
        rare, watch = len(requests) < spec.batch, StepWatch(reporter, model.layout.length)
        return decode(model, requests, spec.decoder, spec.sampling, spec.seed, trace=trace, rare=rare, watch=watch)
    except CompileError:
        raise
    except SpecbenchError as error:
        failure = copy(error)
    except (Exception, SystemExit) as error:  # any failure of an image becomes its row
        check_alive(model.device, error)
        failure = image_failure(error)
    # Outside `except`, because the traceback holds the batch's tensors.
    if is_out_of_memory(failure):
        release_memory()
    if len(requests) == 1:
        return [failure]
    return [outcome for request in requests for outcome in _decode(model, spec, [request], trace, reporter)]


def image_failure(error: BaseException) -> SpecbenchError:
    """Make the error of an image from any exception, with the line of a plug-in's code in its traceback."""
    of_plugin = f" at {place}" if (place := foreign_place(error)) else ""
    return SpecbenchError(f"{type(error).__name__}{of_plugin}: {error}", exit_code=PARTIAL)


class LocalExecutor:
    """`Executor` in this process: decodes images one by one, or with continuous batching."""

    def __init__(self, model: ImageModel, load: Callable[[], ImageModel] | None = None):
        """`load`: function that loads the model in other processes, which compile steps in parallel."""
        self.model, self._load = model, load

    def portion(self, spec: RunSpec) -> int:
        return 1

    def warm_up(self, specs: Sequence[RunSpec], texts: Sequence[str], tell: Tell = _SILENT.part) -> dict[str, Any]:
        if self._load is None or len(specs) == 1:
            return warm_up(self.model, specs, texts, tell)
        with compiled_ahead(self._load, warm_up, self.model, specs, texts) as wait:
            return warm_up(self.model, specs, texts, tell, wait)

    def decode(self, chunks: Iterator[Chunk], reporter: Reporter = _SILENT) -> Iterator[DecodedChunk]:
        for spec, run in groupby(chunks, key=lambda chunk: chunk.spec):
            if spec.batch > 1:
                yield from decode_refilled(self.model, run, reporter)
            else:
                yield from (decode_chunk(self.model, chunk, reporter) for chunk in run)
