"""Cost of keeping the values of the Rosenblatt transform: images decoded with and without them, in turns."""

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from timing import cpu_ms, in_turns, median, timed_decode

from specbench.decoding import recorder
from specbench.decoding.uniforms import UniformsRecorder
from specbench.models.catalog import load_model
from specbench.specs.presets import DecoderSpec, resolve
from specbench.specs.run_spec import Sampling

DECODERS = ("ar", "sjd", "gsd", "scd-mc")


def bench_uniforms(sampling: Sampling, rounds: int) -> tuple[list[dict], list[str]]:
    """CPU time of one image at batch 1, alternately with and without recording."""
    model, rows, lines = load_model("shapes"), [], []
    for name in DECODERS:
        decoder = resolve(name, {} if name == "ar" else {"window": 16})

        def kept(sample: int, decoder: DecoderSpec = decoder) -> dict:
            with timed_recording() as spent:
                timed = timed_decode(model, decoder, sampling, sample)
            return {**timed, "recording_ms": sum(spent)}

        def left_out(sample: int, kept: Callable[[int], dict] = kept) -> dict:
            with without_recording():
                return {**kept(sample), "recording_ms": 0.0}

        rows += in_turns({f"{name} kept": kept, f"{name} left out": left_out}, rounds)
        pairs = [[row["cpu_ms"] for row in rows if row["name"] == f"{name} {how}"] for how in ("kept", "left out")]
        ratio = sum(pairs[0]) / sum(pairs[1])
        steps = rows[-1]["nfe"]
        extra = (median(rows, f"{name} kept", cpu_ms) - median(rows, f"{name} left out", cpu_ms)) / steps
        mine = [row for row in rows if row["name"] == f"{name} kept"]
        inside = sum(row["recording_ms"] for row in mine) / sum(row["wall_ms"] for row in mine)
        lines.append(
            f"{name:8} {inside:.1%} of the time is inside the recorder; with over without it {ratio - 1:+.1%} over "
            f"{rounds} images, median {extra * 1e3:+.0f} us a step"
        )
    return rows, lines


@contextmanager
def timed_recording() -> Iterator[list[float]]:
    """Milliseconds of each call of the recorder and of the selection of the committed slots, which other
    measurements also need; this is less noisy than the difference of two decodes."""
    spent: list[float] = []

    def timed(plain: Callable) -> Callable:
        def call(*arguments: object) -> object:
            start = time.perf_counter()
            result = plain(*arguments)
            spent.append((time.perf_counter() - start) * 1e3)
            return result

        return call

    note, rows, chosen = UniformsRecorder.note, UniformsRecorder.rows, recorder.committed_slots
    UniformsRecorder.note, UniformsRecorder.rows = timed(note), timed(rows)
    recorder.committed_slots = timed(chosen)
    try:
        yield spent
    finally:
        UniformsRecorder.note, UniformsRecorder.rows, recorder.committed_slots = note, rows, chosen


@contextmanager
def without_recording() -> Iterator[None]:
    """Decode without keeping the values."""
    note, rows = UniformsRecorder.note, UniformsRecorder.rows
    UniformsRecorder.note = lambda *arguments: None
    UniformsRecorder.rows = lambda *arguments: {}
    try:
        yield
    finally:
        UniformsRecorder.note, UniformsRecorder.rows = note, rows
