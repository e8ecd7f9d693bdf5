"""Parallel compilation of several decoders on a CPU: separate processes fill the cache of compiled code. Each process
runs this module as a program, because a process of `multiprocessing` would run the user's script again."""

import pickle
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from hashlib import sha256
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from specbench.models.interface import CompilableModel, ImageModel
from specbench.models.transformer.compilation import compiled_folder
from specbench.specs.run_spec import RunSpec
from specbench.system import signals
from specbench.system.limits import available_threads

ModelLoader = Callable[[], ImageModel]
Warm = Callable[[ImageModel, Sequence[RunSpec], Sequence[str]], object]  # Compiles specs by running some of their steps

_USUAL_FORMS = 3  # Usual number of compiled forms of a decoder, from `shapes` on a CPU
_MOST_BYTES = 2**30  # Limit of weights that are also loaded by a second process


@contextmanager
def compiled_ahead(
    load: ModelLoader, warm: Warm, model: ImageModel, specs: Sequence[RunSpec], texts: Sequence[str]
) -> Iterator[Callable[[RunSpec], None]]:
    """While the caller compiles `specs` from the first to the last, compile the specs without compiled code on other
    cores, from the last to the first. Yield a function that waits for a spec that another process has begun."""
    unknown = [spec for spec in specs[1:] if not _mark(spec).exists()]
    count = min(len(unknown), available_threads() - 1)
    parameters = getattr(getattr(model, "backbone", None), "parameters", list)
    weights = sum(parameter.numel() * parameter.element_size() for parameter in parameters())
    if model.device.type != "cpu" or weights > _MOST_BYTES:
        count = 0
    with TemporaryDirectory(prefix="specbench-") as claims:
        work = load, warm, unknown[::-1], texts, claims
        crew = [_start(work) for _ in range(count)]

        def wait(spec: RunSpec) -> None:
            if spec not in unknown or _claim(claims, spec):
                return
            while not _mark(spec).exists() and any(process.poll() is None for process in crew):
                signals.look()
                time.sleep(0.05)

        try:
            yield wait
        finally:
            for process in crew:
                process.kill()
                process.wait()
    for spec in specs:
        with suppress(OSError):
            _mark(spec).touch()


@contextmanager
def told_forms(
    model: CompilableModel, specs: Sequence[RunSpec], tell: Callable[[str, int, int], None]
) -> Iterator[Callable[[RunSpec], None]]:
    """Report compiled and expected forms whenever torch begins to compile a form. Yield a function to call after the
    compilation of a decoder; it stores the decoder's number of forms, which later runs expect."""
    from torch._dynamo.callback import callback_handler  # takes seconds; only needed to compile

    expected, counts = sum(map(_known_forms, specs)), [_forms(model)]

    def begins(*_: object) -> None:
        done = _forms(model) - counts[0]
        what = "forms compiled" if done else "forms compiled (the first takes longest)"
        tell(what, done, max(expected, done + 1))  # the first form has a separate name: it takes longer

    def keep(spec: RunSpec) -> None:
        counts.append(_forms(model))
        if counts[-1] > counts[-2]:
            with suppress(OSError):
                _mark(spec).write_text(str(counts[-1] - counts[-2]))

    callback_handler.register_start_callback(begins)
    try:
        yield keep
    finally:
        callback_handler.remove_start_callback(begins)


def _forms(model: CompilableModel) -> int:
    return sum(compiled.forms for compiled in model.compiled)


def _known_forms(spec: RunSpec) -> int:
    """Return the number of forms that a decoder had in an earlier run, or else the usual number."""
    with suppress(OSError, ValueError):
        return int(_mark(spec).read_text())
    return _USUAL_FORMS


def _start(work: tuple[object, ...]) -> subprocess.Popen[bytes]:
    """Start a process that runs `compile_given` on `work` and does not receive the terminal's interrupts."""
    command = [sys.executable, "-P", "-m", __name__]
    pipes: dict[str, Any] = {"stdin": subprocess.PIPE, "stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}
    process = subprocess.Popen(command, **pipes, start_new_session=True)
    given: Any = process.stdin
    with suppress(BrokenPipeError), given:
        pickle.dump(work, given)
    return process


def compile_given() -> None:
    """Read specs from stdin, and compile the specs that no other process has begun."""
    load, warm, specs, texts, claims = pickle.load(sys.stdin.buffer)
    model = load()
    for spec in specs:
        if _claim(claims, spec):
            warm(model, [spec], texts)
            _mark(spec).touch()


def _claim(claims: str, spec: RunSpec) -> bool:
    """Claim a spec; return whether this process was the first to claim it."""
    try:
        (Path(claims) / _mark(spec).name).touch(exist_ok=False)
    except FileExistsError:
        return False
    return True


def _mark(spec: RunSpec) -> Path:
    """Return the file that marks the decoder's code as compiled under these settings."""
    compiled = spec.model, spec.dtype, spec.threads, spec.batch, spec.sampling, spec.decoder
    return compiled_folder() / f"specbench-{sha256(repr(compiled).encode()).hexdigest()[:16]}"


if __name__ == "__main__":
    compile_given()
