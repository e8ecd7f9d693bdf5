"""Images per second of each metric, from PNG files to stored scores, over its bare network's forward on one batch.

    python benchmarks/speed/metrics.py [--images 16] [--size 512] [--rounds 3] [--out results/speed]

Networks have their published sizes and random weights, which take as long as trained ones. Metric and bare forward
take turns, so that whatever else the machine does meets both; on a busy machine compare processor seconds.
"""

from __future__ import annotations

import argparse
import json
import tempfile
import time
from pathlib import Path

import numpy as np
import pandas as pd
import torch
from PIL import Image

from specbench import provenance, scoring
from specbench.metrics.base import Metric, Settings
from specbench.metrics.clip import Clip
from specbench.metrics.fid import Fid
from specbench.metrics.front_ends import FRONT_ENDS
from specbench.metrics.inception import SIZE, Inception
from specbench.metrics.openclip import import_open_clip


class FidFeatures(Fid):
    """The images' way alone: no reference, no distance."""

    def prepare(self) -> None: ...

    def accepts(self, category, meta) -> bool:
        return True

    def identity(self):
        return self.feature_identity()

    def scores(self, statistics):
        return []


class UnpublishedClip(Clip):
    """CLIP without its published weights."""

    def prepare(self) -> None: ...


def fid(front_end: str, settings: Settings) -> tuple[Metric, object]:
    metric = FidFeatures(front_end, settings)
    metric.network = Inception().eval().requires_grad_(False)
    return metric, lambda n: metric.network(torch.rand(n, 3, SIZE, SIZE))


def clip(settings: Settings) -> tuple[Metric, object]:
    metric = UnpublishedClip("b32", settings)
    metric.network = import_open_clip().create_model("ViT-B-32-quickgelu", pretrained=None).eval().requires_grad_(False)
    tokens = import_open_clip().tokenize(["a photo of a cat"])

    def forward(n: int) -> None:
        metric.network.encode_image(torch.rand(n, 3, 224, 224))
        metric.network.encode_text(tokens.expand(n, -1))

    return metric, forward


def pictures(folder: Path, n: int, size: int) -> scoring.Images:
    draw = np.random.default_rng(0)
    rows = []
    for number in range(n):
        coarse = draw.integers(0, 256, (size // 16, size // 16, 3), dtype=np.uint8)
        path = folder / f"{number}.png"
        Image.fromarray(coarse).resize((size, size), Image.Resampling.BICUBIC).save(path)
        rows.append({"prompt_id": f"p{number}", "sample": 0, "prompt": "a photo of a cat", "category": None,
                     "meta": "{}", "path": path, "started_at": ""})  # fmt: skip
    return scoring.Images("speed", folder, pd.DataFrame(rows))


@torch.inference_mode()
def seconds(work) -> tuple[float, float]:
    """Wall-clock and processor seconds of some work."""
    wall, processor = time.perf_counter(), time.process_time()
    work()
    return time.perf_counter() - wall, time.process_time() - processor


def measure(metric: Metric, forward, n: int, size: int, rounds: int) -> list[dict]:
    rows = []
    for turn in range(rounds + 1):
        with tempfile.TemporaryDirectory() as folder:
            images = pictures(Path(folder), n, size)
            scored = seconds(lambda images=images: scoring.score_with(images, metric))
        bare = seconds(lambda: [forward(metric.batch) for _ in range(n // metric.batch)])
        if turn:  # the first turn warms up
            rows.append(
                {
                    "metric": metric.name, "images": n, "batch": metric.batch, "size": size,
                    "score_wall_s": scored[0], "score_cpu_s": scored[1],
                    "forward_wall_s": bare[0], "forward_cpu_s": bare[1], "cpu_ratio": bare[1] / scored[1],
                }
            )  # fmt: skip
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--images", type=int, default=16)
    parser.add_argument("--batch", type=int, default=8)
    parser.add_argument("--size", type=int, default=512)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--out", type=Path, default=Path("results/speed"))
    given = parser.parse_args()
    torch.set_num_threads(given.threads)
    settings = Settings(batch=given.batch)
    rows = []
    for metric, forward in (*(fid(name, settings) for name in FRONT_ENDS), clip(settings)):
        rows += measure(metric, forward, given.images, given.size, given.rounds)
        print(json.dumps(rows[-1]), flush=True)
    given.out.mkdir(parents=True, exist_ok=True)
    content = {"provenance": provenance.collect(), "threads": given.threads, "rows": rows}
    (given.out / "metrics.json").write_text(json.dumps(content, indent=1) + "\n")


if __name__ == "__main__":
    main()
