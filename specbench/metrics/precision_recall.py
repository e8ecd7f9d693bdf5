"""Precision, recall, density and coverage of images against reference images, from their k nearest neighbours.

Precision and recall: Kynkäänniemi et al. 2019. Density and coverage: Naeem et al. 2020. The manifold of a set is the
union of the balls around its feature vectors that reach to their k-th nearest neighbour in the set.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

K_NEAREST = 3
"""k of LANTERN's evaluation, and of Kynkäänniemi et al."""
_ROWS = 512


class NearestNeighbours(NamedTuple):
    """Values of each image, [n], and of each reference image, [m].

    Attributes:
        precise: whether an image lies in the manifold of the reference images; the mean is the precision.
        density: number of balls of the reference images around an image, over k; the mean is the density.
        recalled: whether a reference image lies in the manifold of the images; the mean is the recall.
        covered: whether the ball of a reference image holds an image; the mean is the coverage.
    """

    precise: np.ndarray
    density: np.ndarray
    recalled: np.ndarray
    covered: np.ndarray


def neighbourhood(images: np.ndarray, reference: np.ndarray, k: int = K_NEAREST) -> NearestNeighbours | None:
    """Compare features [n, d] with those of the reference, [m, d], in float64; None where a set has no more than k."""
    if min(len(images), len(reference)) <= k:
        return None
    images, reference = images.astype(np.float64), reference.astype(np.float64)
    radii, own = _radii(reference, k), _radii(images, k)
    recalled, covered = np.zeros(len(reference), bool), np.zeros(len(reference), bool)
    around = np.empty(len(images), np.int64)
    for start in range(0, len(images), _ROWS):
        rows = slice(start, start + _ROWS)
        distance = np.sqrt(squared_distances(images[rows], reference))
        inside = distance < radii
        around[rows] = inside.sum(1)
        covered |= inside.any(0)
        recalled |= (distance < own[rows, None]).any(0)
    return NearestNeighbours(around > 0, around / k, recalled, covered)


def _radii(x: np.ndarray, k: int) -> np.ndarray:
    """Distance of each row to its k-th nearest other row, [n]."""
    starts = range(0, len(x), _ROWS)
    # The smallest distance is that of the row to itself.
    return np.concatenate(
        [np.partition(np.sqrt(squared_distances(x[at : at + _ROWS], x)), k, axis=1)[:, k] for at in starts]
    )


def squared_distances(x: np.ndarray, y: np.ndarray) -> np.ndarray:
    """Squared distances of the rows of x and y, [len(x), len(y)]."""
    squares = np.square(x).sum(1)[:, None] + np.square(y).sum(1)[None] - 2 * x @ y.T
    return np.clip(squares, 0, None)
