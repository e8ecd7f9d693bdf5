"""Time contenders in interleaved rounds, so that drift of the machine affects all equally."""

import statistics
import sys
import time
from collections.abc import Callable, Sequence

from specbench.decoding.loop import decode
from specbench.models.interface import ImageModel
from specbench.prompts import Request
from specbench.specs.presets import DecoderSpec
from specbench.specs.run_spec import Sampling

CAPTION = "a red circle left of a blue square"


def timed_decode(
    model: ImageModel, decoder: DecoderSpec, sampling: Sampling, sample: int, caption: str = CAPTION
) -> dict:
    """Decode one image at batch 1; returns milliseconds without rendering, spans of the loop, forwards and tokens."""
    start, cpu = time.perf_counter(), time.process_time()
    [image] = decode(model, [Request(caption, "bench", sample)], decoder, sampling, seed=0, render=False)
    spent = {"wall_ms": (time.perf_counter() - start) * 1e3, "cpu_ms": (time.process_time() - cpu) * 1e3}
    return {**spent, "spans_ms": image.spans_ms, "nfe": image.nfe, "tokens": image.committed}


def in_turns(
    contenders: dict[str, Callable[[int], dict]], rounds: int, warm_up: Sequence[str] | None = None
) -> list[dict]:
    """Run each contender once per round in rotating order, after a warm-up of the names in `warm_up` (default: all)."""
    names, rows = list(contenders), []
    for name in names if warm_up is None else warm_up:
        contenders[name](0)
    for turn in range(rounds):
        for place in range(len(names)):
            name = names[(turn + place) % len(names)]
            rows.append({"name": name, "round": turn, **contenders[name](turn + 1)})
            print(f"{name}: round {turn + 1} of {rounds}", file=sys.stderr)
    return rows


def cpu_ms(row: dict) -> float:
    """CPU milliseconds, which are least affected by other load."""
    return row["cpu_ms"]


def median(rows: list[dict], name: str, value: Callable[[dict], float] = lambda row: row["wall_ms"]) -> float:
    return statistics.median(value(row) for row in rows if row["name"] == name)
