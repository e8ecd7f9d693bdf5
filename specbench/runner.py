"""From a plan to rows on disk: every decoder on every prompt, one set of weights, continuing where the store
stopped."""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol

from specbench import provenance
from specbench.config import RunSpec
from specbench.decoding.generation import Generation
from specbench.decoding.loop import Request, decode
from specbench.errors import BAD_INPUT, INTERRUPTED, MISSING_PREREQUISITE, PARTIAL, SpecbenchError
from specbench.models.base import ImageModel
from specbench.prompts import Prompt
from specbench.records import base_row, failed_row, sample_row, trace_row
from specbench.store import RunStore

Unit = tuple[Prompt, int]
WARM_UP_ID = "(warm-up)"


class Reporter(Protocol):
    """Who is told how the work goes. Every call is quick and none may fail."""

    def start(self, total: int, done: int) -> None:
        """`total` images are wanted, over all decoders; `done` of them were in the store already."""

    def row(self, run_id: str, row: Mapping[str, object]) -> None:
        """One more row is on disk."""

    def note(self, text: str) -> None:
        """A line for the user."""

    def finish(self) -> None:
        """No more calls follow."""


class SilentReporter:
    """Says nothing."""

    def start(self, total: int, done: int) -> None: ...

    def row(self, run_id: str, row: Mapping[str, object]) -> None: ...

    def note(self, text: str) -> None: ...

    def finish(self) -> None: ...


@dataclass
class RunSummary:
    """What one call of `run` did.

    Attributes:
        folders: the run folders, in the order of the specs.
        total: images wanted, over all decoders.
        resumed: images that were in the store before.
        done, failed: rows written by this call.
        errors: the distinct errors of the failed rows.
        interrupted: the user asked to stop before the end.
    """

    folders: list[Path]
    total: int
    resumed: int
    done: int = 0
    failed: int = 0
    errors: list[str] = field(default_factory=list)
    interrupted: bool = False

    def problem(self) -> SpecbenchError | None:
        """Why the command should not exit with 0, if so."""
        if self.interrupted:
            there = self.resumed + self.done
            return SpecbenchError(
                f"interrupted with {there} of {self.total} images done",
                "run the same command again to resume",
                INTERRUPTED,
            )
        if self.failed:
            return SpecbenchError(
                f"{self.failed} of {self.total} images failed; the first one: {self.errors[0]}",
                "failed images are rows with their error; run the same command again to retry them",
                PARTIAL,
            )
        return None

    def count(self, row: Mapping[str, object]) -> None:
        if row["status"] == "ok":
            self.done += 1
            return
        self.failed += 1
        if row["error"] not in self.errors:
            self.errors.append(str(row["error"]))


def run(
    model: ImageModel,
    specs: Sequence[RunSpec],
    prompts: Sequence[Prompt],
    samples: int,
    out: Path,
    reporter: Reporter | None = None,
    extras: Mapping[str, Mapping[str, object]] | None = None,
    trace: bool = False,
) -> RunSummary:
    """Decode `samples` images of every prompt with every spec, interleaved, except those already stored.

    Args:
        specs: all of `model`; they differ in their decoder.
        out: the results folder; each spec has a folder of its run id in it.
        extras: further entries of `run.json` by run id, for example the origin of each setting.
        trace: keep a trace of every image; one that was stored without is decoded again.

    Raises:
        SpecbenchError: the settings do not fit the model, a folder is unusable, or the disk refused a row.
    """
    reporter = reporter or SilentReporter()
    units = [(prompt, sample) for prompt in prompts for sample in range(samples)]
    specs = list({spec.run_id: spec for spec in specs}.values())
    stores = {spec: RunStore(Path(out) / spec.run_id) for spec in specs}
    for spec, store in stores.items():
        store.check(spec)
    cold = [spec for spec in specs if _pending(stores[spec], units, trace)]
    if cold:
        reporter.note(f"warming up {len(cold)} decoder{'s' if len(cold) > 1 else ''}")
    for spec in cold:
        _warm_up(model, spec, prompts[0])
    with ExitStack() as writing, _stop_on_interrupt() as stop:
        work = {spec: _open(store, spec, units, extras, trace, writing) for spec, store in stores.items()}
        todo = sum(map(len, work.values()))
        total = len(specs) * len(units)
        summary = RunSummary([store.folder for store in stores.values()], total, resumed=total - todo)
        reporter.start(total, summary.resumed)
        writing.callback(reporter.finish)
        for spec, chunk in _interleaved(work):
            for row in _decode_chunk(model, spec, chunk, trace, stores[spec]):
                summary.count(row)
                reporter.row(spec.run_id, row)
            if stop.is_set():
                summary.interrupted = summary.done + summary.failed < todo
                break
    return summary


def _open(
    store: RunStore, spec: RunSpec, units: Sequence[Unit], extras: Mapping | None, trace: bool, writing: ExitStack
) -> list[Unit]:
    """Lock the folder of a run that has work left, and list that work; one that ended complete is left untouched."""
    if _pending(store, units, trace) or store.unfinished():
        writing.enter_context(store.create(spec, provenance.collect(), (extras or {}).get(spec.run_id)))
    return _pending(store, units, trace)


def _pending(store: RunStore, units: Sequence[Unit], trace: bool) -> list[Unit]:
    completed = store.completed(trace)
    return [(prompt, sample) for prompt, sample in units if (prompt.id, sample) not in completed]


def _interleaved(work: Mapping[RunSpec, Sequence[Unit]]) -> Iterator[tuple[RunSpec, Sequence[Unit]]]:
    """Chunks of one batch each, taking turns between the decoders so that slow drifts of the machine hit all
    alike."""
    chunks = [(start, spec) for spec, units in work.items() for start in range(0, len(units), spec.batch)]
    for start, spec in sorted(chunks, key=lambda chunk: chunk[0]):
        yield spec, work[spec][start : start + spec.batch]


def _warm_up(model: ImageModel, spec: RunSpec, prompt: Prompt) -> None:
    """Decode an image that is thrown away. What is wrong with one image may wait for its row; wrong settings
    may not."""
    try:
        request = Request(prompt.text, WARM_UP_ID)
        decode(model, [request] * spec.batch, spec.decoder, spec.sampling, spec.seed)
    except SpecbenchError as error:
        if error.exit_code in (BAD_INPUT, MISSING_PREREQUISITE):
            raise
    except Exception:  # shows again, and is recorded, with the first measured image
        pass


def _decode_chunk(
    model: ImageModel, spec: RunSpec, chunk: Sequence[Unit], trace: bool, store: RunStore
) -> list[dict[str, object]]:
    """Decode one batch and put its rows on disk, failed ones included."""
    started_at = provenance.now()
    rows, traces, images = [], [], {}
    for (prompt, sample), outcome in zip(chunk, _decode(model, spec, chunk, trace), strict=True):
        base = base_row(prompt, sample, spec.seed, started_at)
        if isinstance(outcome, SpecbenchError):
            rows.append(failed_row(base, outcome.what))
            continue
        rows.append(sample_row(base, outcome, timed=spec.batch == 1))
        if trace:
            traces.append(trace_row(base, outcome))
        if outcome.image is not None:
            images[rows[-1]["image"]] = outcome.image
    store.append(rows, images, traces)
    return rows


def _decode(model: ImageModel, spec: RunSpec, chunk: Sequence[Unit], trace: bool) -> list[Generation | SpecbenchError]:
    """Each image or why it failed. When a batch breaks as a whole, its images are tried one by one."""
    requests = [Request(prompt.text, prompt.id, sample) for prompt, sample in chunk]
    try:
        return decode(model, requests, spec.decoder, spec.sampling, spec.seed, trace=trace)
    except SpecbenchError as error:
        failure = error
    except Exception as error:  # the one place where whatever breaks an image becomes its row
        failure = SpecbenchError(f"{type(error).__name__}: {error}")
    if len(chunk) == 1:
        return [failure]
    return [outcome for unit in chunk for outcome in _decode(model, spec, [unit], trace)]


@contextmanager
def _stop_on_interrupt() -> Iterator[threading.Event]:
    """Set the event at the first Ctrl-C, so that the current row is finished; a second one interrupts at
    once."""
    stop = threading.Event()
    if threading.current_thread() is not threading.main_thread():
        yield stop
        return

    def on_interrupt(_number, _frame):
        stop.set()
        signal.signal(signal.SIGINT, before)

    before = signal.signal(signal.SIGINT, on_interrupt)
    try:
        yield stop
    finally:
        signal.signal(signal.SIGINT, before)
