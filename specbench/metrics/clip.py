"""`clip[VARIANT]`: cosine of CLIP's image and text embeddings, the mean over images; and CMMD.

The papers use two that do not compare: `b16` (SJD and its followers, who print it times 100) and `b32+prefix`
(LANTERN, Cool-SD). Hessel et al. 2021 introduced the score.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from importlib.metadata import version
from typing import ClassVar

import numpy as np
import pandas as pd
import pyarrow as pa
import torch
from PIL import Image
from torch.nn import functional as F

from specbench.metrics import published_weights as checkpoints
from specbench.metrics.base import Sample, Score, Settings
from specbench.metrics.frechet import gaussian_mmd
from specbench.metrics.inception_preprocessing import center256
from specbench.metrics.openclip import (
    PACKAGES,
    image_embeddings,
    load_openai,
    normalised,
    short_side_centre,
    text_embeddings,
)
from specbench.metrics.per_image import PerImageMetric
from specbench.metrics.reference import ReferenceMetric, distance_difference, with_influence
from specbench.stats import Difference

PREFIX = "A photo depicts "


def as_saved(pixels: np.ndarray) -> np.ndarray:
    return pixels


def bilinear299(pixels: np.ndarray) -> np.ndarray:
    """To 299 x 299 by bilinear interpolation without antialiasing, rounded to eight bits."""
    x_BCHW = torch.from_numpy(np.array(pixels)).permute(2, 0, 1)[None]
    resized = F.interpolate(x_BCHW.float(), (299, 299), mode="bilinear", align_corners=False)
    return resized.round().clamp(0, 255).to(torch.uint8)[0].permute(1, 2, 0).numpy()


@dataclass(frozen=True)
class Variant:
    """`prefix` comes before every caption, `prepare` before CLIP's own resize."""

    checkpoint: str
    prefix: str = ""
    prepare: Callable[[np.ndarray], np.ndarray] = as_saved


VARIANTS: Mapping[str, Variant] = {
    "b16": Variant("clip-b16"),
    "b16+299": Variant("clip-b16", prepare=bilinear299),
    "b32": Variant("clip-b32"),
    "b32+prefix": Variant("clip-b32", PREFIX),
    "b32+prefix+center256": Variant("clip-b32", PREFIX, center256),
    "l14": Variant("clip-l14"),
}


class Clip(PerImageMetric):
    """Cosine of image and caption, between -1 and 1; captions over 77 tokens are cut, keeping the end token."""

    summary = "cosine of CLIP's image and caption embeddings, mean over images"
    batch = 32
    packages = PACKAGES

    def __init__(self, variant: str, settings: Settings | None = None):
        super().__init__(settings)
        self.name = f"clip[{variant}]"
        self.variant = VARIANTS[variant]
        self.checkpoints = (self.variant.checkpoint,)

    def identity(self) -> Mapping[str, str]:
        return {
            "weights": checkpoints.CHECKPOINTS[self.variant.checkpoint].digest,
            "prefix": self.variant.prefix,
            "prepare": self.variant.prepare.__name__,
            "resize": "short side, Pillow bicubic, centre",
            **versions(),
        }

    @cached_property
    def network(self) -> torch.nn.Module:
        path = checkpoints.require(self.variant.checkpoint, self.settings.offline)
        return load_openai(path, self.settings.device)

    def features(self, samples: Sequence[Sample]) -> list[dict[str, object]]:
        size = self.network.visual.image_size[0]
        prepared = [self.variant.prepare(sample.pixels) for sample in samples]
        images = image_embeddings(
            self.network, [normalised(short_side_centre(pixels, size)) for pixels in prepared], self.settings.device
        )
        captions = [self.variant.prefix + sample.prompt for sample in samples]
        texts = text_embeddings(self.network, captions, self.settings.device)
        return [{"value": value} for value in (images * texts).sum(1).tolist()]


class Cmmd(ReferenceMetric):
    """Squared MMD to the reference images in CLIP embeddings under a Gaussian kernel of width 10, times 1000; the
    unbiased estimate, so it may be below zero."""

    name = "cmmd[l14-336]"
    summary = "squared MMD to the reference images in CLIP embeddings (unbiased, Gaussian kernel of width 10, x 1000)"
    batch = 16
    columns: ClassVar = {"feature": pa.list_(pa.float32())}
    checkpoints = ("clip-l14-336",)
    packages = PACKAGES
    sigma, scale = 10.0, 1000.0

    def feature_identity(self) -> Mapping[str, str]:
        weights = checkpoints.CHECKPOINTS[self.checkpoints[0]].digest
        return {"weights": weights, "resize": "squashed, Pillow bicubic", **versions()}

    @cached_property
    def network(self) -> torch.nn.Module:
        return load_openai(checkpoints.require(self.checkpoints[0], self.settings.offline), self.settings.device)

    def extract(self, images: Sequence[np.ndarray]) -> np.ndarray:
        size = self.network.visual.image_size[0]
        squashed = [Image.fromarray(pixels).resize((size, size), Image.Resampling.BICUBIC) for pixels in images]
        inputs = [normalised(np.asarray(image)) for image in squashed]
        return image_embeddings(self.network, inputs, self.settings.device).numpy()

    def scores(self, statistics: pd.DataFrame) -> list[Score]:
        if len(statistics) < 2:
            return []
        images = np.stack(statistics["feature"].to_list())
        estimate = with_influence(*self._distance(images), statistics["prompt_id"].to_list())
        return [Score(self.name, estimate, len(images))]

    def difference(self, features: pd.DataFrame, baseline: pd.DataFrame) -> tuple[Difference, int] | None:
        return distance_difference(features, baseline, self._distance)

    def _distance(self, images: np.ndarray) -> tuple[float, np.ndarray]:
        value, influence = gaussian_mmd(images, self.reference_features, self.sigma)
        return self.scale * value, self.scale * influence


def versions() -> dict[str, str]:
    """The libraries that CLIP scores depend on."""
    return {"open_clip": version("open_clip_torch"), "torch": version("torch"), "pillow": version("pillow")}
