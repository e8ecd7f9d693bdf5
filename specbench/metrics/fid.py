"""`fid[FRONT-END]` and `fid[FRONT-END+CROP]`: Frechet distance to the reference images in Inception features. The other
scores of these features stand beside it under the same variant's name.

FID: Heusel et al. 2017. FID-infinity: Chong & Forsyth 2020. KID: Binkowski et al. 2018. Inception score: Salimans et
al. 2016. Precision, recall, density, coverage: `precision_recall`. The distances of two sets of feature vectors, in
float64 and with the influence of each image, serve other metrics too (MMD: CMMD, Jayasumana et al. 2024). torchmetrics
accumulates FID and KID from features that this package's front ends made.
"""

from __future__ import annotations

import importlib.util
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache, cached_property
from importlib.metadata import version
from types import ModuleType
from typing import TYPE_CHECKING, ClassVar, NamedTuple

import numpy as np
import pandas as pd
import pyarrow as pa
from scipy.special import stdtrit

from specbench.errors import SpecbenchError
from specbench.metrics import published_weights as checkpoints
from specbench.metrics.base import Score, Settings, described
from specbench.metrics.inception import CROPS, FRONT_ENDS, INCEPTION_FEATURES
from specbench.metrics.precision_recall import K_NEAREST, NearestNeighbours, neighbourhood, squared_distances
from specbench.metrics.reference import ReferenceMetric, distance_difference, feature_matrix, with_influence
from specbench.metrics.torchvision_stub import torchvision_if_it_loads
from specbench.stats import Difference, Estimate, mean_interval, proportion_interval

if TYPE_CHECKING:
    import torch
    from torch import Tensor

    from specbench.metrics.inception_network import Inception

# Imports inside functions: torch, not for images that are scored already.

_ROWS = 512
_SPLITS = 4
_SPLIT_SEED = 0
_KID_SUBSETS, _KID_SUBSET_SIZE = 100, 1000
"""As published (Binkowski et al. 2018), and torchmetrics' defaults."""
_KID_SEED = 0
_IS_SPLITS = 10
"""Of Salimans et al. 2016."""
_STATISTICS_ONLY = (
    "against statistics: right only where they were made with this front end; KID, precision, recall, density, "
    "coverage and FID-infinity need the reference's images"
)


class Fid(ReferenceMetric):
    """FID (Heusel et al. 2017) with FID-infinity (Chong & Forsyth 2020) and KID (Binkowski et al. 2018); values of
    other front ends, crops or n do not compare."""

    batch = 32
    columns: ClassVar = {"feature": pa.list_(pa.float32(), INCEPTION_FEATURES)}
    checkpoints = ("inception",)
    packages: ClassVar = {"torchmetrics": "pip install torchmetrics"}
    reads_statistics = True

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
        kid_of = f"mean over {_KID_SUBSETS} pairs of subsets of {_KID_SUBSET_SIZE}, seed {_KID_SEED}"
        splits = f"{_IS_SPLITS} splits at i n // {_IS_SPLITS}"
        others = f"inception-score of {splits}; precision, recall, density, coverage of k = {K_NEAREST}"
        return {**super().identity(), "kid": kid_of, "others": others, "torchmetrics": version("torchmetrics")}

    @cached_property
    def network(self) -> Inception:
        from specbench.metrics.inception_network import load_inception

        path = self.weights_file("inception")
        return load_inception(path, self.settings.device)

    def preprocess(self, pixels: np.ndarray) -> torch.Tensor:
        return FRONT_ENDS[self.front_end](CROPS[self.crop](pixels))

    def embed(self, inputs: Sequence[torch.Tensor]) -> np.ndarray:
        import torch

        with torch.inference_mode():
            return self.network(torch.stack(list(inputs)).to(self.settings.device)).cpu().numpy()

    @cached_property
    def _reference(self) -> Moments:
        if not self.reference.statistics:
            return Gaussian(self.reference_features)
        mean, covariance = self.reference.statistics
        if len(mean) != INCEPTION_FEATURES:
            what = f"{self.reference.own} is of {len(mean)} features, not of Inception's {INCEPTION_FEATURES}"
            raise SpecbenchError(what, "statistics as pytorch-fid and clean-fid keep them")
        return KnownMoments(mean, covariance)

    def scores(self, statistics: pd.DataFrame) -> list[Score]:
        images = Gaussian(feature_matrix(statistics["feature"], self._reference.d))
        if images.n < 2:
            return []
        prompts = statistics["prompt_id"].to_list()
        distance = fid_estimate(images, self._reference, prompts)
        scores = self._inception_score(images)
        if not isinstance(self._reference, Gaussian):
            few = warn_of_few(images)
            note = f"{few}; {_STATISTICS_ONLY}" if few else _STATISTICS_ONLY
            return [Score(self.name, distance, images.n, note), *scores]
        return self._of_images(images, self._reference, distance, prompts) + scores

    def _of_images(
        self, images: Gaussian, reference: Gaussian, distance: Estimate, prompts: Sequence[str]
    ) -> list[Score]:
        """FID and the scores for which statistics of the reference are not enough."""
        limit = fid_infinity(images, reference, prompts, distance.value)
        value = kid(images.features, self.reference_features)
        own_kid = with_influence(value, kid_influence(images.features, self.reference_features), prompts)
        scores = [Score(self.name, distance, images.n, _warn_of_bias(images, reference, limit))]
        if limit is not None:
            estimate = Estimate(limit.value, limit.low, limit.high)
            note = None if limit.low is not None else "rough: halves of the images are no more than the features"
            scores.append(Score(f"fid-infinity[{self.variant}]", estimate, images.n, note))
        note = "unbiased at any number of images" if images.n < reference.n else None
        scores.append(Score(f"kid[{self.variant}]", own_kid, images.n, note))
        found = neighbourhood(images.features, self.reference_features)
        return scores + ([] if found is None else self._neighbour_scores(found, prompts))

    def _inception_score(self, images: Gaussian) -> list[Score]:
        import torch

        if images.n < 2 * _IS_SPLITS:  # a split of one image scores 1, whatever it shows
            return []
        mean, deviation = inception_score(self.network.unbiased_logits(torch.tensor(images.features)))
        note = f"standard deviation over {_IS_SPLITS} splits: {deviation:.3g}"
        return [Score(f"inception-score[{self.variant}]", Estimate(mean, None, None), images.n, note)]

    def _neighbour_scores(self, found: NearestNeighbours, prompts: Sequence[str]) -> list[Score]:
        """Recall and coverage are means over reference images and have no interval over prompts."""
        n, m = len(found.precise), len(found.recalled)
        estimates = {
            "precision": proportion_interval(found.precise, prompts),
            "recall": Estimate(float(found.recalled.mean()), None, None),
            "density": mean_interval(found.density, prompts),
            "coverage": Estimate(float(found.covered.mean()), None, None),
        }
        sizes = f"k = {K_NEAREST}, {n} images, {m} reference images; other sizes do not compare"
        return [Score(f"{name}[{self.variant}]", one, n, sizes) for name, one in estimates.items()]

    def difference(self, features: pd.DataFrame, baseline: pd.DataFrame) -> tuple[Difference, int] | None:
        return fid_difference(features, baseline, self._reference)


def fid_estimate(images: Gaussian, reference: Moments, prompts: Sequence[str]) -> Estimate:
    """FID with its 95 % interval over prompts, for a given reference; no interval where images.n <= d."""
    value, influence = frechet_distance(images, reference), frechet_influence(images, reference)
    return Estimate(value, None, None) if influence is None else with_influence(value, influence, prompts)


def fid_difference(features: pd.DataFrame, baseline: pd.DataFrame, reference: Moments) -> tuple[Difference, int] | None:
    """FID of one run minus another's, see `distance_difference`."""

    def measure(images: np.ndarray) -> tuple[float, np.ndarray | None]:
        own = Gaussian(images)
        return frechet_distance(own, reference), frechet_influence(own, reference)

    return distance_difference(features, baseline, measure, reference.d)


def _warn_of_bias(images: Gaussian, reference: Gaussian, limit: Extrapolated | None) -> str | None:
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


class Moments:
    """Mean [d] and unbiased covariance [d, d] of feature vectors, with cached derived values."""

    mean: np.ndarray
    covariance: np.ndarray

    @property
    def d(self) -> int:
        return len(self.mean)

    @property
    def trace(self) -> float:
        """Of the covariance."""
        return np.trace(self.covariance)

    @cached_property
    def root(self) -> np.ndarray:
        """Symmetric square root of the covariance, [d, d]."""
        values, vectors = np.linalg.eigh(self.covariance)
        return (vectors * np.sqrt(np.clip(values, 0, None))) @ vectors.T

    @property
    def factor(self) -> np.ndarray:
        """A matrix of which factor @ factor.T is the covariance."""
        return self.root


@dataclass(frozen=True)
class KnownMoments(Moments):
    """Those of feature vectors that are not here."""

    mean: np.ndarray
    covariance: np.ndarray


@dataclass(frozen=True)
class Gaussian(Moments):
    """Those of feature vectors, float [n, d]."""

    features: np.ndarray

    @property
    def n(self) -> int:
        return len(self.features)

    @property
    def d(self) -> int:
        return self.features.shape[1]

    @property
    def trace(self) -> float:
        return np.square(self.centred).sum()

    @property
    def factor(self) -> np.ndarray:
        return self.centred.T if self.n < self.d else self.root

    @cached_property
    def _moments(self) -> tuple[np.ndarray, np.ndarray]:
        """Mean [d] and unbiased covariance [d, d], accumulated by torchmetrics in float64."""
        import torch

        states = _torchmetrics("fid").FrechetInceptionDistance(_features_as_images(self.features.shape[1]))
        for start in range(0, self.n, _ROWS):
            states.update(torch.tensor(self.features[start : start + _ROWS]), real=True)
        mean = (states.real_features_sum / self.n).numpy()
        return mean, (states.real_features_cov_sum.numpy() - self.n * np.outer(mean, mean)) / (self.n - 1)

    @property
    def mean(self) -> np.ndarray:
        return self._moments[0]

    @cached_property
    def centred(self) -> np.ndarray:
        """Deviations from the mean over sqrt(n - 1), so that centred.T @ centred is the covariance."""
        return (self.features - self.mean) / np.sqrt(self.n - 1)

    @property
    def covariance(self) -> np.ndarray:
        return self._moments[1]


def frechet_distance(images: Gaussian, reference: Moments) -> float:
    """|m1 - m2|^2 + Tr S1 + Tr S2 - 2 Tr (S1 S2)^(1/2).

    torchmetrics' own last step stays unused: at d = 1024 it takes 4 times the processor time of this one with the
    reference's root kept and 35 times at n = d / 4 (values equal to 3e-8), and rounds to float32. With fewer images
    than dimensions the trace of the root comes from an n x n problem of the same eigenvalues.
    """
    gap = images.mean - reference.mean
    traces = images.trace + reference.trace
    if images.n < images.d:
        inner = images.centred @ reference.factor
        product = inner @ inner.T
    else:
        product = reference.root @ images.covariance @ reference.root
    cross = np.sqrt(np.clip(np.linalg.eigvalsh(product), 0, None)).sum()
    return float(gap @ gap + traces - 2 * cross)


def frechet_influence(images: Gaussian, reference: Moments) -> np.ndarray | None:
    """Influence of each image on the distance, [n] with mean 0; None (undefined) if images.n <= d.

    The standard error of the distance is sd / sqrt(n), and that of a difference between two sets of images against
    one reference that of the paired differences.
    """
    if images.n <= images.d:
        return None
    values, vectors = np.linalg.eigh(reference.root @ images.covariance @ reference.root)
    floor = values.max() * np.finfo(np.float64).eps * len(values)
    inverse_root = (vectors / np.sqrt(np.clip(values, floor, None))) @ vectors.T
    transport = reference.root @ inverse_root @ reference.root
    deviations = images.features - images.mean
    bend = np.eye(images.d) - transport
    quadratic = np.einsum("ij,ij->i", deviations @ bend, deviations)
    linear = 2 * deviations @ (images.mean - reference.mean)
    influence = linear + quadratic - (bend * images.covariance).sum()
    return influence - influence.mean()


@dataclass(frozen=True)
class Extrapolated:
    """FID extrapolated to infinitely many images, with its 95 % interval, None where halves have no more images than
    dimensions.

    `bias` is the plug-in FID less the extrapolated one.
    """

    value: float
    low: float | None
    high: float | None
    bias: float


def fid_infinity(images: Gaussian, reference: Gaussian, prompts: Sequence[str], plug_in: float) -> Extrapolated | None:
    """Extrapolate `plug_in`, the FID of all images; None with less than four prompts or reference images.

    The plug-in FID is too large by a term that is nearly proportional to 1/n. Halves of both sets have twice that term,
    so that twice the FID of the whole sets less the mean FID of halves is free of it. Unlike in the paper the reference
    images are halved as well, because they are no more than the images.

    The interval takes the spread of the FID of a half, which is at least that of the extrapolated value, from the two
    halves of each of four random splits (t distribution of four degrees of freedom). Whole prompts go into a half.
    """
    rng = np.random.default_rng(_SPLIT_SEED)
    units = np.unique(np.asarray(prompts), return_inverse=True)[1]
    if units.max() < 3 or reference.n < 4:
        return None
    pairs = np.empty((_SPLITS, 2))
    for split in range(_SPLITS):
        first = rng.permutation(units.max() + 1)[units] < (units.max() + 1) // 2
        ours = rng.permutation(reference.n) < reference.n // 2
        for half, (own, other) in enumerate(((first, ours), (~first, ~ours))):
            pairs[split, half] = frechet_distance(Gaussian(images.features[own]), Gaussian(reference.features[other]))
    value = 2 * plug_in - pairs.mean()
    low = high = None
    if min(images.n, reference.n) // 2 > images.d:
        spread = np.sqrt(np.mean((pairs[:, 0] - pairs[:, 1]) ** 2 / 2))
        reach = stdtrit(_SPLITS, 0.975) * spread
        low, high = float(value - reach), float(value + reach)
    return Extrapolated(float(value), low, high, float(plug_in - value))


def kid(images: np.ndarray, reference: np.ndarray) -> float:
    """KID in float64: mean over 100 pairs of subsets of at most 1000 rows, drawn with a fixed seed."""
    import torch

    size = min(_KID_SUBSET_SIZE, len(images), len(reference))
    subsets = 1 if size == len(images) == len(reference) else _KID_SUBSETS
    with _drawing_apart():
        states = _torchmetrics("kid").KernelInceptionDistance(_features_as_images(images.shape[1]), subsets, size)
        states.update(torch.tensor(reference).double(), real=True)
        states.update(torch.tensor(images).double(), real=False)
        return states.compute()[0].item()


def inception_score(logits: Tensor) -> tuple[float, float]:
    """Inception score of logits [n, classes]: mean over 10 splits at i n // 10, in a fixed random order, and their
    standard deviation with n in the denominator, as in the published code (Salimans et al. 2016). torchmetrics splits
    into parts of ceil(n / 10), which may be fewer."""
    import torch

    n = len(logits)
    with _drawing_apart():
        logp = logits.double()[torch.randperm(n)].log_softmax(1)
    parts = [logp[part * n // _IS_SPLITS : (part + 1) * n // _IS_SPLITS] for part in range(_IS_SPLITS)]
    gaps = [(part.exp() * (part - part.exp().mean(0).log())).sum(1).mean() for part in parts]
    scores = torch.stack(gaps).exp()
    return scores.mean().item(), scores.std(correction=0).item()


@contextmanager
def _drawing_apart() -> Iterator[None]:
    """Context of torchmetrics' sums with drawn subsets or splits: a fixed seed, and the user's random numbers stay."""
    import torch

    with warnings.catch_warnings(), torch.random.fork_rng(devices=[]):
        warnings.simplefilter("ignore")  # features being kept in memory is what is wanted here
        torch.manual_seed(_KID_SEED)
        yield


def _features_as_images(d: int) -> torch.nn.Module:
    """Identity network for torchmetrics, fed with features [n, d]: its own resize is never reached."""
    from torch import nn

    network = nn.Identity()
    network.num_features = d
    return network


@cache
def _torchmetrics(name: str) -> ModuleType:
    if importlib.util.find_spec("torch_fidelity"):  # torchmetrics imports it where it is there, and it torchvision
        with torchvision_if_it_loads():
            importlib.import_module("torch_fidelity")
    return importlib.import_module(f"torchmetrics.image.{name}")


def kid_influence(images: np.ndarray, reference: np.ndarray) -> np.ndarray:
    """Influence of each image on KID, the squared MMD under the kernel (x.y / d + 1)^3 (Binkowski et al. 2018): [n]
    with mean 0. torchmetrics gives only the value, which has no interval over prompts."""
    d = images.shape[1]
    return _mmd2(images, reference, lambda x, y: (x @ y.T / d + 1) ** 3).influence


class Mmd(NamedTuple):
    """Squared MMD (Gretton et al. 2012).

    Attributes:
        biased: mean over all pairs.
        unbiased: mean over pairs of different rows.
        influence: of each image, [n] with mean 0.
    """

    biased: float
    unbiased: float
    influence: np.ndarray


def gaussian_mmd(images: np.ndarray, reference: np.ndarray, sigma: float) -> Mmd:
    """Squared MMD under a Gaussian kernel of width sigma."""

    def kernel(x: np.ndarray, y: np.ndarray) -> np.ndarray:
        return np.exp(-squared_distances(x, y) / (2 * sigma**2))

    return _mmd2(images, reference, kernel)


def _mmd2(images: np.ndarray, reference: np.ndarray, kernel: Callable[[np.ndarray, np.ndarray], np.ndarray]) -> Mmd:
    images, reference = images.astype(np.float64), reference.astype(np.float64)
    own, alone = _mean_kernel(images, images, kernel)
    theirs, theirs_alone = _mean_kernel(reference, reference, kernel)
    cross, _ = _mean_kernel(images, reference, kernel)
    influence = 2 * (own - cross)
    across = 2 * cross.mean()
    biased = _with_itself(own, alone) + _with_itself(theirs, theirs_alone) - across
    return Mmd(biased, float(own.mean() + theirs.mean() - across), influence - influence.mean())


def _with_itself(means: np.ndarray, alone: np.ndarray) -> float:
    """Mean over all pairs from the means over pairs with others, and the kernel of each row with itself."""
    n = len(means)
    return float((means.mean() * (n - 1) + alone.mean()) / n)


def _mean_kernel(
    x: np.ndarray, y: np.ndarray, kernel: Callable[[np.ndarray, np.ndarray], np.ndarray]
) -> tuple[np.ndarray, np.ndarray]:
    """Mean kernel of each row of x with the rows of y, without itself where x is y, and its kernel with itself there;
    [len(x)] each."""
    means, alone = np.empty(len(x)), np.zeros(len(x))
    for start in range(0, len(x), _ROWS):
        block = kernel(x[start : start + _ROWS], y)
        if x is y:
            place = np.arange(len(block)), start + np.arange(len(block))
            alone[start : start + _ROWS] = block[place]
            block[place] = 0
        means[start : start + _ROWS] = block.sum(1)
    return means / (len(y) - 1 if x is y else len(y)), alone
