"""Scores of feature vectors, float64 [n, d]: FID, FID-infinity, KID (accumulated by torchmetrics), Inception score
(Salimans et al. 2016), precision and recall (Kynkäänniemi et al. 2019), density and coverage (Naeem et al. 2020). For
FID and KID also the influence of each image on the distance."""

from __future__ import annotations

import importlib.util
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import cache, cached_property
from types import ModuleType
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
from scipy.special import stdtrit

from specbench.metrics.openclip import torchvision_if_it_loads
from specbench.stats import Estimate
from specbench.system.surroundings import plain_matplotlib

if TYPE_CHECKING:
    import torch
    from torch import Tensor

# Imports inside functions: torch is not needed if all images are scored.

_ROWS = 512
_SPLITS = 4
KID_SUBSETS, KID_SUBSET_SIZE = 100, 1000  # As in Binkowski et al. 2018 and torchmetrics
KID_SEED = 0
IS_SPLITS = 10  # As in Salimans et al. 2016
K_NEAREST = 3  # k of LANTERN's evaluation, and of Kynkäänniemi et al


class Moments:
    """Mean [d] and unbiased covariance [d, d] of feature vectors, with cached derived values."""

    def __init__(self, mean: np.ndarray, covariance: np.ndarray):
        self.mean, self.covariance, self.d = mean, covariance, len(mean)

    @property
    def trace(self) -> float:
        """Trace of the covariance."""
        return np.trace(self.covariance)

    @property
    def is_point(self) -> bool:
        """Return whether all vectors are equal up to rounding."""
        return bool(self.trace <= np.finfo(np.float32).eps ** 2 * np.square(self.mean).sum())

    @cached_property
    def root(self) -> np.ndarray:
        """Symmetric square root of the covariance, [d, d]."""
        values, vectors = np.linalg.eigh(self.covariance)
        return (vectors * np.sqrt(np.clip(values, 0, None))) @ vectors.T

    @property
    def factor(self) -> np.ndarray:
        """Matrix with factor @ factor.T = covariance."""
        return self.root


class Gaussian(Moments):
    """Statistics of two or more feature vectors, float [n, d], accumulated by torchmetrics in float64."""

    def __init__(self, features: np.ndarray):
        import torch

        self.features, self.n = features, len(features)
        with _torch_apart():
            states = _torchmetrics("fid").FrechetInceptionDistance(_features_as_images(features.shape[1]))
            for start in range(0, self.n, _ROWS):
                states.update(torch.tensor(features[start : start + _ROWS]), real=True)
            mean = (states.real_features_sum / self.n).numpy()
        products = states.real_features_cov_sum.numpy() - self.n * np.outer(mean, mean)
        super().__init__(mean, products / (self.n - 1))

    @property
    def trace(self) -> float:
        return np.square(self.centred).sum()

    @property
    def factor(self) -> np.ndarray:
        return self.centred.T if self.n < self.d else self.root

    @cached_property
    def centred(self) -> np.ndarray:
        """Deviations from the mean, divided by sqrt(n - 1), so that centred.T @ centred is the covariance."""
        return (self.features - self.mean) / np.sqrt(self.n - 1)


def frechet_distance(images: Gaussian, reference: Moments) -> float:
    """Compute |m1 - m2|^2 + Tr S1 + Tr S2 - 2 Tr (S1 S2)^(1/2). The root of the reference's covariance is cached. The
    last step of torchmetrics is not used, because it takes 4 to 35 times the CPU time and rounds to float32 (values
    agree to 3e-8). For fewer images than dimensions, an n x n matrix with the same eigenvalues gives the trace."""
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
    """Return the influence of each image on the distance, [n] with mean 0; None (undefined) if images.n <= d. The
    standard error of the distance is sd / sqrt(n). To compare runs with the same reference, pair their influences."""
    if images.n <= images.d:
        return None
    values, vectors = np.linalg.eigh(reference.root @ images.covariance @ reference.root)
    floor = max(values.max() * np.finfo(np.float64).eps * len(values), np.finfo(np.float64).tiny)
    inverse_root = (vectors / np.sqrt(np.clip(values, floor, None))) @ vectors.T
    transport = reference.root @ inverse_root @ reference.root
    deviations = images.features - images.mean
    bend = np.eye(images.d) - transport
    quadratic = np.einsum("ij,ij->i", deviations @ bend, deviations)
    linear = 2 * deviations @ (images.mean - reference.mean)
    influence = linear + quadratic - (bend * images.covariance).sum()
    return influence - influence.mean()


def fid_infinity(images: Gaussian, reference: Gaussian, prompts: Sequence[str], plug_in: float) -> Estimate | None:
    """Extrapolate `plug_in`, the FID of all images, to infinitely many images. None for fewer than four prompts or
    reference images; no interval if the halves have no more images than dimensions.

    The plug-in FID has a bias nearly proportional to 1/n. Halves of both sets (in the paper: of the images) have twice
    the bias, so 2 * FID of all - mean FID of halves has none. The interval uses the spread of the halves' FID over four
    random splits by prompts (t distribution, four degrees of freedom). The extrapolated value has at most this spread.
    """
    rng = np.random.default_rng(0)
    units = np.unique(np.asarray(prompts), return_inverse=True)[1]
    if units.max() < 3 or reference.n < 4:
        return None
    pairs = np.empty((_SPLITS, 2))
    for split in range(_SPLITS):
        first = rng.permutation(units.max() + 1)[units] < (units.max() + 1) // 2
        ours = rng.permutation(reference.n) < reference.n // 2
        for half, (mask, other) in enumerate(((first, ours), (~first, ~ours))):
            pairs[split, half] = frechet_distance(Gaussian(images.features[mask]), Gaussian(reference.features[other]))
    value = 2 * plug_in - pairs.mean()
    low = high = None
    if min(images.n, reference.n) // 2 > images.d:
        spread = np.sqrt(np.mean((pairs[:, 0] - pairs[:, 1]) ** 2 / 2))
        reach = stdtrit(_SPLITS, 0.975) * spread
        low, high = float(value - reach), float(value + reach)
    return Estimate(float(value), low, high)


def kid(images: np.ndarray, reference: np.ndarray) -> float:
    """Compute KID in float64: mean over 100 pairs of subsets of at most 1000 rows, drawn with a fixed seed."""
    import torch

    size = min(KID_SUBSET_SIZE, len(images), len(reference))
    subsets = 1 if size == len(images) == len(reference) else KID_SUBSETS
    with _torch_apart():
        states = _torchmetrics("kid").KernelInceptionDistance(_features_as_images(images.shape[1]), subsets, size)
        states.update(torch.tensor(reference).double(), real=True)
        states.update(torch.tensor(images).double(), real=False)
        return states.compute()[0].item()


def inception_score(logits: Tensor) -> tuple[float, float]:
    """Compute the Inception score of logits [n, classes] as in the published code (Salimans et al. 2016): mean and
    standard deviation (denominator n) over 10 splits at i n // 10, in a fixed random order. torchmetrics
    is not used, because it may make fewer than 10 splits, of ceil(n / 10) images."""
    import torch

    n = len(logits)
    with _torch_apart():
        logp = logits.double()[torch.randperm(n)].log_softmax(1)
    parts = [logp[part * n // IS_SPLITS : (part + 1) * n // IS_SPLITS] for part in range(IS_SPLITS)]
    gaps = [(part.exp() * (part - part.exp().mean(0).log())).sum(1).mean() for part in parts]
    scores = torch.stack(gaps).exp()
    return scores.mean().item(), scores.std(correction=0).item()


@contextmanager
def _torch_apart() -> Iterator[None]:
    """Context with a fixed seed and torch's state for metrics; afterwards the earlier seed and state are restored."""
    import torch

    from specbench.system.torch_state import PinnedTorch

    with warnings.catch_warnings(), torch.random.fork_rng(devices=[]), PinnedTorch(False):
        warnings.simplefilter("ignore")  # torchmetrics warns that features stay in memory, which is intended
        torch.manual_seed(KID_SEED)
        yield


def _features_as_images(d: int) -> torch.nn.Module:
    """Make an identity network for torchmetrics, whose inputs are then features [n, d] instead of images."""
    from torch import nn

    network = nn.Identity()
    network.num_features = d
    return network


@cache
def _torchmetrics(name: str) -> ModuleType:
    if importlib.util.find_spec("torch_fidelity"):  # torchmetrics would import it and torchvision
        with torchvision_if_it_loads():
            importlib.import_module("torch_fidelity")
    with plain_matplotlib():
        return importlib.import_module(f"torchmetrics.image.{name}")


def kid_influence(images: np.ndarray, reference: np.ndarray) -> np.ndarray:
    """Return the influence of each image on KID, [n] with mean 0, for an interval over prompts. KID is the squared MMD
    of the kernel (x.y / d + 1)^3 (Binkowski et al. 2018)."""
    images, reference = images.astype(np.float64), reference.astype(np.float64)
    influence = 2 * (_mean_kernel(images, images) - _mean_kernel(images, reference))
    return influence - influence.mean()


def _mean_kernel(x: np.ndarray, y: np.ndarray) -> np.ndarray:
    """Return for each row of x the mean of KID's kernel over the rows of y, [len(x)]; if x is y, over other rows."""
    means = np.empty(len(x))
    for start in range(0, len(x), _ROWS):
        block = (x[start : start + _ROWS] @ y.T / x.shape[1] + 1) ** 3
        if x is y:
            block[np.arange(len(block)), start + np.arange(len(block))] = 0
        means[start : start + _ROWS] = block.sum(1)
    return means / (len(y) - 1 if x is y else len(y))


class NearestNeighbours(NamedTuple):
    """Values per image, [n], and per reference image, [m]. The manifold of a set is the union of balls around its
    feature vectors. The radius of a ball is the distance to the k-th nearest neighbour within the set."""

    precise: np.ndarray  # whether an image lies in the manifold of the reference images; the mean is the precision
    density: np.ndarray  # number of balls of the reference images around an image, over k; the mean is the density
    recalled: np.ndarray  # whether a reference image lies in the manifold of the images; the mean is the recall
    covered: np.ndarray  # whether the ball of a reference image holds an image; the mean is the coverage


def neighbourhood(images: np.ndarray, reference: np.ndarray, k: int = K_NEAREST) -> NearestNeighbours | None:
    """Compare features [n, d] with the reference's, [m, d], in float64; None if a set contains at most k vectors."""
    if min(len(images), len(reference)) <= k:
        return None
    images, reference = images.astype(np.float64), reference.astype(np.float64)
    radii, image_radii = _radii(reference, k), _radii(images, k)
    recalled: np.ndarray = np.zeros(len(reference), bool)
    covered, around = recalled.copy(), np.zeros_like(image_radii)
    for start in range(0, len(images), _ROWS):
        rows = slice(start, start + _ROWS)
        distance = np.sqrt(_squared_distances(images[rows], reference))
        inside = distance < radii
        around[rows] = inside.sum(1)
        covered |= inside.any(0)
        recalled |= (distance < image_radii[rows, None]).any(0)
    return NearestNeighbours(around > 0, around / k, recalled, covered)


def _radii(x: np.ndarray, k: int) -> np.ndarray:
    """Distance of each row to its k-th nearest other row, [n]."""
    blocks = (np.sqrt(_squared_distances(x[start : start + _ROWS], x)) for start in range(0, len(x), _ROWS))
    return np.concatenate([np.partition(block, k, axis=1)[:, k] for block in blocks])  # the row itself comes first


def _squared_distances(x: np.ndarray, y: np.ndarray) -> np.ndarray:
    """Squared distances of the rows of x and y, [len(x), len(y)]."""
    squares = np.square(x).sum(1)[:, None] + np.square(y).sum(1)[None] - 2 * x @ y.T
    return np.clip(squares, 0, None)
