"""Significance of paired differences between two runs, and power analysis.

Differences are paired by prompt and sample. Prompts are the independent units.
"""

from __future__ import annotations

import math
from collections.abc import Hashable, Sequence
from dataclasses import dataclass, replace

import pandas as pd
from scipy.special import nctdtr, stdtr, stdtrit  # importing scipy.stats takes as long as a report

from specbench.stats.intervals import FEW_UNITS, UPPER_QUANTILE, Estimate, clustered_mean, without_few

_POWER = 0.8
MOST_PROMPTS = 10**7


@dataclass(frozen=True)
class Difference(Estimate):
    """A paired difference with its 95 % interval.

    Attributes:
        p: two-sided p-value of the t test of no difference; None if n is too small.
        spread: standard deviation of the difference per prompt, for `prompts_needed`; None if n is too small.
        prompts: number of prompts, the independent units; None if unknown.
    """

    p: float | None = None
    spread: float | None = None
    prompts: int | None = None


def mean_difference(gaps: Sequence[float], clusters: Sequence[Hashable], value: float | None = None) -> Difference:
    """Mean of paired differences: Student's t over prompts.

    Args:
        gaps: difference per image, or its influence on a difference that is not a mean.
        clusters: prompt of each image.
        value: the difference, if it is not the mean of `gaps`.
    """
    mean, error, n = clustered_mean(gaps, clusters)
    value = mean if value is None else value
    if error is None:
        return Difference(value, None, None, prompts=n)
    half = float(stdtrit(n - 1, UPPER_QUANTILE)) * error
    return Difference(value, value - half, value + half, _p(value, error, n), error * math.sqrt(n), n)


def difference_to_show(found: Difference) -> Difference:
    """The difference as tables show it: without interval and p-value if those are of fewer than `FEW_UNITS` prompts."""
    if found.prompts is None or found.prompts >= FEW_UNITS:
        return found
    return replace(without_few(found, found.prompts), p=None)


def speed_difference(pairs: pd.DataFrame) -> Difference:
    """Time saved per image as a fraction of the baseline's time; `pairs` as in `speedup`.

    The p-value also tests a speed-up of 1, the same null hypothesis of equal totals. The spread is that of the relative
    error of the speed-up.
    """
    theirs, mine = pairs["ar_ms_base"], pairs["ar_ms"]
    saved = mean_difference((theirs - mine) / theirs.mean(), pairs["prompt_id"])
    error = mean_difference(theirs / theirs.mean() - mine / mine.mean(), pairs["prompt_id"])
    return replace(saved, spread=error.spread)


def holm(p_values: Sequence[float | None]) -> list[float | None]:
    """Holm-corrected p-values (Holm 1979): rejecting all below 0.05 keeps the family-wise error rate at 5 %.

    Missing values stay missing and do not count as tests.
    """
    known = sorted((p, place) for place, p in enumerate(p_values) if p is not None)
    corrected: list[float | None] = [None] * len(p_values)
    largest = 0.0
    for rank, (p, place) in enumerate(known):
        largest = max(largest, min(1.0, (len(known) - rank) * p))
        corrected[place] = largest
    return corrected


def prompts_needed(spread: float | None, change: float) -> int | None:
    """Prompts needed: smallest number of prompts for which a paired t test at the 5 % level detects a mean difference
    of `change` with 80 % power.

    Args:
        spread: standard deviation of the difference per prompt, from a pilot run.
        change: difference to detect, in the same unit.

    Returns:
        None if the pilot gives no usable spread, or if `MOST_PROMPTS` are not enough.
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


def _power(effect: float, n: int) -> float:
    """Power of the paired t test at the 5 % level for an effect of `effect` standard deviations, correct sign."""
    return 1 - float(nctdtr(n - 1, effect * math.sqrt(n), stdtrit(n - 1, UPPER_QUANTILE)))


def _p(value: float, error: float, n: int) -> float:
    if error == 0:
        return float(value == 0)
    return float(2 * stdtr(n - 1, -abs(value) / error))
