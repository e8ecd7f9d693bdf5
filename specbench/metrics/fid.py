"""`fid[FRONT-END]` and `fid[FRONT-END+CROP]`: Frechet distance to the reference images in Inception features, with
FID-infinity and KID beside it under the same variant's name."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cached_property
from importlib.metadata import version
from typing import ClassVar

import numpy as np
import pandas as pd
import pyarrow as pa
import torch

from specbench.metrics import published_weights as checkpoints
from specbench.metrics.base import Score, Settings
from specbench.metrics.code_version import described
from specbench.metrics.fid_infinity import Extrapolated, fid_infinity
from specbench.metrics.frechet import Gaussian, frechet_distance, frechet_influence, kid_influence
from specbench.metrics.inception import INCEPTION_FEATURES, Inception, load_inception
from specbench.metrics.inception_preprocessing import CROPS, FRONT_ENDS
from specbench.metrics.reference import ReferenceMetric, distance_difference, feature_matrix, with_influence
from specbench.metrics.torchmetrics_states import KID_SEED, KID_SUBSET_SIZE, KID_SUBSETS, kid
from specbench.stats import Difference, Estimate


class Fid(ReferenceMetric):
    """FID (Heusel et al. 2017) with FID-infinity (Chong & Forsyth 2020) and KID (Binkowski et al. 2018); values of
    other front ends, crops or n do not compare."""

    summary = "distance to the reference images in Inception features; FID-infinity and KID beside it"
    batch = 32
    columns: ClassVar = {"feature": pa.list_(pa.float32(), INCEPTION_FEATURES)}
    checkpoints = ("inception",)
    packages: ClassVar = {"torchmetrics": "pip install torchmetrics"}

    def __init__(self, variant: str, settings: Settings | None = None):
        super().__init__(settings)
        self.variant = variant
        self.name = f"fid[{variant}]"
        self.front_end, _, crop = variant.partition("+")
        self.crop = crop or "none"

    def feature_identity(self) -> Mapping[str, str]:
        return {
            "front_end": described(self.front_end, FRONT_ENDS[self.front_end]),
            "crop": described(self.crop, CROPS[self.crop]),
            "weights": checkpoints.CHECKPOINTS["inception"].digest,
            "torch": version("torch"),
            "pillow": version("pillow"),
        }

    def identity(self) -> Mapping[str, str]:
        kid_of = f"mean over {KID_SUBSETS} pairs of subsets of {KID_SUBSET_SIZE}, seed {KID_SEED}"
        return {**super().identity(), "kid": kid_of, "torchmetrics": version("torchmetrics")}

    @cached_property
    def network(self) -> Inception:
        path = checkpoints.require_weights_file("inception", self.settings.offline)
        return load_inception(path, self.settings.device)

    def preprocess(self, pixels: np.ndarray) -> torch.Tensor:
        return FRONT_ENDS[self.front_end](CROPS[self.crop](pixels))

    @torch.inference_mode()
    def embed(self, inputs: Sequence[torch.Tensor]) -> np.ndarray:
        return self.network(torch.stack(list(inputs)).to(self.settings.device)).cpu().numpy()

    @cached_property
    def _reference(self) -> Gaussian:
        return Gaussian(self.reference_features)

    def scores(self, statistics: pd.DataFrame) -> list[Score]:
        images = Gaussian(feature_matrix(statistics["feature"], self._reference.features.shape[1]))
        if images.n < 2:
            return []
        prompts = statistics["prompt_id"].to_list()
        distance = fid_estimate(images, self._reference, prompts)
        limit = fid_infinity(images, self._reference, prompts, distance.value)
        value = kid(images.features, self.reference_features)
        own_kid = with_influence(value, kid_influence(images.features, self.reference_features), prompts)
        scores = [Score(self.name, distance, images.n, biased(images, self._reference, limit))]
        if limit is not None:
            estimate = Estimate(limit.value, limit.low, limit.high)
            note = None if limit.low is not None else "rough: halves of the images are no more than the features"
            scores.append(Score(f"fid-infinity[{self.variant}]", estimate, images.n, note))
        note = "unbiased at any number of images" if images.n < self._reference.n else None
        return [*scores, Score(f"kid[{self.variant}]", own_kid, images.n, note)]

    def difference(self, features: pd.DataFrame, baseline: pd.DataFrame) -> tuple[Difference, int] | None:
        return fid_difference(features, baseline, self._reference)


def fid_estimate(images: Gaussian, reference: Gaussian, prompts: Sequence[str]) -> Estimate:
    """FID with its 95 % interval over prompts, for a given reference; no interval where images.n <= d."""
    value, influence = frechet_distance(images, reference), frechet_influence(images, reference)
    return Estimate(value, None, None) if influence is None else with_influence(value, influence, prompts)


def fid_difference(
    features: pd.DataFrame, baseline: pd.DataFrame, reference: Gaussian
) -> tuple[Difference, int] | None:
    """FID of one run minus another's, see `distance_difference`."""

    def measure(images: np.ndarray) -> tuple[float, np.ndarray | None]:
        own = Gaussian(images)
        return frechet_distance(own, reference), frechet_influence(own, reference)

    return distance_difference(features, baseline, measure, reference.features.shape[1])


def biased(images: Gaussian, reference: Gaussian, limit: Extrapolated | None) -> str | None:
    """Warning for a distance of fewer images than the reference has; None without need."""
    if images.n >= reference.n:
        return warn_of_few(images)
    size = "an unknown amount" if limit is None else f"about {limit.bias:.3g}"
    interval = "" if images.n > images.d else f", and no more than its {images.d} features, so it has no interval"
    return (
        f"{images.n} images are fewer than the {reference.n} of the reference{interval}: "
        f"the distance is too large by {size} against infinitely many"
    )


def warn_of_few(images: Gaussian) -> str | None:
    """Warning for a distance of no more images than dimensions; None without need."""
    if images.n > images.d:
        return None
    return f"{images.n} images are few for {images.d} features: the distance is too large and has no interval"
