"""Worker backend of forked processes, which start in milliseconds so that many can be killed."""

import os
import signal
from collections.abc import Callable, Sequence
from contextlib import suppress
from multiprocessing import Pipe
from multiprocessing.connection import Connection, wait

from specbench.runs.executors.local import Chunk, decode_chunk, warm_up
from specbench.runs.executors.ray_workers import WorkerLost
from specbench.specs.run_spec import RunSpec


class ForkCrew:
    def __init__(self, load: Callable, size: int):
        self._load, self.size = load, size
        self._ends: dict[int, Connection] = {}
        self._pids = {worker: self._start(worker) for worker in range(size)}

    def prepare(self, worker: int, specs: Sequence[RunSpec], texts: Sequence[str]) -> Connection:
        return self._send(worker, (specs, texts))

    def submit(self, worker: int, chunk: Chunk) -> Connection:
        return self._send(worker, chunk)

    def wait(self, tickets: Sequence[Connection]) -> Connection:
        return wait(tickets)[0]

    def result(self, ticket: Connection):
        try:
            return ticket.recv()
        except (EOFError, OSError):
            raise WorkerLost("its process died") from None

    def replace(self, worker: int) -> None:
        self._reap(worker)
        self._pids[worker] = self._start(worker)

    def pids(self) -> list[int]:
        return list(self._pids.values())

    def close(self) -> None:
        for worker in self._pids:
            self._reap(worker)

    def _start(self, worker: int) -> int:
        mine, theirs = Pipe()
        pid = os.fork()
        if pid:
            theirs.close()
            self._ends[worker] = mine
            return pid
        # Like a Ray worker, the process must not inherit the driver's open files, because it would keep their locks.
        kept = {0, 1, 2, theirs.fileno()}
        for handle in {int(name) for name in os.listdir("/proc/self/fd")} - kept:
            with suppress(OSError):
                os.close(handle)
        with suppress(EOFError, OSError):
            _serve(theirs, self._load())
        os._exit(0)

    def _reap(self, worker: int) -> None:
        self._ends[worker].close()
        with suppress(ProcessLookupError):
            os.kill(self._pids[worker], signal.SIGKILL)
        with suppress(ChildProcessError):
            os.waitpid(self._pids[worker], 0)

    def _send(self, worker: int, work) -> Connection:
        with suppress(OSError):  # a dead worker is detected while waiting for its answer
            self._ends[worker].send(work)
        return self._ends[worker]


def _serve(end: Connection, model) -> None:
    while True:
        work = end.recv()
        if isinstance(work, Chunk):
            end.send(decode_chunk(model, work))
        else:
            warm_up(model, *work)
            end.send({})
