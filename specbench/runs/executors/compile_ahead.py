"""Compilation of several decoders side by side on a CPU: processes of their own fill the cache of compiled code."""

from __future__ import annotations

import multiprocessing
import signal
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ProcessPoolExecutor
from contextlib import contextmanager, suppress
from hashlib import sha256
from pathlib import Path

from specbench.models.interface import ImageModel
from specbench.models.transformer.compilation import compiled_folder
from specbench.runs.threads import available_threads
from specbench.specs.run_spec import RunSpec
from specbench.system import signals

Warm = Callable[[ImageModel, Sequence[RunSpec], Sequence[str]], object]
"""Runs some steps of the runs, compiling them."""

_MOST_BYTES = 2**30
"""Weights of a model above which no other process loads them, too."""


@contextmanager
def compiled_ahead(
    load: Callable[[], ImageModel], model: ImageModel, specs: Sequence[RunSpec], texts: Sequence[str], warm: Warm
) -> Iterator[Callable[[RunSpec], None]]:
    """While the first of `specs` is compiled here, let other cores compile those that were never compiled on this
    machine; yields a function that waits for one of them."""
    unknown = [spec for spec in specs[1:] if not _mark(spec).exists()]
    processes = min(len(unknown), available_threads() - 1)
    if processes < 1 or model.device.type != "cpu" or _weights(model) > _MOST_BYTES:
        yield lambda spec: None
    else:
        with ProcessPoolExecutor(processes, multiprocessing.get_context("spawn"), _let_the_parent_stop) as pool:
            work: dict[RunSpec, Future] = {spec: pool.submit(_compile, load, spec, texts, warm) for spec in unknown}

            def wait(spec: RunSpec) -> None:
                while spec in work and not work[spec].done():
                    signals.look()
                    time.sleep(0.05)

            try:
                yield wait
            finally:
                pool.shutdown(wait=False, cancel_futures=True)
                for process in list((pool._processes or {}).values()):
                    process.terminate()
    for spec in specs:
        with suppress(OSError):
            _mark(spec).touch()


def _compile(load: Callable[[], ImageModel], spec: RunSpec, texts: Sequence[str], warm: Warm) -> None:
    warm(load(), [spec], texts)


def _let_the_parent_stop() -> None:
    """Leave an interrupt of the terminal to the parent, which ends this process."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)


def _weights(model: ImageModel) -> int:
    """Bytes of a model's parameters; 0 where it has none that are known."""
    parameters = getattr(getattr(model, "backbone", None), "parameters", list)
    return sum(one.numel() * one.element_size() for one in parameters())


def _mark(spec: RunSpec) -> Path:
    """A file that stands where a decoder was compiled under these settings."""
    compiled = spec.model, spec.dtype, spec.threads, spec.batch, spec.sampling, spec.decoder
    return compiled_folder() / f"specbench-{sha256(repr(compiled).encode()).hexdigest()[:16]}"
