"""Worker pool: one queue of chunks, restarts of lost workers, bounded retries.

The pool schedules; a `WorkerBackend` (`specbench.runs.executors.ray_workers`) starts worker processes and calls them.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable, Hashable, Iterator, Sequence
from typing import Protocol

from specbench.errors import FAILURE, SpecbenchError
from specbench.prompts import Request
from specbench.runs.executors.local import Chunk, DecodedChunk
from specbench.specs.run_spec import RunSpec
from specbench.store.schema import base_row, failed_row
from specbench.system import environment

ATTEMPTS = 2
"""Attempts per image; after the last failure or lost worker the error is stored in its row."""
RESTARTS = 3
"""Replacements per worker before the pool continues without it."""

Ticket = Hashable


class WorkerLost(Exception):
    """Loss of a worker process; the message states the cause if known."""


class WorkerBackend(Protocol):
    """Backend of remote workers, addressed by index, with at most one call in flight each."""

    size: int

    def prepare(self, worker: int, specs: Sequence[RunSpec], text: str) -> Ticket:
        """Start loading and warm-up on a worker; `result` returns its facts."""

    def submit(self, worker: int, chunk: Chunk) -> Ticket:
        """Start decoding a chunk on a worker; `result` returns its `DecodedChunk`."""

    def wait(self, tickets: Sequence[Ticket]) -> Ticket:
        """Wait for the first ticket that is done or lost."""

    def result(self, ticket: Ticket) -> dict[str, object] | DecodedChunk:
        """Result of a ticket.

        Raises:
            WorkerLost: the worker process died.
            SpecbenchError: the worker cannot be prepared.
        """

    def replace(self, worker: int) -> None:
        """Start a new process for a lost worker."""


class WorkerPool:
    """`Executor` that distributes chunks among the workers of a backend.

    Args:
        start: starts the backend; called only once there is work, which a finished run has not.
        restarts: replacements per worker.
    """

    def __init__(self, start: Callable[[], WorkerBackend], restarts: int = RESTARTS):
        self._start = start
        self._allowed = restarts
        self._tried: Counter[tuple[str, str, int]] = Counter()
        self._again: deque[Chunk] = deque()
        self._busy: dict[Ticket, tuple[int, Chunk | None]] = {}
        self._free: list[int] = []
        self._lost = ""

    def portion(self, spec: RunSpec) -> int:
        return spec.batch

    def warm_up(self, specs: Sequence[RunSpec], text: str) -> dict[str, object]:
        """Wait for the first worker; the others join when ready."""
        self._preparation = specs, text
        self._crew = self._start()
        self._restarts = Counter(dict.fromkeys(range(self._crew.size), self._allowed))
        for worker in range(self._crew.size):
            self._prepare(worker)
        facts = None
        while facts is None:
            facts, _ = self._next()
        return facts | {"workers": self._crew.size}

    def decode(self, chunks: Iterator[Chunk]) -> Iterator[DecodedChunk]:
        while True:
            while self._free and (chunk := self._take(chunks)):
                worker = self._free.pop()
                self._busy[self._crew.submit(worker, chunk)] = worker, chunk
            if not self._again and all(chunk is None for _, chunk in self._busy.values()) and self._free:
                return
            outcome, chunk = self._next()
            if isinstance(outcome, DecodedChunk) and (done := self._split_retries(outcome, chunk)).rows:
                yield done
            elif isinstance(outcome, WorkerLost):
                yield from self._requeue_lost(chunk, outcome)

    def _take(self, chunks: Iterator[Chunk]) -> Chunk | None:
        return self._again.popleft() if self._again else next(chunks, None)

    def _prepare(self, worker: int) -> None:
        self._busy[self._crew.prepare(worker, *self._preparation)] = worker, None

    def _next(self) -> tuple[dict | DecodedChunk | WorkerLost | None, Chunk | None]:
        """Handle the next result: facts, images, or the loss of a worker with images."""
        if not self._busy:
            raise SpecbenchError(
                f"all {self._crew.size} workers were lost, the last one because {self._lost}",
                "finished images are kept; run the same command again to resume",
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

    def _split_retries(self, rows: DecodedChunk, chunk: Chunk) -> DecodedChunk:
        """Split a chunk into final results and first failures, which are requeued singly."""
        requests = {request.key: request for request in chunk.requests}
        final = DecodedChunk(rows.spec, [], rows.images, rows.traces)
        for row in rows.rows:
            request = requests[row["prompt_id"], row["sample"]]
            if row["status"] == "ok" or self._count(chunk, request) >= ATTEMPTS:
                final.rows.append(row | {"attempts": self._tried[_key(chunk, request)] + (row["status"] == "ok")})
            else:
                self._again.append(Chunk(chunk.spec, (request,), chunk.trace))
        return final

    def _requeue_lost(self, chunk: Chunk, lost: WorkerLost) -> Iterator[DecodedChunk]:
        """Requeue a lost worker's images; those already retried become rows with an error."""
        for request in chunk.requests:
            tried = self._count(chunk, request)
            if tried < ATTEMPTS:
                self._again.append(Chunk(chunk.spec, (request,), chunk.trace))
                continue
            base = base_row(request, chunk.spec.seed, environment.now()) | {"attempts": tried}
            yield DecodedChunk(chunk.spec, [failed_row(base, f"lost {tried} times with its worker: {lost}")])

    def _count(self, chunk: Chunk, request: Request) -> int:
        self._tried[_key(chunk, request)] += 1
        return self._tried[_key(chunk, request)]


def _key(chunk: Chunk, request: Request) -> tuple[str, str, int]:
    return chunk.spec.run_id, *request.key
