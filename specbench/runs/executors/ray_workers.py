"""Workers as Ray actors, one model each, on this machine or on a running cluster.

Ray's own restarts and retries are off, because a call reported as failed may have run. The pool retries; repeated
decoding is harmless, since an image does not depend on the worker.
"""

from __future__ import annotations

import logging
import os
import pickle
import sys
from collections.abc import Callable, Sequence
from contextlib import suppress

from specbench.errors import FAILURE, MISSING_PREREQUISITE, SpecbenchError
from specbench.models.interface import ImageModel
from specbench.runs.executors.local import Chunk, DecodedChunk, decode_chunk, warm_up
from specbench.runs.executors.ray_watch import watch
from specbench.runs.executors.worker_pool import WorkerLost
from specbench.specs.run_spec import RunSpec
from specbench.system import environment
from specbench.system.version import __version__

STORE_BYTES = 256 * 2**20
"""Shared memory of a local Ray in bytes, a buffer for decoded images."""

Load = Callable[[], ImageModel]
"""Function that builds the model inside a worker; must be picklable."""


class Worker:
    """Actor class of a worker."""

    def __init__(self, load: bytes, path: Sequence[str]):
        """`load`: a pickled `Load`; `path`: entries added to `sys.path`."""
        self._load, self._model = load, None
        sys.path += [folder for folder in path if folder not in sys.path]

    def prepare(self, specs: Sequence[RunSpec], text: str) -> dict[str, object] | SpecbenchError:
        """Load the model and warm up; return facts about the machine, or an error text."""
        try:
            if self._model is None:
                self._model = pickle.loads(self._load)()
            facts = warm_up(self._model, specs, text)
        except SpecbenchError as error:
            return error
        except Exception as error:  # any error while loading ends the run with one line
            return SpecbenchError(f"a worker cannot load the model: {type(error).__name__}: {error}", "", FAILURE)
        return facts | {
            "specbench": __version__,
            "versions": environment.versions(),
            "hardware": environment.hardware(),
        }

    def decode(self, chunk: Chunk) -> DecodedChunk:
        return decode_chunk(self._model, chunk)

    def pid(self) -> int:
        return os.getpid()


class RayWorkers:
    """A `specbench.runs.executors.worker_pool.WorkerBackend`; to be closed.

    Args:
        load: makes a worker's model.
        size: workers; None means one per GPU of the cluster with `gpu`, else one per node.
        address: of a cluster that is up ("auto" finds one on this machine); None starts one here for this run.
        gpu: each worker needs a GPU of its own.

    Raises:
        SpecbenchError: Ray is not installed (exit code 5), the address does not answer, or the cluster is too small.
    """

    def __init__(self, load: Load, size: int | None, address: str | None = None, gpu: bool = False):
        self._ray = import_ray()
        self._load = self._ray.cloudpickle.dumps(load)
        self._path = [os.path.abspath(folder) for folder in sys.path]
        self._watch = None if address else watch(os.getpid())
        try:
            self._connect(address, size)
            self._options = {"num_cpus": 1, "num_gpus": int(gpu), "max_restarts": 0, "max_task_retries": 0}
            self.size = self._fitting(size, gpu)
            self._actors = [self._start() for _ in range(self.size)]
        except BaseException:
            self.close()
            raise

    def prepare(self, worker: int, specs: Sequence[RunSpec], text: str):
        return self._actors[worker].prepare.remote(specs, text)

    def submit(self, worker: int, chunk: Chunk):
        return self._actors[worker].decode.remote(chunk)

    def wait(self, tickets: Sequence):
        done, _ = self._ray.wait(list(tickets), num_returns=1)
        return done[0]

    def result(self, ticket) -> dict[str, object] | DecodedChunk:
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
        with suppress(Exception):  # usually dead already
            self._ray.kill(self._actors[worker])
        self._actors[worker] = self._start()

    def pids(self) -> list[int]:
        """Process ids of the running workers."""
        return self._ray.get([actor.pid.remote() for actor in self._actors])

    def close(self) -> None:
        """Stop the workers, and Ray if it was started for them."""
        for actor in getattr(self, "_actors", ()):
            with suppress(Exception):
                self._ray.kill(actor)
        self._ray.shutdown()
        if self._watch is not None:
            self._watch.stdin.close()

    def _start(self):
        return self._ray.remote(**self._options)(Worker).remote(self._load, self._path)

    def _connect(self, address: str | None, size: int | None) -> None:
        quiet = {"logging_level": logging.CRITICAL, "log_to_driver": False, "ignore_reinit_error": False}
        here = {"num_cpus": size, "include_dashboard": False, "object_store_memory": STORE_BYTES}
        try:
            self._ray.init(address=address or "local", **quiet, **({} if address else here))
        except (ConnectionError, RuntimeError, ValueError, OSError, TimeoutError) as error:
            where = f"--ray {address}: no Ray cluster answers there" if address else "Ray does not start here"
            advice = "start one with 'ray start --head'; set RAY_AUTH_MODE=token where it asks for a token"
            raise SpecbenchError(f"{where}: {error}", advice, FAILURE) from None

    def _fitting(self, size: int | None, gpu: bool) -> int:
        """Number of workers; raises unless the cluster has resources for all at once."""
        resource = "GPU" if gpu else "CPU"
        there = int(self._ray.cluster_resources().get(resource, 0))
        nodes = sum(node["Alive"] for node in self._ray.nodes())
        wanted = size or (there if gpu else nodes)
        if wanted > there or not wanted:
            raise SpecbenchError(
                f"--workers {wanted}: the cluster has {there} {resource}s", "request fewer, or add nodes"
            )
        return wanted


def import_ray():
    """Import Ray with logging and usage reports off; a SpecbenchError with exit code 5 where it is not installed."""
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    os.environ.setdefault("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "0")
    try:
        import ray  # an extra
        import ray.cloudpickle
        import ray.exceptions
    except ImportError:
        raise SpecbenchError(
            "several workers need Ray, which is not installed",
            "pip install 'ray>=2.40', or use --shard, which needs no Ray",
            MISSING_PREREQUISITE,
        ) from None
    return ray


def _cause(text: str) -> str:
    """Extract the cause from Ray's error message of a lost actor."""
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    if "creation task" in text:
        return f"it cannot start: {lines[-1]}"
    if "node" in text and "dead" in text:
        return "its node died"
    return "its process died (out of memory, a signal, or a crash)"
