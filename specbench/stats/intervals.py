"""Estimates with 95 % confidence intervals, significance of paired differences between two runs, and power analysis.

Clusters (prompts) are the independent units; one cluster has no interval. Differences are paired by prompt and sample.
"""

import math
from collections.abc import Hashable, Sequence
from dataclasses import dataclass, replace
from typing import TypeVar

import numpy as np
import pandas as pd
from scipy.special import bdtrik, nctdtr, ndtr, ndtri, stdtr, stdtrit  # importing scipy.stats takes as long as a report

UPPER_QUANTILE = 0.975
BOOTSTRAP_RESAMPLES = 10_000  # Another seed changes a bound by about 0.01
FEW_UNITS = 8
"""With fewer clusters the bootstrap has too few distinct resamples for its nominal coverage; no interval is printed."""
MOST_UNITS = 2000
"""More clusters are randomly divided into this number of groups; the groups are also independent, and are resampled."""
MOST_PROMPTS = 10**7
CHANGE = 0.02  # Relative change to detect, for `prompts_needed` and `prompts_for_change`
_POWER = 0.8
SIGNIFICANT = 0.05  # Level of the tests
RULE = (
    f"A difference between two runs is called real if p < {SIGNIFICANT:g} in a paired t test over their common "
    f"prompts (at least {FEW_UNITS}). The speed-up is one test. Each of these groups is corrected "
    "separately (Holm): scores; distances to reference images; log p and entropy."
)
"""The rule of `is_real` in words; all sentences and marks in reports follow this rule."""


@dataclass(frozen=True)
class Estimate:
    """Value with its 95 % confidence interval; `low` and `high` are None for a small n."""

    value: float
    low: float | None = None
    high: float | None = None


@dataclass(frozen=True)
class Difference(Estimate):
    """A paired difference with its 95 % interval."""

    p: float | None = None  # two-sided p-value of the t test of no difference; None for a small n
    # standard deviation of the difference per prompt, for `prompts_needed`; None for a small n
    spread: float | None = None
    prompts: int | None = None  # number of prompts, the independent units, if known


AnEstimate = TypeVar("AnEstimate", bound=Estimate)


def without_few(estimate: AnEstimate, clusters: float) -> AnEstimate:
    """Drop the interval of an estimate if there are fewer than `FEW_UNITS` clusters, for tables."""
    return replace(estimate, low=None, high=None) if clusters < FEW_UNITS else estimate


def ratio_of_totals(
    numerator: Sequence[float], denominator: Sequence[float], cluster: Sequence[Hashable], seed: int = 0
) -> Estimate:
    """Compute the ratio of two sums with a percentile bootstrap interval over clusters. Below `FEW_UNITS` clusters the
    interval is Student's t of the logarithm; below two there is none. A positive ratio has positive bounds.

    The percentiles are expanded as in Hesterberg ("What teachers should know about the bootstrap", 2015, 3.4), because
    the bootstrap interval of few clusters is too narrow.
    """
    totals = pd.DataFrame({"top": np.asarray(numerator), "bottom": np.asarray(denominator)})
    totals = totals.groupby(_keys(cluster), sort=False).sum().to_numpy()
    totals = totals[np.lexsort(totals.T)]  # a fixed order: rows of merged or resumed runs give the same bounds
    value = float(totals[:, 0].sum() / totals[:, 1].sum())
    if len(totals) < 2:
        return Estimate(value)
    return Estimate(value, *(_delta_t(totals) if len(totals) < FEW_UNITS else _bootstrap(totals, seed)))


def _delta_t(totals: np.ndarray) -> tuple[float | None, float | None]:
    """Return the delta-method interval of the ratio of the column sums [clusters, 2]; (None, None) for a ratio of 0."""
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
    draw, units = np.random.default_rng(seed), totals
    if len(totals) > MOST_UNITS:
        group = draw.permutation(len(totals)) % MOST_UNITS
        units = np.stack([np.bincount(group, column) for column in totals.T], axis=1)
    n, ratios, at_once = len(units), [], max(1, 10**6 // len(units))
    for start in range(0, BOOTSTRAP_RESAMPLES, at_once):
        size = min(at_once, BOOTSTRAP_RESAMPLES - start)
        drawn = draw.integers(0, n, (size, n)) + n * np.arange(size)[:, None]
        times = np.bincount(drawn.ravel(), minlength=size * n).reshape(size, n).astype(float)
        ratios.extend((times @ units[:, 0]) / (times @ units[:, 1]))
    outside = 100 * ndtr(-math.sqrt(n / (n - 1)) * stdtrit(n - 1, UPPER_QUANTILE))
    low, high = np.percentile(ratios, [outside, 100 - outside])
    return float(low), float(high)


def mean_interval(values: Sequence[float], clusters: Sequence[Hashable]) -> Estimate:
    """Mean with its 95 % confidence interval: Student's t over clusters; none below two clusters."""
    mean = mean_difference(values, clusters)
    return Estimate(mean.value, mean.low, mean.high)


def proportion_interval(values: Sequence[float], clusters: Sequence[Hashable]) -> Estimate:
    """Proportion of ones with its 95 % Wilson interval, with sample size corrected for images of the same prompt."""
    share, error, prompts = clustered_mean(values, clusters)
    return Estimate(share) if error is None else _wilson(share, error, len(values), prompts)


def mean_of_proportions(parts: Sequence[tuple[Sequence[float], Sequence[Hashable]]]) -> Estimate:
    """Unweighted mean of the proportions of ones in independent parts (values and clusters each), with its 95 %
    interval: Wilson's, for the sample size that gives a proportion the same standard error."""
    shares, errors, prompts = zip(*(clustered_mean(*part) for part in parts), strict=True)
    share = sum(shares) / len(parts)
    if None in errors:
        return Estimate(share)
    return _wilson(share, math.hypot(*errors) / len(parts), sum(len(values) for values, _ in parts), sum(prompts))


def _wilson(share: float, error: float, images: int, prompts: int) -> Estimate:
    """Wilson's interval for a share with the given standard error; `images` limits the effective sample size, and
    `prompts` replaces it if the error is 0."""
    n = min(float(images), share * (1 - share) / error**2) if error > 0 else float(prompts)
    z = float(ndtri(UPPER_QUANTILE))
    centre = (share + z**2 / (2 * n)) / (1 + z**2 / n)
    half = z / (1 + z**2 / n) * math.sqrt(share * (1 - share) / n + z**2 / (4 * n * n))
    return Estimate(share, min(share, centre - half), max(share, centre + half))


def quantile_interval(values: pd.Series, clusters: pd.Series, share: float) -> Estimate | None:
    """Quantile of the non-missing values, with the 95 % interval between order statistics for tables; no interval if no
    value is beyond a bound. Images of a prompt are correlated, so ranks use the effective number of images: the smaller
    of two estimates, at the quantile and (more stable) at the median (Korn and Graubard 1998)."""
    values = values.dropna().astype("float64")
    if values.empty:
        return None
    clusters, ordered, n = clusters[values.index], np.sort(values), len(values)
    value, sizes = Estimate(float(np.quantile(ordered, share))), clusters.value_counts()
    independent = min(_independent(values <= values.quantile(at), clusters) for at in (share, 0.5))
    independent = max(independent, n**2 / np.square(sizes).sum())
    ranks = np.ceil(bdtrik([1 - UPPER_QUANTILE, UPPER_QUANTILE], independent, share))
    low, high = np.add(ranks, (0, 1)) * (n + 1) / (independent + 1)
    if low < 1 or high > n or len(sizes) < FEW_UNITS:
        return value
    return replace(value, low=float(ordered[math.floor(low) - 1]), high=float(ordered[math.ceil(high) - 1]))


def _independent(ones: pd.Series, clusters: pd.Series) -> float:
    """Return the effective sample size: the number of independent values that give the share of ones the same error."""
    share, error, prompts = clustered_mean(ones, clusters)
    if not error:
        return prompts
    n, t = len(ones), stdtrit([len(ones) - 1, prompts - 1], UPPER_QUANTILE)
    return min(float(n), round(float(t[0] / t[1]) ** 2 * n / (n - 1) * share * (1 - share) / error**2, 6))


def mean_difference(gaps: Sequence[float], clusters: Sequence[Hashable], value: float | None = None) -> Difference:
    """Compute the mean of paired differences, with Student's t interval and p-value. `gaps`: difference of each image;
    `clusters`: prompt of each image. A given `value` replaces the mean; `gaps` are then influences on it."""
    mean, error, n = clustered_mean(gaps, clusters)
    value = mean if value is None else value
    if error is None or not math.isfinite(mean):  # pandas' sums of NaN would give an error of 0 and p = 0
        return Difference(value, None, None, prompts=n)
    half = float(stdtrit(n - 1, UPPER_QUANTILE)) * error
    p = float(2 * stdtr(n - 1, -abs(value) / error)) if error else float(value == 0)
    return Difference(value, value - half, value + half, p, error * math.sqrt(n), n)


def difference_to_show(difference: Difference) -> Difference:
    """Drop interval, p-value and spread of a difference over fewer than `FEW_UNITS` prompts, for tables. Also drop an
    interval without width: equal differences of all prompts do not show how much others differ."""
    if difference.low == difference.high:
        difference = replace(difference, low=None, high=None)
    if difference.prompts is None or difference.prompts >= FEW_UNITS:
        return difference
    return replace(without_few(difference, difference.prompts), p=None, spread=None)


def speed_difference(pairs: pd.DataFrame) -> Difference:
    """Compute the time saved per image as a fraction of the baseline's time; `pairs` as in `speedup`.

    The p-value also tests a speed-up of 1, because its null hypothesis is also that totals are equal. The spread
    is the standard deviation of the speed-up's relative error.
    """
    theirs, mine = pairs["latency_ms_base"], pairs["latency_ms"]
    saved = mean_difference((theirs - mine) / theirs.mean(), pairs["prompt_id"])
    error = mean_difference(theirs / theirs.mean() - mine / mine.mean(), pairs["prompt_id"])
    return replace(saved, spread=error.spread)


def holm(p_values: Sequence[float | None]) -> list[float | None]:
    """Holm-corrected p-values (Holm 1979): rejecting all below 0.05 keeps the family-wise error rate at 5 %.

    Missing values stay missing and do not count as tests.
    """
    ranked = sorted((p, place) for place, p in enumerate(p_values) if p is not None)
    corrected: list[float | None] = [None] * len(p_values)
    largest = 0.0
    for rank, (p, place) in enumerate(ranked):
        largest = max(largest, min(1.0, (len(ranked) - rank) * p))
        corrected[place] = largest
    return corrected


def is_real(p: float | None) -> bool:
    """Return whether a difference is real, see `RULE`. `p`: corrected by `holm` over one family of tests of two runs:
    all their scores, all their token statistics, or the speed-up alone."""
    return p is not None and p < SIGNIFICANT


def prompts_needed(spread: float | None, change: float) -> int | None:
    """Prompts needed: smallest number of prompts for which a paired t test at the 5 % level detects a mean difference
    of `change` with 80 % power.

    `spread`: standard deviation of the difference per prompt, from a pilot run. Returns None without a usable spread,
    or if `MOST_PROMPTS` are not enough.
    """
    if not spread or not change or not math.isfinite(spread):
        return None
    effect = abs(change) / spread
    few, many = 1, 2
    while _power(effect, many) < _POWER:
        few, many = many, many * 2
        if many > MOST_PROMPTS:
            return None
    while many - few > 1:
        middle = (few + many) // 2
        few, many = (few, middle) if _power(effect, middle) >= _POWER else (middle, many)
    return many


def prompts_for_change(estimate: Estimate, prompts: float) -> int | None:
    """Return the number of prompts per run that detects a relative change of `CHANGE` in a score between two runs with
    different prompts, see `prompts_needed`. Runs with the same prompts need fewer. `estimate`: the score; its interval
    over `prompts` prompts gives the spread."""
    if estimate.low is None or estimate.high is None or prompts < 2:
        return None
    error = (estimate.high - estimate.low) / 2 / float(stdtrit(prompts - 1, UPPER_QUANTILE))
    return prompts_needed(math.sqrt(2 * prompts) * error, CHANGE * estimate.value)


def _power(effect: float, n: int) -> float:
    """Power of the paired t test at the 5 % level to find the correct sign. `effect`: in standard deviations."""
    return 1 - float(nctdtr(n - 1, effect * math.sqrt(n), stdtrit(n - 1, UPPER_QUANTILE)))


def clustered_mean(values: Sequence[float], clusters: Sequence[Hashable]) -> tuple[float, float | None, int]:
    """Return the mean, its cluster-robust standard error (None for a single cluster), and the number of clusters."""
    each = np.asarray(values, dtype=np.float64)
    mean = float(each.mean())
    with np.errstate(invalid="ignore"):  # inf - inf
        gaps = each - mean
    sums = pd.Series(gaps).groupby(_keys(clusters), sort=False).sum().to_numpy()
    n = len(sums)
    return mean, None if n < 2 else math.sqrt(n / (n - 1) * np.square(sums).sum()) / len(each), n


def _keys(clusters: Sequence[Hashable]) -> pd.api.extensions.ExtensionArray | np.ndarray:
    """Convert clusters to keys of a group-by. A data frame's column keeps its format, which needs less memory."""
    return clusters.array if isinstance(clusters, pd.Series) else np.asarray(clusters, dtype=object)
