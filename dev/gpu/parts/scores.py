"""Scores on the device: the networks of `score --protocol sjd` and of GenEval at their published sizes, with random
weights, fed by the threads of `score`."""

import time
from collections.abc import Callable, Iterator, Sequence
from io import BytesIO
from itertools import pairwise

import numpy as np
import torch
from PIL import Image
from timing import CAPTION
from torch import Tensor, nn
from transformers import (
    BlipTextConfig,
    BlipTextModel,
    BlipVisionConfig,
    BlipVisionModel,
    Mask2FormerConfig,
    Mask2FormerForUniversalSegmentation,
)

from parts.claims import Outcome, claim
from parts.scales import Scale, has_graphs
from specbench.metrics.base import Metric, Sample, Settings, read_ahead
from specbench.metrics.clip import Clip
from specbench.metrics.fid import Fid
from specbench.metrics.geneval import MOST_INSTANCES, Mask2Former
from specbench.metrics.inception_network import Inception
from specbench.metrics.openclip import untrained_model
from specbench.metrics.preference import Hpsv2, ImageReward, RewardNetwork

_TOLERANCE = 1e-3
"""Allowed difference between features on the device and on the CPU, relative to the largest feature."""


def scores(device: str, scale: Scale) -> Iterator[Outcome]:
    """For each score: images per second, share of the time spent waiting for pictures, difference from CPU features."""
    count, side = (256, 768) if has_graphs(device) else (4, 96)
    noise = np.random.default_rng(0).integers(0, 256, (8, side // 8, side // 8, 3), np.uint8)
    pictures = [_png(noise[number % 8], side) for number in range(count)]
    for name, make in _SCORES.items():
        if has_graphs(device) or name in ("fid", "clip"):  # the others are too large for a trial
            try:
                metric = make(device)
            except ModuleNotFoundError as error:
                yield [claim(name, f"not measured: {error.name} is not installed")], []
                continue
            row = {"score": name, **_timed(metric, pictures)}
            row["largest_difference"] = _difference(make("cpu"), metric, pictures[:4])
            value = f"{row['images_per_s']:.3g} images/s, {row['waiting']:.0%} of it waiting for pictures"
            claims = [claim(f"{name}, {side} px", value)]
            difference = row["largest_difference"]
            what = f"{name}: features of CPU and device"
            claims.append(claim(what, f"{difference:.1e}", str(_TOLERANCE), difference <= _TOLERANCE))
            yield claims, [row]


def _timed(metric: Metric, pictures: Sequence[bytes]) -> dict[str, float]:
    batches = read_ahead(lambda png: _sample(metric, png), pictures, min(metric.batch, len(pictures) // 2))
    _features(metric, next(batches))  # creates the objects that only the first call creates
    start, waiting, done = time.perf_counter(), 0.0, 0
    since = start
    for batch in batches:
        waiting += time.perf_counter() - since
        done += len(_features(metric, batch))  # the results are on the CPU, so the device has finished
        since = time.perf_counter()
    seconds = time.perf_counter() - start
    return {"images_per_s": done / seconds, "waiting": waiting / seconds}


def _difference(on_cpu: Metric, metric: Metric, pictures: Sequence[bytes]) -> float:
    """Largest difference between a feature and the CPU's feature, divided by the largest feature."""
    here, there = (_features(made, [_sample(made, png) for png in pictures]) for made in (on_cpu, metric))
    return float(np.abs(here - there).max() / np.abs(here).max())


def _features(metric: Metric, samples: Sequence[Sample]) -> np.ndarray:
    return np.array([list(row.values()) for row in metric.features(samples)], np.float64).reshape(len(samples), -1)


def _sample(metric: Metric, png: bytes) -> Sample:
    pixels = np.asarray(Image.open(BytesIO(png)))
    return Sample("", 0, CAPTION, None, {}, pixels, metric.preprocess(pixels))


def _png(noise: np.ndarray, side: int) -> bytes:
    file = BytesIO()
    Image.fromarray(noise).resize((side, side), Image.Resampling.BICUBIC).save(file, "png")
    return file.getvalue()


def _given(metric: Metric, build: Callable[[], nn.Module], **more: object) -> Metric:
    """Replace the metric's published network by a random network, which is the same on every device."""
    torch.manual_seed(0)
    network = build().float().eval().requires_grad_(False).to(metric.settings.device)
    vars(metric).update(network=network, **more)
    return metric


def _reward_network() -> RewardNetwork:
    """BLIP with ViT-L and BERT of the base size."""
    network = RewardNetwork.__new__(RewardNetwork)
    nn.Module.__init__(network)
    vision = {"hidden_size": 1024, "intermediate_size": 4096, "num_hidden_layers": 24, "num_attention_heads": 16}
    text = {"hidden_size": 768, "num_attention_heads": 12, "num_hidden_layers": 12, "intermediate_size": 3072}
    network.vision = BlipVisionModel(BlipVisionConfig(**vision, image_size=224, patch_size=16))
    of_text = BlipTextConfig(**text, vocab_size=30524, encoder_hidden_size=1024, is_decoder=True)
    network.text = BlipTextModel(of_text, add_pooling_layer=False)
    widths = (768, 1024, 128, 64, 16, 1)
    network.head = nn.Sequential(*[nn.Linear(*pair) for pair in pairwise(widths)])
    return network


class _Tokens:
    """BERT ids without its vocabulary, which this project does not include."""

    def padded(self, texts: Sequence[str]) -> tuple[Tensor, Tensor]:
        return torch.arange(1000, 1035).repeat(len(texts), 1), torch.ones(len(texts), 35, dtype=torch.long)


class _Detector(Metric):
    """GenEval's detector alone: scores of the objects that it finds."""

    batch = 8

    def preprocess(self, pixels: np.ndarray) -> None:
        return None

    def features(self, samples: Sequence[Sample]) -> list[dict[str, float]]:
        detector = Mask2Former.__new__(Mask2Former)
        detector.network, detector.device = self.network, self.settings.device
        detector.labels = {number: str(number) for number in range(80)}
        scores = [
            [item.score for item in image][:MOST_INSTANCES] for image in detector([sample.pixels for sample in samples])
        ]
        return [dict(enumerate([*image, *[0.0] * (MOST_INSTANCES - len(image))])) for image in scores]


_SCORES: dict[str, Callable[[str], Metric]] = {
    "fid": lambda device: _given(Fid("tf1", Settings(device)), Inception),
    "clip": lambda device: _given(Clip("b16", Settings(device)), lambda: untrained_model("ViT-B-16")),
    "hpsv2": lambda device: _given(Hpsv2("v2.1", Settings(device)), lambda: untrained_model("ViT-H-14")),
    "imagereward": lambda device: _given(ImageReward(Settings(device)), _reward_network, tokenizer=_Tokens()),
    "geneval's detector": lambda device: _given(
        _Detector(Settings(device)), lambda: Mask2FormerForUniversalSegmentation(Mask2FormerConfig(num_labels=80))
    ),
}
