"""Worker pool (one queue of chunks, restarts of lost workers, bounded retries) and its workers as Ray actors, one model
each, on this machine or on a cluster. Ray's own restarts and retries are off, because a call that failed for Ray may
have run. Decoding an image twice is harmless."""

from __future__ import annotations

import logging
import os
import pickle
import signal
import sys
from collections import Counter, deque
from collections.abc import Callable, Hashable, Iterator, Sequence
from contextlib import suppress
from typing import Any

from specbench.errors import FAILURE, CompileError, SpecbenchError
from specbench.models.interface import ImageModel
from specbench.prompts import Request
from specbench.runs.executors.local import Chunk, DecodedChunk, Tell, decode_chunk, warm_up
from specbench.runs.executors.ray_cluster import import_ray, no_cluster
from specbench.runs.run_progress import Reporter
from specbench.specs.run_spec import RunSpec
from specbench.store.schema import RowStatus, base_row, failed_row
from specbench.system import environment, signals
from specbench.system.version import __version__

ATTEMPTS = 2  # Attempts per image; the last failure or lost worker is stored as an error in the image's row
RESTARTS = 3  # Maximum number of replacements per worker; then the pool continues with fewer workers
_STORE_BYTES = 256 * 2**20  # Bytes of a local Ray's shared memory, which buffers decoded images
Ticket = Hashable
Load = Callable[[], ImageModel]  # Function that builds the model inside a worker; must be picklable


class WorkerPool:
    """`Executor` that distributes chunks among workers. Workers are started when there is work."""

    def __init__(self, start: Callable[[], RayWorkers], restarts: int = RESTARTS):
        self._start = start
        self._allowed = restarts
        self._tried: Counter[tuple[str, str, int]] = Counter()
        self._again: deque[Chunk] = deque()
        self._busy: dict[Ticket, tuple[int, Chunk | None]] = {}
        self._free: list[int] = []
        self._lost = ""
        self._hardware: dict[int, Any] = {}

    def portion(self, spec: RunSpec) -> int:
        return spec.batch

    def warm_up(self, specs: Sequence[RunSpec], texts: Sequence[str], tell: Tell | None = None) -> dict[str, object]:
        """Wait for the first worker; other workers join when ready."""
        self._preparation = specs, texts
        self._crew = self._start()
        self._restarts = Counter(dict.fromkeys(range(self._crew.size), self._allowed))
        for worker in range(self._crew.size):
            self._prepare(worker)
        facts = None
        while facts is None:
            facts, _ = self._next()
        self._first_hardware = facts.get("hardware")
        return facts | {"workers": self._crew.size}

    def decode(self, chunks: Iterator[Chunk], reporter: Reporter | None = None) -> Iterator[DecodedChunk]:
        while True:
            while self._free and (chunk := self._again.popleft() if self._again else next(chunks, None)):
                worker = self._free.pop()
                self._busy[self._crew.submit(worker, chunk)] = worker, chunk
            if not self._again and all(chunk is None for _, chunk in self._busy.values()) and self._free:
                return
            outcome, chunk = self._next()
            if isinstance(outcome, DecodedChunk) and (done := self._split_retries(outcome, chunk)).rows:
                yield done
            elif isinstance(outcome, WorkerLost):
                yield from self._requeue_lost(chunk, outcome)

    def _prepare(self, worker: int) -> None:
        self._busy[self._crew.prepare(worker, *self._preparation)] = worker, None

    def _next(self) -> tuple[Any, Any]:
        """Wait for the next event and handle it: a ready worker, decoded images, or a lost worker."""
        if not self._busy:
            what = f"all {self._crew.size} workers were lost; the last worker: {self._lost}"
            raise SpecbenchError(what, "finished images are kept; run the same command again to resume", FAILURE)
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
        if isinstance(outcome, DecodedChunk):
            hardware = self._hardware[worker]
            outcome.hardware = hardware if hardware != self._first_hardware else None
        else:
            self._hardware[worker] = outcome.get("hardware")
        return outcome, chunk

    def _split_retries(self, rows: DecodedChunk, chunk: Chunk) -> DecodedChunk:
        """Remove images that failed for the first time from a chunk's results, and requeue each of them separately."""
        requests = {request.key: request for request in chunk.requests}
        final = DecodedChunk(rows.spec, [], rows.images, rows.traces, rows.hardware)
        for row in rows.rows:
            request = requests[row["prompt_id"], row["sample"]]
            ok = row["status"] == RowStatus.OK
            if ok or self._count(chunk, request) >= ATTEMPTS:
                final.rows.append(row | {"attempts": self._tried[_key(chunk, request)] + ok})
            else:
                self._again.append(Chunk(chunk.spec, (request,), chunk.trace))
        return final

    def _requeue_lost(self, chunk: Chunk, lost: WorkerLost) -> Iterator[DecodedChunk]:
        """Requeue the images of a lost worker; images that were already retried get a row with an error."""
        for request in chunk.requests:
            tried = self._count(chunk, request)
            if tried < ATTEMPTS:
                self._again.append(Chunk(chunk.spec, (request,), chunk.trace))
                continue
            base = base_row(request, chunk.spec.seed, environment.now()) | {"attempts": tried}
            yield DecodedChunk(chunk.spec, [failed_row(base, f"its worker was lost {tried} times: {lost}")])

    def _count(self, chunk: Chunk, request: Request) -> int:
        self._tried[_key(chunk, request)] += 1
        return self._tried[_key(chunk, request)]


def _key(chunk: Chunk, request: Request) -> tuple[str, str, int]:
    return chunk.spec.run_id, *request.key


class WorkerLost(Exception):
    """Loss of a worker process; the message states the cause if known."""


class RayWorkers:
    """Workers as Ray actors, addressed by index, with at most one call in flight each; `close` them after use. `size`:
    None means one per GPU of the cluster if `gpu`, else one per node. `address`: None starts a local cluster."""

    def __init__(self, load: Load, size: int | None, address: str | None = None, gpu: bool = False):
        self._ray = import_ray()
        self._load = self._ray.cloudpickle.dumps(load)
        self._path = [os.path.abspath(folder) for folder in sys.path]
        try:
            self._connect(address, size)
            self._options = {"num_cpus": 1, "num_gpus": int(gpu), "max_restarts": 0, "max_task_retries": 0}
            self.size = self._fitting(size, gpu)
            self._actors = [self._start() for _ in range(self.size)]
        except BaseException:
            self.close()
            raise

    def prepare(self, worker: int, specs: Sequence[RunSpec], texts: Sequence[str]) -> Ticket:
        """Start loading and warm-up on a worker; `result` returns its facts."""
        return self._actors[worker].prepare.remote(specs, texts)

    def submit(self, worker: int, chunk: Chunk) -> Ticket:
        """Start decoding a chunk on a worker; `result` returns its `DecodedChunk`."""
        return self._actors[worker].decode.remote(chunk)

    def wait(self, tickets: Sequence[Ticket]) -> Ticket:
        """Wait until a ticket is done or its worker is lost; return the ticket."""
        done, _ = self._ray.wait(list(tickets), num_returns=1)
        return done[0]

    def result(self, ticket: Ticket) -> dict[str, Any] | DecodedChunk:
        """Return a ticket's result; raise `WorkerLost` if the process died, or the SpecbenchError of `prepare`."""
        errors = self._ray.exceptions
        try:
            outcome = self._ray.get(ticket)
        except errors.OutOfMemoryError:
            raise WorkerLost("its machine ran out of memory") from None
        except errors.ActorDiedError as error:
            raise WorkerLost(_cause(str(error))) from None
        except (errors.RayActorError, errors.ObjectLostError) as error:
            raise WorkerLost(type(error).__name__) from None
        if isinstance(outcome, SpecbenchError):
            raise outcome
        if isinstance(outcome, dict) and (other := outcome.pop("specbench")) != __version__:
            raise SpecbenchError(
                f"a worker runs specbench {other}, this process {__version__}", "install the same version everywhere"
            )
        return outcome

    def replace(self, worker: int) -> None:
        with suppress(Exception):  # usually already dead
            self._ray.kill(self._actors[worker])
        self._actors[worker] = self._start()

    def pids(self) -> list[int]:
        return self._ray.get([actor.pid.remote() for actor in self._actors])

    def close(self) -> None:
        """Stop the workers, and Ray if it was started for them."""
        for actor in getattr(self, "_actors", ()):
            with suppress(Exception):
                self._ray.kill(actor)
        self._ray.shutdown()

    def _start(self) -> Any:
        return self._ray.remote(**self._options)(Worker).remote(self._load, self._path)

    def _connect(self, address: str | None, size: int | None) -> None:
        quiet = {"logging_level": logging.CRITICAL, "log_to_driver": False, "ignore_reinit_error": False}
        here = {"num_cpus": size, "include_dashboard": False, "object_store_memory": _STORE_BYTES}
        try:
            with signals.kept_from_children():
                self._ray.init(address=address or "local", **quiet, **({} if address else here))
        except (ConnectionError, RuntimeError, ValueError, OSError, TimeoutError) as error:
            raise no_cluster(address, str(error)) from None
        except SystemExit:  # raised by Ray on SIGTERM
            raise signals.stopped(number=signal.SIGTERM) from None
        finally:
            signals.take_back()

    def _fitting(self, size: int | None, gpu: bool) -> int:
        """Return the number of workers; raise an error if the cluster lacks resources for all of them at once."""
        resource = "GPU" if gpu else "CPU"
        there = int(self._ray.cluster_resources().get(resource, 0))
        nodes = sum(node["Alive"] for node in self._ray.nodes())
        workers = size or (there if gpu else nodes)
        if workers > there or not workers:
            raise SpecbenchError(
                f"--workers {workers}: the cluster has {there} {resource}s", "request fewer, or add nodes"
            )
        return workers


class Worker:
    """Actor class of a worker."""

    def __init__(self, load: bytes, path: Sequence[str]):
        """`load`: a pickled `Load`; `path`: entries added to `sys.path`."""
        self._load = load
        self._model: Any = None
        sys.path += [folder for folder in path if folder not in sys.path]

    def prepare(self, specs: Sequence[RunSpec], texts: Sequence[str]) -> dict[str, object] | SpecbenchError:
        """Load the model and warm up; return facts about the machine, or the error."""
        try:
            if self._model is None:
                self._model = pickle.loads(self._load)()
            facts = warm_up(self._model, specs, texts)
        except SpecbenchError as error:
            return error
        except (Exception, SystemExit) as error:  # a loading error ends the run with one line
            return SpecbenchError(f"a worker cannot load the model: {type(error).__name__}: {error}", "", FAILURE)
        return facts | {
            "specbench": __version__,
            "versions": environment.versions(),
            "hardware": environment.hardware(),
        }

    def decode(self, chunk: Chunk) -> DecodedChunk | CompileError:
        try:
            return decode_chunk(self._model, chunk)
        except CompileError as error:
            return error
        except SpecbenchError:  # the device failed; only a new process can use it again
            os._exit(FAILURE)

    def pid(self) -> int:
        return os.getpid()


def _cause(text: str) -> str:
    """Extract the cause from Ray's error message of a lost actor."""
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    if "creation task" in text:
        return f"it cannot start: {lines[-1]}"
    if "node" in text and "dead" in text:
        return "its node died"
    return "its process died (out of memory, a signal, or a crash)"
