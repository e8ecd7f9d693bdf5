"""Compilation of several decoders side by side on a CPU: processes of their own fill the cache of compiled code. Each
is this module run as a program, because a process of `multiprocessing` would run the user's script again."""

from __future__ import annotations

import pickle
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from hashlib import sha256
from pathlib import Path

from specbench.models.interface import ImageModel
from specbench.models.transformer.compilation import compiled_folder
from specbench.runs.compiler import available_threads
from specbench.specs.run_spec import RunSpec
from specbench.system import signals

ModelLoader = Callable[[], ImageModel]
Warm = Callable[[ImageModel, Sequence[RunSpec], Sequence[str]], object]  # Runs some steps of the runs, compiling them

_MOST_BYTES = 2**30  # Weights of a model above which no other process loads them, too


@contextmanager
def compiled_ahead(
    load: ModelLoader, warm: Warm, model: ImageModel, specs: Sequence[RunSpec], texts: Sequence[str]
) -> Iterator[Callable[[RunSpec], None]]:
    """While the first of `specs` is compiled here, let other cores compile those that were never compiled on this
    machine; yields a function that waits for one of them."""
    unknown = [spec for spec in specs[1:] if not _mark(spec).exists()]
    count = min(len(unknown), available_threads() - 1)
    if model.device.type != "cpu" or _weights(model) > _MOST_BYTES:
        count = 0
    crew: dict[RunSpec, subprocess.Popen] = {}
    for part in range(count):
        own = unknown[part::count]
        crew |= dict.fromkeys(own, _start(load, warm, own, texts))

    def wait(spec: RunSpec) -> None:
        while spec in crew and crew[spec].poll() is None and not _mark(spec).exists():
            signals.look()
            time.sleep(0.05)

    try:
        yield wait
    finally:
        for process in set(crew.values()):
            process.kill()
            process.wait()
    for spec in specs:
        with suppress(OSError):
            _mark(spec).touch()


def _start(load: ModelLoader, warm: Warm, specs: Sequence[RunSpec], texts: Sequence[str]) -> subprocess.Popen:
    """A process that compiles `specs` one after the other; an interrupt of the terminal does not reach it."""
    command = [sys.executable, "-P", "-m", __name__]
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}
    process = subprocess.Popen(command, **pipes, start_new_session=True)
    with suppress(BrokenPipeError), process.stdin as work:
        pickle.dump((load, warm, specs, texts), work)
    return process


def compile_given() -> None:
    """Compile what stands on stdin."""
    load, warm, specs, texts = pickle.load(sys.stdin.buffer)
    model = load()
    for spec in specs:
        warm(model, [spec], texts)
        _mark(spec).touch()


def _weights(model: ImageModel) -> int:
    """Bytes of a model's parameters; 0 where it has none that are known."""
    parameters = getattr(getattr(model, "backbone", None), "parameters", list)
    return sum(one.numel() * one.element_size() for one in parameters())


def _mark(spec: RunSpec) -> Path:
    """A file beside the code of a decoder that was compiled under these settings."""
    compiled = spec.model, spec.dtype, spec.threads, spec.batch, spec.sampling, spec.decoder
    return compiled_folder() / f"specbench-{sha256(repr(compiled).encode()).hexdigest()[:16]}"


if __name__ == "__main__":
    compile_given()
