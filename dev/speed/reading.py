"""Images per second of scoring where the network takes no time: images read ahead by threads, or one after another.

    python dev/speed/reading.py [--images 48] [--size 512] [--rounds 5] [--out results/speed]

The network is a stub that returns at once; reading, digest check, decoding, resize and storing of the scores are real.
Both ways take turns over the same PNG files, with torch's default number of threads and with one. `serial_cpu_s` is the
CPU time of the thread that runs the network: with enough cores the images per second approach images / serial_cpu_s,
whatever else runs on the machine.
"""

from __future__ import annotations

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
from specbench.metrics.clip import Clip
from specbench.metrics.fid import Fid
from specbench.metrics.hpsv2 import Hpsv2
from specbench.metrics.inception import FEATURES
from specbench.store.run_images import read_image
from specbench.system import environment
from specbench.system.files import write_atomically


def one_after_another(load: Callable, items: Sequence, batch: int) -> Iterator[list]:
    """What `read_ahead` replaced: the thread of the network reads its own images."""
    for start in range(0, len(items), batch):
        yield [load(item) for item in items[start : start + batch]]


WAYS = {"one after another": one_after_another, "ahead": scoring.read_ahead}


class StubVision:
    image_size = (224, 224)


class StubNetwork:
    """Accept any images and return at once."""

    visual, context_length = StubVision(), 77

    def __call__(self, x_BCHW: torch.Tensor) -> torch.Tensor:
        return torch.zeros(len(x_BCHW), FEATURES)

    def encode_image(self, x_BCHW: torch.Tensor, normalize: bool) -> torch.Tensor:
        return torch.zeros(len(x_BCHW), 8)

    encode_text = encode_image


def stubbed(metric: Metric) -> Metric:
    metric.prepare = lambda: None
    metric.accepts = lambda category, meta: True
    metric.identity = metric.feature_identity = dict
    metric.scores = lambda statistics: []
    metric.network = StubNetwork()
    return metric


CASES = {
    "fid[pytorch-fid]": lambda settings: Fid("pytorch-fid", settings),
    "fid[clean+center256]": lambda settings: Fid("clean+center256", settings),
    "clip[b16+299]": lambda settings: Clip("b16+299", settings),
    "hpsv2[v2.1]": lambda settings: Hpsv2("v2.1", settings),
}


def pictures(folder: Path, n: int, size: int) -> scoring.Images:
    """Smooth pictures with a little noise, about as compressible as generated images, as a run stores them."""
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


def measure(name: str, n: int, size: int, rounds: int) -> Iterator[dict]:
    """Measure one row per way and round, after a round to warm up."""
    with tempfile.TemporaryDirectory() as folder:
        images = pictures(Path(folder), n, size)
        for turn in range(rounds + 1):
            for way, read in WAYS.items():
                scoring.read_ahead = read
                with tempfile.TemporaryDirectory() as out:
                    begun = scoring.Images(images.name, Path(out), images.rows, images.read)
                    metric = stubbed(CASES[name](Settings()))
                    start = clocks()
                    scoring.score_with(begun, metric)
                    wall, cpu, serial = (now - then for now, then in zip(clocks(), start, strict=True))
                if turn:
                    yield {"metric": name, "way": way, "round": turn, "images": n, "size": size, "wall_s": wall,
                           "cpu_s": cpu, "serial_cpu_s": serial, "images_per_s": n / wall}  # fmt: skip
        scoring.read_ahead = WAYS["ahead"]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--images", type=int, default=48)
    parser.add_argument("--size", type=int, default=512)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--out", type=Path, default=Path("results/speed"))
    given = parser.parse_args()
    facts, rows = environment.environment_facts(), []
    for threads in dict.fromkeys((torch.get_num_threads(), 1)):
        torch.set_num_threads(threads)
        for name in CASES:
            for row in measure(name, given.images, given.size, given.rounds):
                rows.append(row | {"threads": threads})
                print(json.dumps(rows[-1]), flush=True)
    content = {"command": ["python", *sys.argv], "environment": facts, "rows": rows}
    write_atomically(given.out / "reading.json", (json.dumps(content, indent=1) + "\n").encode())


if __name__ == "__main__":
    main()
