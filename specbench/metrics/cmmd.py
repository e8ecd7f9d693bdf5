"""`cmmd[l14-336]`: CLIP maximum mean discrepancy (Jayasumana et al. 2024) between images and reference images.

As published: centre squares, and the biased estimate. `cmmd[l14-336+squashed+unbiased]` keeps all of each image and may
be below zero.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import cached_property
from typing import ClassVar

import numpy as np
import pandas as pd
import pyarrow as pa
import torch

from specbench.metrics import published_weights as checkpoints
from specbench.metrics.base import Score, Settings, described
from specbench.metrics.clip import clip_versions
from specbench.metrics.crops import squashed
from specbench.metrics.fid import Mmd, gaussian_mmd
from specbench.metrics.openclip import OPENCLIP_PACKAGES, image_embeddings, load_openai, normalised
from specbench.metrics.reference import ReferenceMetric, distance_difference, feature_matrix, with_influence
from specbench.stats import Difference

SIGMA, SCALE = 10.0, 1000.0


def centre_square(pixels: np.ndarray, size: int) -> np.ndarray:
    """Crop uint8 [H, W, 3] to the centre square (odd margins halved down) and resize to [size, size, 3] by Pillow's
    bicubic."""
    height, width = pixels.shape[:2]
    side = min(height, width)
    top, left = (height - side) // 2, (width - side) // 2
    return squashed(pixels[top : top + side, left : left + side], size)


PREPARATIONS: Mapping[str, tuple[Callable[[np.ndarray, int], np.ndarray], str]] = {
    "l14-336": (centre_square, "centre square, Pillow bicubic"),
    "l14-336+squashed+unbiased": (squashed, "squashed, Pillow bicubic"),
}


class Cmmd(ReferenceMetric):
    """CMMD (Jayasumana et al. 2024): squared MMD to the reference images in CLIP embeddings under a Gaussian kernel
    of width 10, times 1000."""

    batch = 16
    columns: ClassVar = {"feature": pa.list_(pa.float32())}
    checkpoints = ("clip-l14-336",)
    packages = OPENCLIP_PACKAGES

    def __init__(self, variant: str, settings: Settings | None = None):
        super().__init__(settings)
        self.name = f"cmmd[{variant}]"
        self.prepare_image, self.resize = PREPARATIONS[variant]
        self.unbiased = variant.endswith("+unbiased")

    def feature_identity(self) -> Mapping[str, str]:
        weights = checkpoints.CHECKPOINTS[self.checkpoints[0]].digest
        return {"weights": weights, "resize": described(self.resize, self.prepare_image), **clip_versions()}

    def identity(self) -> Mapping[str, str]:
        return {**super().identity(), "estimate": "unbiased" if self.unbiased else "biased"}

    @cached_property
    def network(self) -> torch.nn.Module:
        return load_openai(self.weights_file(self.checkpoints[0]), self.settings.device)

    def preprocess(self, pixels: np.ndarray) -> torch.Tensor:
        return normalised(self.prepare_image(pixels, self.network.visual.image_size[0]))

    def embed(self, inputs: Sequence[torch.Tensor]) -> np.ndarray:
        return image_embeddings(self.network, inputs, self.settings.device).numpy()

    def scores(self, statistics: pd.DataFrame) -> list[Score]:
        if len(statistics) < 2:
            return []
        images = feature_matrix(statistics["feature"], self.reference_features.shape[1])
        distance = gaussian_mmd(images, self.reference_features, SIGMA)
        estimate = with_influence(*self._scaled(distance), statistics["prompt_id"].to_list())
        return [Score(self.name, estimate, len(images), self._note(len(images), distance))]

    def difference(self, features: pd.DataFrame, baseline: pd.DataFrame) -> tuple[Difference, int] | None:
        def measure(images: np.ndarray) -> tuple[float, np.ndarray]:
            return self._scaled(gaussian_mmd(images, self.reference_features, SIGMA))

        return distance_difference(features, baseline, measure, self.reference_features.shape[1])

    def _scaled(self, distance: Mmd) -> tuple[float, np.ndarray]:
        value = distance.unbiased if self.unbiased else distance.biased
        return SCALE * value, SCALE * distance.influence

    def _note(self, n: int, distance: Mmd) -> str | None:
        wanted = len(self.reference_features)
        if n >= wanted or self.unbiased:
            return None
        bias = SCALE * (distance.biased - distance.unbiased)
        return f"{n} images are fewer than the {wanted} of the reference: the distance is too large by about {bias:.3g}"
