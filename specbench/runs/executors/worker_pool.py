"""Many workers, one queue: who is free takes the next chunk, who dies is replaced, and nothing is tried forever.

How workers are started and talked to is a `Crew`'s business (`specbench.runs.executors.ray_workers`); who gets what, and what
happens when one is lost, is decided here.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Hashable, Iterator, Sequence
from typing import Protocol

from specbench.errors import FAILURE, SpecbenchError
from specbench.prompts import Prompt
from specbench.runs.executors.local import Chunk, Finished, Unit
from specbench.specs.run_spec import RunSpec
from specbench.store.schema import base_row, failed_row
from specbench.system import environment

ATTEMPTS = 2
"""An image that failed, or took its worker along, this often is a row with its error."""
RESTARTS = 3
"""How often each worker is replaced before the pool goes on without it."""

Ticket = Hashable


class WorkerLost(Exception):
    """The worker's process is gone; the text says what is known of the cause."""


class Crew(Protocol):
    """Workers elsewhere, known by their number, each busy with at most one thing."""

    size: int

    def prepare(self, worker: int, specs: Sequence[RunSpec], prompt: Prompt) -> Ticket:
        """Let a worker load the model and warm up; `result` is its facts."""

    def submit(self, worker: int, chunk: Chunk) -> Ticket:
        """Let a worker decode a chunk; `result` is the `Finished`."""

    def wait(self, tickets: Sequence[Ticket]) -> Ticket:
        """The first of the tickets to be done or lost."""

    def result(self, ticket: Ticket) -> dict[str, object] | Finished:
        """What came of it.

        Raises:
            WorkerLost: the worker died.
            SpecbenchError: it cannot get ready.
        """

    def replace(self, worker: int) -> None:
        """Start another process in place of a lost one."""


class Pool:
    """An `Executor` that hands chunks to a crew."""

    def __init__(self, crew: Crew, restarts: int = RESTARTS):
        self._crew = crew
        self._restarts = Counter(dict.fromkeys(range(crew.size), restarts))
        self._tried: Counter[tuple[str, str, int]] = Counter()
        self._again: deque[Chunk] = deque()
        self._busy: dict[Ticket, tuple[int, Chunk | None]] = {}
        self._free: list[int] = []
        self._lost = ""

    def portion(self, spec: RunSpec) -> int:
        return spec.batch

    def warm_up(self, specs: Sequence[RunSpec], prompt: Prompt) -> dict[str, object]:
        """Returns when the first worker is ready; the others join as they come."""
        self._preparation = specs, prompt
        for worker in range(self._crew.size):
            self._prepare(worker)
        facts = None
        while facts is None:
            facts, _ = self._next()
        return facts | {"workers": self._crew.size}

    def decode(self, chunks: Iterator[Chunk]) -> Iterator[Finished]:
        while True:
            while self._free and (chunk := self._take(chunks)):
                worker = self._free.pop()
                self._busy[self._crew.submit(worker, chunk)] = worker, chunk
            if not self._again and all(chunk is None for _, chunk in self._busy.values()) and self._free:
                return
            outcome, chunk = self._next()
            if isinstance(outcome, Finished) and (done := self._sift(outcome, chunk)).rows:
                yield done
            elif isinstance(outcome, WorkerLost):
                yield from self._blame(chunk, outcome)

    def _take(self, chunks: Iterator[Chunk]) -> Chunk | None:
        return self._again.popleft() if self._again else next(chunks, None)

    def _prepare(self, worker: int) -> None:
        self._busy[self._crew.prepare(worker, *self._preparation)] = worker, None

    def _next(self) -> tuple[dict | Finished | WorkerLost | None, Chunk | None]:
        """What the next one to report brings: facts, images, or the loss of a worker that had images."""
        if not self._busy:
            raise SpecbenchError(
                f"all {self._crew.size} workers were lost, the last one because {self._lost}",
                "what is done is kept; the same command continues",
                FAILURE,
            )
        ticket = self._crew.wait(list(self._busy))
        worker, chunk = self._busy.pop(ticket)
        try:
            outcome = self._crew.result(ticket)
        except WorkerLost as lost:
            self._lost = str(lost)
            if self._restarts[worker]:
                self._restarts[worker] -= 1
                self._crew.replace(worker)
                self._prepare(worker)
            return (lost, chunk) if chunk else (None, None)
        self._free.append(worker)
        return outcome, chunk

    def _sift(self, finished: Finished, chunk: Chunk) -> Finished:
        """What is final of a chunk; images that failed for the first time go back to the queue, one by one."""
        units = {(prompt.id, sample): (prompt, sample) for prompt, sample in chunk.units}
        final = Finished(finished.spec, [], finished.images, finished.traces)
        for row in finished.rows:
            unit = units[row["prompt_id"], row["sample"]]
            if row["status"] == "ok" or self._count(chunk, unit) >= ATTEMPTS:
                final.rows.append(row | {"attempts": self._tried[_key(chunk, unit)] + (row["status"] == "ok")})
            else:
                self._again.append(Chunk(chunk.spec, (unit,), chunk.trace))
        return final

    def _blame(self, chunk: Chunk, lost: WorkerLost) -> Iterator[Finished]:
        """The images a dead worker had: rows of those that had been tried before, the others once more."""
        for unit in chunk.units:
            tried = self._count(chunk, unit)
            if tried < ATTEMPTS:
                self._again.append(Chunk(chunk.spec, (unit,), chunk.trace))
                continue
            base = base_row(*unit, chunk.spec.seed, environment.now()) | {"attempts": tried}
            yield Finished(chunk.spec, [failed_row(base, f"lost {tried} times with its worker: {lost}")])

    def _count(self, chunk: Chunk, unit: Unit) -> int:
        self._tried[_key(chunk, unit)] += 1
        return self._tried[_key(chunk, unit)]


def _key(chunk: Chunk, unit: Unit) -> tuple[str, str, int]:
    return chunk.spec.run_id, unit[0].id, unit[1]
