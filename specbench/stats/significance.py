"""Which differences between two runs are real, and how many prompts it takes to see one.

Differences are paired: the same prompts, and within them the same samples. Whole prompts are the independent units.
"""

from __future__ import annotations

import math
from collections.abc import Hashable, Sequence
from dataclasses import dataclass, replace

import pandas as pd
from scipy.special import stdtr, stdtrit
from scipy.stats import nct

from specbench.stats.intervals import LEVEL, Estimate, clustered_mean

POWER = 0.8
MOST_PROMPTS = 10**7


@dataclass(frozen=True)
class Difference(Estimate):
    """A paired difference with its 95 % interval.

    Attributes:
        p: two-sided p-value of no difference, by the t test that the interval belongs to; None where n does not allow
            one.
        spread: standard deviation of a prompt's difference, for `prompts_needed`; None likewise.
    """

    p: float | None = None
    spread: float | None = None


def mean_difference(gaps: Sequence[float], clusters: Sequence[Hashable], value: float | None = None) -> Difference:
    """Mean of paired differences: Student's t over prompts.

    Args:
        gaps: a difference per image, or its influence on a difference that is no mean.
        clusters: the prompt of each.
        value: the difference itself, where it is not the mean of `gaps`.
    """
    mean, error, n = clustered_mean(gaps, clusters)
    value = mean if value is None else value
    if error is None:
        return Difference(value, None, None)
    half = float(stdtrit(n - 1, LEVEL)) * error
    return Difference(value, value - half, value + half, _p(value, error, n), error * math.sqrt(n))


def speed_difference(pairs: pd.DataFrame) -> Difference:
    """Time saved per image as a share of the baseline's; `pairs` as in `speedup`.

    The p-value is also that of a speed-up of 1, as both say that the totals are equal. The spread is that of the
    relative error of the speed-up.
    """
    theirs, mine = pairs["ar_ms_base"], pairs["ar_ms"]
    saved = mean_difference((theirs - mine) / theirs.mean(), pairs["prompt_id"])
    error = mean_difference(theirs / theirs.mean() - mine / mine.mean(), pairs["prompt_id"])
    return replace(saved, spread=error.spread)


def holm(p_values: Sequence[float | None]) -> list[float | None]:
    """p-values corrected for how many there are (Holm 1979): those below 0.05 are all real with 95 % certainty.

    Missing ones stay missing and count for nothing.
    """
    known = sorted((p, place) for place, p in enumerate(p_values) if p is not None)
    corrected: list[float | None] = [None] * len(p_values)
    largest = 0.0
    for rank, (p, place) in enumerate(known):
        largest = max(largest, min(1.0, (len(known) - rank) * p))
        corrected[place] = largest
    return corrected


def prompts_needed(spread: float | None, change: float) -> int | None:
    """Prompts needed: the fewest with which a paired t test at 5 % sees a mean difference of `change` in four of five
    attempts.

    Args:
        spread: standard deviation of a prompt's difference, from a pilot.
        change: the difference to be seen, in the same unit.

    Returns:
        None where the pilot does not tell, as one in which all prompts differ alike, or where `MOST_PROMPTS` would not
        do.
    """
    if not spread or not change or not math.isfinite(spread):
        return None
    effect = abs(change) / spread
    few, many = 1, 2
    while _power(effect, many) < POWER:
        few, many = many, many * 2
        if many > MOST_PROMPTS:
            return None
    while many - few > 1:
        middle = (few + many) // 2
        few, many = (few, middle) if _power(effect, middle) >= POWER else (middle, many)
    return many


def _power(effect: float, n: int) -> float:
    """Chance that the paired t test at 5 % sees a difference of `effect` standard deviations in the right direction."""
    return float(nct.sf(stdtrit(n - 1, LEVEL), n - 1, effect * math.sqrt(n)))


def _p(value: float, error: float, n: int) -> float:
    if error == 0:
        return float(value == 0)
    return float(2 * stdtr(n - 1, -abs(value) / error))
