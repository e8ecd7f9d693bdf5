"""From a plan to rows on disk: every decoder on every prompt, continuing where the store stopped."""

from __future__ import annotations

import json
import signal
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from itertools import takewhile
from pathlib import Path
from typing import Protocol

from specbench.errors import INTERRUPTED, PARTIAL, SpecbenchError
from specbench.runs.executors.local import Chunk, Executor, Unit
from specbench.specs.run_spec import RunSpec
from specbench.store.run_store import RunStore
from specbench.system import environment
from specbench.system.monitor import timing_warnings


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

    def add(self, other: RunSummary) -> None:
        """Count what a further call did."""
        self.folders += [folder for folder in other.folders if folder not in self.folders]
        self.total, self.resumed = self.total + other.total, self.resumed + other.resumed
        self.done, self.failed = self.done + other.done, self.failed + other.failed
        self.errors += [error for error in other.errors if error not in self.errors]
        self.interrupted |= other.interrupted

    def count(self, row: Mapping[str, object]) -> None:
        if row["status"] == "ok":
            self.done += 1
            return
        self.failed += 1
        if row["error"] not in self.errors:
            self.errors.append(str(row["error"]))


def run(
    executor: Executor,
    specs: Sequence[RunSpec],
    units: Sequence[Unit],
    out: Path,
    reporter: Reporter | None = None,
    run_facts: Mapping[str, Mapping[str, object]] | None = None,
    trace: bool = False,
) -> RunSummary:
    """Decode every image of `units` with every spec, interleaved, except those already stored.

    Args:
        executor: who decodes; whatever it is, this function alone writes.
        specs: all of one model; they differ in their decoder.
        out: the results folder; each spec has a folder of its run id in it.
        run_facts: fields of `specbench.store.run_info.RunInfo` by run id, for example `origins`.
        trace: keep a trace of every image; one that was stored without is decoded again.

    Raises:
        SpecbenchError: the settings do not fit the model, a folder is unusable, or the disk refused a row.
    """
    reporter = reporter or SilentReporter()
    specs = list({spec.run_id: spec for spec in specs}.values())
    stores = {spec: RunStore(Path(out) / spec.run_id) for spec in specs}
    for spec, store in stores.items():
        store.check(spec)
    with ExitStack() as writing, _stop_on_interrupt() as stop:
        work = {spec: _lock(store, spec, units, trace, writing) for spec, store in stores.items()}
        facts = _warm_up(executor, [spec for spec in specs if work[spec]], units, reporter)
        for spec in work:
            if stores[spec].locked:
                stores[spec].begin(spec, environment.environment_facts() | facts, (run_facts or {}).get(spec.run_id))
        todo = sum(map(len, work.values()))
        total = len(specs) * len(units)
        summary = RunSummary([store.folder for store in stores.values()], total, resumed=total - todo)
        reporter.start(total, summary.resumed)
        writing.callback(reporter.finish)
        for finished in executor.decode(_until(stop, _chunks(executor, work, trace))):
            stores[finished.spec].append(finished.rows, finished.images, finished.traces)
            for row in finished.rows:
                summary.count(row)
                reporter.row(finished.spec.run_id, row)
        summary.interrupted = stop.is_set() and summary.done + summary.failed < todo
    for spec in work:
        if work[spec] and spec.timed:
            _advise(spec, stores[spec], reporter)
    return summary


def _lock(store: RunStore, spec: RunSpec, units: Sequence[Unit], trace: bool, writing: ExitStack) -> list[Unit]:
    """Lock the folder of a run that has work left, and list that work; one that ended complete is left untouched."""
    if not _pending(store, units, trace) and not store.unfinished():
        return []
    writing.enter_context(store.lock(spec))
    return _pending(store, units, trace)


def _pending(store: RunStore, units: Sequence[Unit], trace: bool) -> list[Unit]:
    completed = store.completed(trace)
    return [(prompt, sample) for prompt, sample in units if (prompt.id, sample) not in completed]


def _warm_up(
    executor: Executor, specs: Sequence[RunSpec], units: Sequence[Unit], reporter: Reporter
) -> dict[str, object]:
    """Get the executor ready for the runs that have work; facts about it."""
    if not specs:
        return {}
    reporter.note(f"warming up {len(specs)} decoder{'s' if len(specs) > 1 else ''}")
    facts = executor.warm_up(specs, units[0][0])
    if "compile_s" in facts:
        graphs = f", {facts['graph_bytes'] / 2**20:.0f} MiB of graphs" if "graph_bytes" in facts else ""
        reporter.note(f"compiled steps in {facts['compile_s']:.0f} s ({facts['compiled_forms']} forms{graphs})")
    return facts


def _chunks(executor: Executor, work: Mapping[RunSpec, Sequence[Unit]], trace: bool) -> Iterator[Chunk]:
    """The work in portions. Where latency is measured the decoders take turns, so that slow drifts of the machine hit
    all alike; batches are refilled for as long as they are of one decoder."""
    starts = [(start, spec) for spec, units in work.items() for start in range(0, len(units), executor.portion(spec))]
    for start, spec in sorted(starts, key=lambda chunk: chunk[0] if chunk[1].batch == 1 else 0):
        yield Chunk(spec, tuple(work[spec][start : start + executor.portion(spec)]), trace)


def _until(stop: threading.Event, chunks: Iterator[Chunk]) -> Iterator[Chunk]:
    """The chunks, ending early once `stop` is set: what is being decoded then is finished and written."""
    return takewhile(lambda _: not stop.is_set(), chunks)


def _advise(spec: RunSpec, store: RunStore, reporter: Reporter) -> None:
    """Say what disturbed the latencies of a run, if anything."""
    rows = store.samples(["status", "ar_ms", "nfe", "machine"])
    rows = rows[(rows["status"] == "ok") & rows["machine"].notna()]
    for problem in timing_warnings(
        (rows["ar_ms"] / rows["nfe"]).to_list(), [json.loads(text) for text in rows["machine"]]
    ):
        reporter.note(f"{spec.run_id}: {problem}; repeat on a quiet machine with another --out")


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
