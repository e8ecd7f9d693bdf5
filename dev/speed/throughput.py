"""Images per hour of `shapes`: continuous batching against one image at a time."""

import time
from functools import partial

from timing import in_turns, median

from specbench.decoding.continuous_batching import decode_each
from specbench.models.catalog import load_model
from specbench.models.interface import ImageModel
from specbench.prompts import Request, load_prompts
from specbench.specs.presets import DecoderSpec, resolve
from specbench.specs.run_spec import Sampling

DECODERS, BATCHES = ("ar", "sjd"), (1, 16)
IMAGES = 20
"""More images than rows of a batch: as in a run, rows are refilled, and at the end some rows are empty."""


def timed_images(
    model: ImageModel, decoder: DecoderSpec, sampling: Sampling, batch: int, texts: list[str], sample: int
) -> dict:
    """Milliseconds for encoding, decoding and rendering one image of each text."""
    requests = [Request(text, text, sample) for text in texts]
    before = time.perf_counter(), time.process_time()
    done = sum(1 for _ in decode_each(model, requests, batch, decoder, sampling, seed=0))
    wall_ms, cpu_ms = (time.perf_counter() - before[0]) * 1e3, (time.process_time() - before[1]) * 1e3
    return {"wall_ms": wall_ms, "cpu_ms": cpu_ms, "images": done, "batch": batch}


def bench_throughput(sampling: Sampling, rounds: int) -> tuple[list[dict], list[str]]:
    """Images per hour by decoder and batch, and their ratio to batch 1."""
    model = load_model("shapes")
    texts = [prompt.text for prompt in load_prompts("shapes").prompts[:IMAGES]]
    contenders = {
        f"{name}, batch {batch}": partial(timed_images, model, resolve(name), sampling, batch, texts)
        for name in DECODERS
        for batch in BATCHES
    }
    rows = in_turns(contenders, rounds, warm_up=[])
    lines = ["decoder, batch: images per hour, over batch 1"]
    for name in DECODERS:
        pace = [median(rows, f"{name}, batch {batch}", per_hour) for batch in BATCHES]
        lines += [
            f"{name}, {batch}: {rate:.0f}, {rate / pace[0]:.2f}" for batch, rate in zip(BATCHES, pace, strict=True)
        ]
    return rows, lines


def per_hour(row: dict) -> float:
    """Images per hour of CPU time of a single thread, which is least affected by other load."""
    return 3.6e6 * row["images"] / row["cpu_ms"]
