"""What keeping the values of the Rosenblatt transform costs: images decoded with and without, in turns."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

from timing import cpu_ms, in_turns, median, timed_decode

from specbench.decoding.uniforms import UniformsRecorder
from specbench.models.catalog import load_model
from specbench.specs.presets import DecoderSpec, resolve
from specbench.specs.run_spec import Sampling

DECODERS = ("ar", "sjd", "gsd", "scd-mc")


def bench_uniforms(sampling: Sampling, rounds: int) -> tuple[list[dict], list[str]]:
    """CPU time of one image at batch 1, the recording being left out in every other decode."""
    model, rows, lines = load_model("shapes"), [], []
    for name in DECODERS:
        decoder = resolve(name, {} if name == "ar" else {"window": 16})

        def kept(sample: int, decoder: DecoderSpec = decoder) -> dict:
            return timed_decode(model, decoder, sampling, sample)

        def left_out(sample: int, kept: Callable[[int], dict] = kept) -> dict:
            with without_recording():
                return kept(sample)

        rows += in_turns({f"{name} kept": kept, f"{name} left out": left_out}, rounds)
        pairs = [[row["cpu_ms"] for row in rows if row["name"] == f"{name} {how}"] for how in ("kept", "left out")]
        ratio = sum(pairs[0]) / sum(pairs[1])
        steps = rows[-1]["nfe"]
        extra = (median(rows, f"{name} kept", cpu_ms) - median(rows, f"{name} left out", cpu_ms)) / steps
        lines.append(f"{name:8} {ratio - 1:+.1%} of a step over {rounds} images; median {extra * 1e3:+.0f} us a step")
    return rows, lines


@contextmanager
def without_recording() -> Iterator[None]:
    """Decode without keeping the values."""
    note, rows = UniformsRecorder.note, UniformsRecorder.rows
    UniformsRecorder.note = lambda *given: None
    UniformsRecorder.rows = lambda *given: {}
    try:
        yield
    finally:
        UniformsRecorder.note, UniformsRecorder.rows = note, rows
