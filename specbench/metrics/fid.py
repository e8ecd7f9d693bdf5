"""`fid[FRONT-END]` and `fid[FRONT-END+CROP]`: Frechet distance between Inception features of images and reference
images, and other scores of these features. A front end is a FID tool's resize to 299 x 299. Front ends change scores by
several percent, so scores of different front ends are never compared."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping, Sequence
from functools import cached_property
from importlib.metadata import version
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np
import pandas as pd
import pyarrow as pa
from PIL import Image

from specbench.errors import MISSING_PREREQUISITE, SpecbenchError
from specbench.metrics import distances
from specbench.metrics import published_weights as checkpoints
from specbench.metrics.base import Metric, Sample, Score, Settings, described, paired_features
from specbench.metrics.distances import IS_SPLITS, K_NEAREST, Gaussian, Moments, NearestNeighbours
from specbench.metrics.openclip import center256, planes, whole
from specbench.metrics.reference import ReferenceImages, feature_matrix, with_influence
from specbench.prompts import public
from specbench.stats import Difference, Estimate, mean_difference, mean_interval, proportion_interval
from specbench.system.downloads import Download

if TYPE_CHECKING:
    from torch import Tensor

    from specbench.metrics.inception_network import Inception

# Imports inside functions: torch is not needed if all images are scored.

INCEPTION_FEATURES = 2048
INCEPTION_SIZE = 299
_SIZE = (INCEPTION_SIZE, INCEPTION_SIZE)
_NO_DISTANCE: Any = {"better": "higher", "kind": "plain"}
_STATISTICS_ONLY = (
    "compared with statistics: correct only if these were computed with the same resize and crop; KID, precision, "
    "recall, density, coverage and FID-infinity need reference images"
)


class Fid(Metric):
    """FID (Heusel et al. 2017), FID-infinity (Chong & Forsyth 2020) and KID (Binkowski et al. 2018). Values are only
    comparable for the same front end, crop and number of images."""

    better, kind = "lower", "distance"
    batch = 32
    columns: ClassVar = {"feature": pa.list_(pa.float32(), INCEPTION_FEATURES)}
    checkpoints = ("inception",)
    packages: ClassVar = {"torchmetrics": "pip install torchmetrics"}

    def __init__(self, variant: str, settings: Settings | None = None):
        super().__init__(settings)
        self.reference = ReferenceImages(self.settings)
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
        subsets = f"{distances.KID_SUBSETS} pairs of subsets of {distances.KID_SUBSET_SIZE}, seed {distances.KID_SEED}"
        splits = f"{IS_SPLITS} splits at i n // {IS_SPLITS}"
        others = f"inception-score of {splits}; precision, recall, density, coverage of k = {K_NEAREST}"
        if self.reference.statistics:
            digest = hashlib.sha256(b"".join(array.tobytes() for array in self.reference.statistics)).hexdigest()
            reference = {"reference": f"mu and sigma {digest[:16]}"}
        else:
            reference = self.reference.identity
        about = {"kid": f"mean over {subsets}", "others": others, "torchmetrics": version("torchmetrics")}
        return {**self.feature_identity(), **reference, **about}

    def missing(self) -> list[tuple[str, str]]:
        return super().missing() + self.reference.missing()

    def prepare(self) -> None:
        for problem in self.reference.missing():
            raise SpecbenchError(*problem, MISSING_PREREQUISITE)
        super().prepare()

    def downloads(self) -> list[Download]:
        there = self.reference.path is not None or self.reference.folder.is_dir()
        return super().downloads() + ([] if there else public.missing_set("coco", images=True))

    def accepts(self, category: str | None, meta: Mapping[str, Any]) -> bool:
        return self.reference.fits(meta)

    def features(self, samples: Sequence[Sample]) -> list[dict[str, object]]:
        return [{"feature": row} for row in self.embed(self.preprocessed(samples))]

    @cached_property
    def reference_features(self) -> np.ndarray:
        """Features of the reference images, float32 [n, d]."""
        return self.reference.features(self.preprocess, self.embed, self.feature_identity(), self.batch)

    @cached_property
    def network(self) -> Inception:
        from specbench.metrics.inception_network import load_inception

        return load_inception(self.weights_file("inception"), self.settings.device)

    def preprocess(self, pixels: np.ndarray) -> Tensor:
        return FRONT_ENDS[self.front_end](CROPS[self.crop](pixels))

    def embed(self, inputs: Sequence[Tensor]) -> np.ndarray:
        import torch

        with torch.inference_mode():
            return self.network(torch.stack(list(inputs)).to(self.settings.device)).cpu().numpy()

    @cached_property
    def _reference(self) -> Moments:
        if not self.reference.statistics:
            return Gaussian(self.reference_features)
        mean, covariance = self.reference.statistics
        if len(mean) != INCEPTION_FEATURES:
            what = f"{self.reference.path} is of {len(mean)} features, but Inception has {INCEPTION_FEATURES}"
            raise SpecbenchError(what, "use statistics as pytorch-fid and clean-fid store them")
        return Moments(mean, covariance)

    def scores(self, statistics: pd.DataFrame) -> list[Score]:
        features = feature_matrix(statistics["feature"], self._reference.d)
        if len(features) < 2:
            return []
        images, reference, prompts = Gaussian(features), self._reference, statistics["prompt_id"].to_list()
        distance = fid_estimate(images, reference, prompts)
        if not isinstance(reference, Gaussian):
            note = joined(warn_of_few(images), warn_of_points(images, reference), _STATISTICS_ONLY)
            return [Score(self.name, distance, images.n, note), *self._inception_score(images)]
        limit = distances.fid_infinity(images, reference, prompts, distance.value)
        value = distances.kid(images.features, reference.features)
        own_kid = with_influence(value, distances.kid_influence(images.features, reference.features), prompts)
        bias = None if limit is None else distance.value - limit.value
        warning = joined(_warn_of_bias(images, reference, bias), warn_of_points(images, reference))
        scores = [Score(self.name, distance, images.n, warning)]
        if limit is not None:
            note = None if limit.low is not None else "rough: n / 2 is not above the number of features"
            scores.append(Score(f"fid-infinity[{self.variant}]", limit, images.n, note))
        note = "unbiased at any number of images" if images.n < reference.n else None
        scores.append(Score(f"kid[{self.variant}]", own_kid, images.n, note))
        if neighbours := distances.neighbourhood(images.features, reference.features):
            scores += self._neighbour_scores(neighbours, prompts)
        return scores + self._inception_score(images)

    def _inception_score(self, images: Gaussian) -> list[Score]:
        import torch

        if images.n < 2 * IS_SPLITS:  # the score of a split with one image is always 1
            return []
        mean, deviation = distances.inception_score(self.network.unbiased_logits(torch.from_numpy(images.features)))
        note = f"standard deviation over {IS_SPLITS} splits: {deviation:.3g}"
        return [Score(f"inception-score[{self.variant}]", Estimate(mean, None, None), images.n, note, **_NO_DISTANCE)]

    def _neighbour_scores(self, neighbours: NearestNeighbours, prompts: Sequence[str]) -> list[Score]:
        """Recall and coverage get no interval over prompts, because they are means over reference images."""
        n, m = len(neighbours.precise), len(neighbours.recalled)
        estimates = {
            "precision": proportion_interval(neighbours.precise.tolist(), prompts),
            "recall": Estimate(float(neighbours.recalled.mean()), None, None),
            "density": mean_interval(neighbours.density.tolist(), prompts),
            "coverage": Estimate(float(neighbours.covered.mean()), None, None),
        }
        sizes = f"k = {K_NEAREST}, {n} images, {m} reference images; compare only equal sizes"
        scores = estimates.items()
        return [Score(f"{name}[{self.variant}]", value, n, sizes, **_NO_DISTANCE) for name, value in scores]

    def difference(self, features: pd.DataFrame, baseline: pd.DataFrame) -> tuple[Difference, int] | None:
        return fid_difference(features, baseline, self._reference)


def fid_estimate(images: Gaussian, reference: Moments, prompts: Sequence[str]) -> Estimate:
    """Compute FID with its 95 % interval over prompts, for a fixed reference; no interval if images.n <= d."""
    value, influence = distances.frechet_distance(images, reference), distances.frechet_influence(images, reference)
    return Estimate(value, None, None) if influence is None else with_influence(value, influence, prompts)


def fid_difference(features: pd.DataFrame, baseline: pd.DataFrame, reference: Moments) -> tuple[Difference, int] | None:
    """Compute the paired FID difference of two runs over common images, and their number. None below two images."""
    if len(both := paired_features(features, baseline, "feature")) < 2:
        return None
    mine, theirs = (Gaussian(feature_matrix(both[column], reference.d)) for column in ("feature", "feature_base"))
    gap = distances.frechet_distance(mine, reference) - distances.frechet_distance(theirs, reference)
    influence, other = (distances.frechet_influence(images, reference) for images in (mine, theirs))
    if influence is None:
        return Difference(gap, None, None), len(both)
    return mean_difference(influence - other, both["prompt_id"], gap), len(both)


def _warn_of_bias(images: Gaussian, reference: Gaussian, bias: float | None) -> str | None:
    """Return a warning, with the bias if known, if there are fewer images than reference images; None otherwise."""
    if images.n >= reference.n:
        return warn_of_few(images)
    size = "an unknown amount" if bias is None else f"about {bias:.3g}"
    interval = "" if images.n > images.d else f", and not more than the {images.d} features, so there is no interval"
    return (
        f"{images.n} images are fewer than the {reference.n} of the reference{interval}: "
        f"the distance is too large by {size}, compared with infinitely many images"
    )


def warn_of_few(images: Gaussian) -> str | None:
    """Return a warning if the number of images does not exceed the number of dimensions; None otherwise."""
    if images.n > images.d:
        return None
    return f"{images.n} images are too few for {images.d} features: the distance is too large, and has no interval"


def warn_of_points(images: Moments, reference: Moments) -> str | None:
    """Return a warning about sets whose images are all identical; None if there are none."""
    sets = [name for name, moments in (("images", images), ("reference images", reference)) if moments.is_point]
    return f"all {' and all '.join(sets)} are identical" if sets else None


def joined(*notes: str | None) -> str | None:
    """Join the non-empty notes on a score; None if there are none."""
    return "; ".join(filter(None, notes)) or None


def pytorch_fid(pixels: np.ndarray) -> Tensor:
    """Resize uint8 [H, W, 3] to float32 [3, 299, 299] as pytorch-fid: bilinear without antialiasing, scaled to 0..1."""
    from torch.nn import functional as F

    x_BCHW = planes(pixels)[None] / 255
    return 2 * F.interpolate(x_BCHW, _SIZE, mode="bilinear", align_corners=False)[0] - 1


def tf1(pixels: np.ndarray) -> Tensor:
    """Resize uint8 [H, W, 3] to float32 [3, 299, 299] as TensorFlow 1: bilinear, with pixel positions at corners."""
    x_CHW = planes(pixels)
    top, bottom, down = _corner_grid(x_CHW.shape[1])
    left, right, across = _corner_grid(x_CHW.shape[2])
    upper = x_CHW[:, top][:, :, left] * (1 - across) + x_CHW[:, top][:, :, right] * across
    lower = x_CHW[:, bottom][:, :, left] * (1 - across) + x_CHW[:, bottom][:, :, right] * across
    return _centred(upper * (1 - down[:, None]) + lower * down[:, None])


def tm_aa(pixels: np.ndarray) -> Tensor:
    """Resize as torchmetrics since 1.8: bilinear with antialiasing. uint8 [H, W, 3] to float32 [3, 299, 299]."""
    from torch.nn import functional as F

    return _centred(F.interpolate(planes(pixels)[None], _SIZE, mode="bilinear", align_corners=False, antialias=True)[0])


def clean(pixels: np.ndarray) -> Tensor:
    """Resize as clean-fid (Parmar et al. 2022): Pillow's antialiased bicubic on float channels, clipped to 0..255,
    not rounded. uint8 [H, W, 3] to float32 [3, 299, 299]."""
    import torch

    channels = [Image.fromarray(pixels[..., channel].astype(np.float32)) for channel in range(3)]
    resized = [np.asarray(channel.resize(_SIZE, Image.Resampling.BICUBIC)) for channel in channels]
    return _centred(torch.from_numpy(np.stack(resized).clip(0, 255)))


def bicubic256(pixels: np.ndarray) -> np.ndarray:
    """Resize uint8 [H, W, 3] to [256, 256, 3] as LlamaGen's script: bicubic without antialiasing, and truncate."""
    import torch
    from torch.nn import functional as F

    resized = F.interpolate(planes(pixels)[None], (256, 256), mode="bicubic", align_corners=False)[0]
    return resized.clamp(0, 255).to(torch.uint8).permute(1, 2, 0).numpy()


FRONT_ENDS: Mapping[str, Callable[[np.ndarray], Tensor]] = {
    "pytorch-fid": pytorch_fid, "tf1": tf1, "tm-aa": tm_aa, "clean": clean,
}  # fmt: skip
CROPS: Mapping[str, Callable[[np.ndarray], np.ndarray]] = {
    "none": whole, "center256": center256, "bicubic256": bicubic256,
}  # fmt: skip


def _centred(x: Tensor) -> Tensor:
    return (x - 128) / 128


def _corner_grid(length: int) -> tuple[Tensor, Tensor, Tensor]:
    """Return interpolation indices and weights, [299]: pixel before, pixel after, weight of the pixel after."""
    import torch

    place = torch.arange(INCEPTION_SIZE, dtype=torch.float32) * (length / INCEPTION_SIZE)
    before = place.floor().long()
    return before, (before + 1).clamp(max=length - 1), place - before
