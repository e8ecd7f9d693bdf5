"""Distances between two sets of feature vectors, in float64: FID with its standard error, KID, MMD.

Heusel et al. 2017 (FID), Binkowski et al. 2018 (KID), Jayasumana et al. 2024 (CMMD). numpy only.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property

import numpy as np

ROWS = 512


@dataclass(frozen=True)
class Gaussian:
    """Mean and covariance of feature vectors [n, d], with cached derived values."""

    features: np.ndarray

    @property
    def n(self) -> int:
        return len(self.features)

    @property
    def d(self) -> int:
        return self.features.shape[1]

    @cached_property
    def mean(self) -> np.ndarray:
        return self.features.mean(axis=0, dtype=np.float64)

    @cached_property
    def centred(self) -> np.ndarray:
        """Deviations from the mean over sqrt(n - 1), so that centred.T @ centred is the covariance."""
        return (self.features - self.mean) / np.sqrt(self.n - 1)

    @cached_property
    def covariance(self) -> np.ndarray:
        """Unbiased, [d, d]."""
        return self.centred.T @ self.centred

    @cached_property
    def root(self) -> np.ndarray:
        """Symmetric square root of the covariance, [d, d]."""
        return _root(self.covariance)


def frechet_distance(images: Gaussian, reference: Gaussian) -> float:
    """|m1 - m2|^2 + Tr S1 + Tr S2 - 2 Tr (S1 S2)^(1/2).

    With fewer images than dimensions the trace of the root comes from an n x n problem of the same eigenvalues.
    """
    gap = images.mean - reference.mean
    traces = np.square(images.centred).sum() + np.square(reference.centred).sum()
    if images.n < images.d:
        inner = images.centred @ _factor(reference)
        product = inner @ inner.T
    else:
        product = reference.root @ images.covariance @ reference.root
    cross = np.sqrt(np.clip(np.linalg.eigvalsh(product), 0, None)).sum()
    return float(gap @ gap + traces - 2 * cross)


def frechet_influence(images: Gaussian, reference: Gaussian) -> np.ndarray | None:
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


def kid(images: np.ndarray, reference: np.ndarray) -> tuple[float, np.ndarray]:
    """Unbiased squared MMD under the kernel (x.y / d + 1)^3, and each image's influence on it, [n] with mean 0."""
    d = images.shape[1]
    return _mmd2(images, reference, lambda x, y: (x @ y.T / d + 1) ** 3)


def gaussian_mmd(images: np.ndarray, reference: np.ndarray, sigma: float) -> tuple[float, np.ndarray]:
    """Unbiased squared MMD under a Gaussian kernel of width sigma, and each image's influence, [n] with mean 0."""

    def kernel(x: np.ndarray, y: np.ndarray) -> np.ndarray:
        squares = np.square(x).sum(1)[:, None] + np.square(y).sum(1)[None] - 2 * x @ y.T
        return np.exp(-np.clip(squares, 0, None) / (2 * sigma**2))

    return _mmd2(images, reference, kernel)


def _mmd2(
    images: np.ndarray, reference: np.ndarray, kernel: Callable[[np.ndarray, np.ndarray], np.ndarray]
) -> tuple[float, np.ndarray]:
    images, reference = images.astype(np.float64), reference.astype(np.float64)
    own = _mean_kernel(images, images, kernel)
    cross = _mean_kernel(images, reference, kernel)
    theirs = _mean_kernel(reference, reference, kernel)
    influence = 2 * (own - cross)
    return float(own.mean() - 2 * cross.mean() + theirs.mean()), influence - influence.mean()


def _mean_kernel(x: np.ndarray, y: np.ndarray, kernel: Callable[[np.ndarray, np.ndarray], np.ndarray]) -> np.ndarray:
    """Mean kernel of each row of x with the rows of y, without itself where x is y; [len(x)]."""
    means = np.empty(len(x))
    for start in range(0, len(x), ROWS):
        block = kernel(x[start : start + ROWS], y)
        if x is y:
            block[np.arange(len(block)), start + np.arange(len(block))] = 0
        means[start : start + ROWS] = block.sum(1)
    return means / (len(y) - 1 if x is y else len(y))


def _factor(reference: Gaussian) -> np.ndarray:
    """F with F @ F.T the covariance, [d, min(n, d)]."""
    return reference.centred.T if reference.n < reference.d else reference.root


def _root(matrix: np.ndarray) -> np.ndarray:
    values, vectors = np.linalg.eigh(matrix)
    return (vectors * np.sqrt(np.clip(values, 0, None))) @ vectors.T
