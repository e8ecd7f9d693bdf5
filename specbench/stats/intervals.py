"""Estimates with 95 % confidence intervals. Clusters (prompts) are the independent units; one cluster gives none."""

from __future__ import annotations

import math
from collections.abc import Hashable, Sequence
from dataclasses import dataclass, replace
from typing import TypeVar

import numpy as np
import pandas as pd
from scipy.special import ndtr, ndtri, stdtrit

UPPER_QUANTILE = 0.975
BOOTSTRAP_RESAMPLES = 2000
FEW_UNITS = 8
"""Below this number of clusters the bootstrap has too few distinct resamples for its nominal coverage, and none is
printed."""
MOST_UNITS = 10_000
"""Above this number, clusters are resampled in random groups of about equal size, which are independent as well."""


@dataclass(frozen=True)
class Estimate:
    """Value with its 95 % confidence interval; `low` and `high` are None if n is too small."""

    value: float
    low: float | None
    high: float | None


AnEstimate = TypeVar("AnEstimate", bound=Estimate)


def without_few(estimate: AnEstimate, clusters: float) -> AnEstimate:
    """The estimate as tables show it: without its interval if that is of fewer than `FEW_UNITS` clusters."""
    return replace(estimate, low=None, high=None) if clusters < FEW_UNITS else estimate


def ratio_of_totals(
    numerator: Sequence[float], denominator: Sequence[float], cluster: Sequence[Hashable], seed: int = 0
) -> Estimate:
    """Ratio of two sums with a percentile bootstrap interval over clusters. Below `FEW_UNITS` clusters: Student's t
    interval of the logarithm; below two: none. A positive ratio has positive bounds.

    The percentiles are expanded as by Hesterberg ("What teachers should know about the bootstrap", 2015, 3.4), which
    corrects the narrow bootstrap interval of few clusters.
    """
    totals = pd.DataFrame({"top": np.asarray(numerator), "bottom": np.asarray(denominator)})
    totals = totals.groupby(_keys(cluster), sort=False).sum().to_numpy()
    value = float(totals[:, 0].sum() / totals[:, 1].sum())
    if len(totals) < 2:
        return Estimate(value, None, None)
    return Estimate(value, *(_delta_t(totals) if len(totals) < FEW_UNITS else _bootstrap(totals, seed)))


def mean_interval(values: Sequence[float], clusters: Sequence[Hashable]) -> Estimate:
    """Mean with its 95 % confidence interval: Student's t over clusters; none below two clusters."""
    mean, error, n = clustered_mean(values, clusters)
    if error is None:
        return Estimate(mean, None, None)
    half = float(stdtrit(n - 1, UPPER_QUANTILE)) * error
    return Estimate(mean, mean - half, mean + half)


def proportion_interval(values: Sequence[float], clusters: Sequence[Hashable]) -> Estimate:
    """Proportion of ones with its 95 % Wilson interval; the effective sample size accounts for correlated images of one
    prompt."""
    values = np.asarray(values, dtype=np.float64)
    share, error, prompts = clustered_mean(values, clusters)
    if error is None:
        return Estimate(share, None, None)
    n = min(float(len(values)), share * (1 - share) / error**2) if error > 0 else float(prompts)
    z = float(ndtri(UPPER_QUANTILE))
    centre = (share + z**2 / (2 * n)) / (1 + z**2 / n)
    half = z / (1 + z**2 / n) * math.sqrt(share * (1 - share) / n + z**2 / (4 * n * n))
    return Estimate(share, min(share, centre - half), max(share, centre + half))


def mean_of_estimates(parts: Sequence[Estimate]) -> Estimate:
    """Unweighted mean of independent estimates, with the MOVER interval."""
    value = float(np.mean([part.value for part in parts]))
    if any(part.low is None for part in parts):
        return Estimate(value, None, None)
    below = math.sqrt(sum((part.value - part.low) ** 2 for part in parts)) / len(parts)
    above = math.sqrt(sum((part.high - part.value) ** 2 for part in parts)) / len(parts)
    return Estimate(value, value - below, value + above)


def clustered_mean(values: Sequence[float], clusters: Sequence[Hashable]) -> tuple[float, float | None, int]:
    """Mean, its cluster-robust standard error (None for one cluster), and the number of clusters."""
    values = np.asarray(values, dtype=np.float64)
    mean = float(values.mean())
    sums = pd.Series(values - mean).groupby(_keys(clusters), sort=False).sum().to_numpy()
    n = len(sums)
    return mean, None if n < 2 else math.sqrt(n / (n - 1) * np.square(sums).sum()) / len(values), n


def _keys(clusters: Sequence[Hashable]) -> pd.api.extensions.ExtensionArray | np.ndarray:
    """Clusters as keys of a group-by; a column of a frame stays in its own format, without an object per row."""
    return clusters.array if isinstance(clusters, pd.Series) else np.asarray(clusters, dtype=object)


def _delta_t(totals: np.ndarray) -> tuple[float | None, float | None]:
    """Interval of the ratio of the column sums of [clusters, 2] by the delta method; none if the ratio is 0."""
    n, sums = len(totals), totals.sum(axis=0)
    if not sums[0]:
        return None, None
    relative = totals / sums
    error = math.sqrt(n / (n - 1) * np.square(relative[:, 0] - relative[:, 1]).sum())
    ratio, half = float(sums[0] / sums[1]), float(stdtrit(n - 1, UPPER_QUANTILE)) * error
    if ratio < 0:
        return ratio * (1 + half), ratio * (1 - half)
    factor = math.exp(half)
    return ratio * (1 / factor), ratio * factor


def _bootstrap(totals: np.ndarray, seed: int) -> tuple[float, float]:
    draw = np.random.default_rng(seed)
    units = _grouped(totals, draw)
    n, ratios, at_once = len(units), [], max(1, 10**6 // len(units))
    for start in range(0, BOOTSTRAP_RESAMPLES, at_once):
        size = min(at_once, BOOTSTRAP_RESAMPLES - start)
        drawn = draw.integers(0, n, (size, n)) + n * np.arange(size)[:, None]
        times = np.bincount(drawn.ravel(), minlength=size * n).reshape(size, n).astype(float)
        ratios.extend((times @ units[:, 0]) / (times @ units[:, 1]))
    outside = 100 * ndtr(-math.sqrt(n / (n - 1)) * stdtrit(n - 1, UPPER_QUANTILE))
    low, high = np.percentile(ratios, [outside, 100 - outside])
    return float(low), float(high)


def _grouped(totals: np.ndarray, draw: np.random.Generator) -> np.ndarray:
    if len(totals) <= MOST_UNITS:
        return totals
    group = draw.permutation(len(totals)) % MOST_UNITS
    return np.stack([np.bincount(group, column) for column in totals.T], axis=1)
