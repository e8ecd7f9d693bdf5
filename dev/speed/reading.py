"""Measure images per second of scoring with networks that take no time. Images are read ahead by threads and decoded
once for all metrics, or are read one after another for each metric.

    python dev/speed/reading.py [--images 48] [--size 512] [--rounds 5] [--threads N ...] [--out results/speed]

The networks are stubs that return at once; reading, digest check, decoding, resize and storing of the scores are real.
Both ways take turns over the same PNG files. `decode_cpu_s` is the CPU time of reading and decoding each image once,
which cannot be avoided: on C free cores the images per second stay below C x images / decode_cpu_s. `serial_cpu_s` is
the CPU time of the thread that runs the networks: with enough cores the images per second approach images /
serial_cpu_s, independent of other load.
"""

import argparse
import hashlib
import json
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import numpy as np
import pandas as pd
import torch
from PIL import Image

from specbench.metrics import scoring
from specbench.metrics.base import Metric, Settings
from specbench.metrics.catalog import find_protocol
from specbench.metrics.clip import Clip
from specbench.metrics.fid import INCEPTION_FEATURES, Fid
from specbench.metrics.preference import Hpsv2
from specbench.store.run_store import read_image
from specbench.system import environment
from specbench.system.files import write_atomically


def one_after_another(load: Callable, items: Sequence, batch: int) -> Iterator[list]:
    """Predecessor of `read_ahead`: the thread of the network reads its own images."""
    for start in range(0, len(items), batch):
        yield [load(item) for item in items[start : start + batch]]


READ_AHEAD = scoring.read_ahead


def score_before(images: scoring.Images, metrics: Sequence[Metric]) -> None:
    """Reader of version 0.1.0: every metric reads all images itself, in the thread of its network."""
    scoring.read_ahead = one_after_another
    for metric in metrics:
        scoring.score([images], metric)


def score_now(images: scoring.Images, metrics: Sequence[Metric]) -> None:
    scoring.read_ahead = READ_AHEAD
    scoring.score([images], metrics)


WAYS = {"before": score_before, "now": score_now}


class StubVision:
    image_size = (224, 224)


class StubNetwork:
    """Accept any images and return at once."""

    visual, context_length = StubVision(), 77

    def __call__(self, x_BCHW: torch.Tensor) -> torch.Tensor:
        return torch.zeros(len(x_BCHW), INCEPTION_FEATURES)

    def encode_image(self, x_BCHW: torch.Tensor, normalize: bool) -> torch.Tensor:
        return torch.zeros(len(x_BCHW), 8)

    encode_text = encode_image


def stubbed(metric: Metric) -> Metric:
    metric.prepare, metric.downloads = lambda: None, list
    metric.accepts = lambda category, meta: True
    metric.identity = metric.feature_identity = dict
    metric.scores = lambda statistics: []
    metric.network = StubNetwork()
    return metric


METRICS = {
    "fid[pytorch-fid]": lambda settings: Fid("pytorch-fid", settings),
    "fid[clean+center256]": lambda settings: Fid("clean+center256", settings),
    "clip[b16+299]": lambda settings: Clip("b16+299", settings),
    "hpsv2[v2.1]": lambda settings: Hpsv2("v2.1", settings),
}
CASES = {**{name: (name,) for name in METRICS}, "--protocol sjd": find_protocol("sjd")}


def pictures(folder: Path, n: int, size: int) -> scoring.Images:
    """Store pictures as a run does: smooth, with a little noise, about as compressible as generated images."""
    draw, rows = np.random.default_rng(0), []
    for number in range(n):
        coarse = draw.integers(0, 256, (size // 16, size // 16, 3), dtype=np.uint8)
        smooth = np.asarray(Image.fromarray(coarse).resize((size, size), Image.Resampling.BICUBIC)).astype(int)
        pixels = (smooth + draw.integers(-6, 7, smooth.shape)).clip(0, 255).astype(np.uint8)
        Image.fromarray(pixels).save(folder / f"{number}.png")
        digest = hashlib.sha256((folder / f"{number}.png").read_bytes()).hexdigest()
        rows.append({"prompt_id": f"p{number}", "sample": 0, "prompt": "a cat", "category": None, "meta": "{}",
                     "image": f"{number}.png", "image_sha256": digest, "started_at": ""})  # fmt: skip
    rows = pd.DataFrame(rows)
    return scoring.Images("speed", folder, rows, lambda row: read_image(folder, row.image, row.image_sha256))


def clocks() -> tuple[float, float, float]:
    """Seconds of the clock, of this process's CPU time, and of this thread's."""
    return time.perf_counter(), time.process_time(), time.thread_time()


def measure(case: str, n: int, size: int, rounds: int) -> Iterator[dict]:
    """Measure one row per way and round, after a round to warm up."""
    with tempfile.TemporaryDirectory() as folder:
        images = pictures(Path(folder), n, size)
        for turn in range(rounds + 1):
            start = clocks()
            for row in images.rows.itertuples():
                images.read(row)
            decode_cpu = time.thread_time() - start[2]
            for way, score in WAYS.items():
                with tempfile.TemporaryDirectory() as out:
                    begun = scoring.Images(images.name, Path(out), images.rows, images.read)
                    metrics = [stubbed(METRICS[name](Settings())) for name in CASES[case]]
                    start = clocks()
                    score(begun, metrics)
                    wall, cpu, serial = (now - then for now, then in zip(clocks(), start, strict=True))
                if turn:
                    yield {"case": case, "way": way, "round": turn, "images": n, "size": size, "wall_s": wall,
                           "cpu_s": cpu, "serial_cpu_s": serial, "decode_cpu_s": decode_cpu,
                           "images_per_s": n / wall}  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--images", type=int, default=48)
    parser.add_argument("--size", type=int, default=512)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--out", type=Path, default=Path("results/speed"))
    parser.add_argument("--threads", type=int, nargs="+", default=[torch.get_num_threads(), 1], help="of torch")
    options = parser.parse_args()
    facts, rows = environment.environment_facts(), []
    for threads in dict.fromkeys(options.threads):
        torch.set_num_threads(threads)
        for name in CASES:
            for row in measure(name, options.images, options.size, options.rounds):
                rows.append(row | {"threads": threads, "cores": environment.available_cores()})
                print(json.dumps(rows[-1]), flush=True)
    content = {"command": ["python", *sys.argv], "environment": facts, "rows": rows}
    write_atomically(options.out / "reading.json", (json.dumps(content, indent=1) + "\n").encode())


if __name__ == "__main__":
    main()
