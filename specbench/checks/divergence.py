"""How far a sampler's images are from an exact joint: a test, a distance with bounds, the power."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import NormalDist

import numpy as np
import torch

LEVEL = 1e-4
POWER = 0.95


@dataclass(frozen=True)
class Counts:
    """Images seen of one table: `observed` [2, cells] in two halves of the samples, `exact` [cells]."""

    observed: np.ndarray
    exact: np.ndarray

    @property
    def total(self) -> np.ndarray:
        return self.observed.sum(0)


def chi_square(counts: Counts) -> tuple[float, int]:
    """Pearson's statistic and its degrees of freedom; cells expected fewer than 5 times are pooled.

    Infinite when an impossible image was seen.
    """
    expected = counts.exact * counts.total.sum()
    if counts.total[expected == 0].any():
        return math.inf, 1
    rare = expected < 5
    seen = np.append(counts.total[~rare], counts.total[rare].sum())
    due = np.append(expected[~rare], expected[rare].sum())
    possible = due > 0
    statistic = ((seen - due)[possible] ** 2 / due[possible]).sum()
    return float(statistic), int(possible.sum()) - 1


def chi_square_tail(statistic: float, dof: int) -> float:
    """P(chi-square with `dof` degrees of freedom >= statistic)."""
    half = torch.tensor([dof / 2, statistic / 2], dtype=torch.float64)
    return float(torch.special.gammaincc(half[0], half[1]))


def p_value(tables: Sequence[Counts]) -> float:
    """P-value of "every table shows its exact joint".

    Two views, Bonferroni-corrected: the statistics of all tables summed, and the worst single table.
    """
    tests = [chi_square(counts) for counts in tables]
    worst = min(chi_square_tail(*test) for test in tests)
    together = chi_square_tail(sum(statistic for statistic, _ in tests), sum(dof for _, dof in tests))
    return min(1.0, 2 * min(together, len(tests) * worst))


def total_variation(tables: Sequence[Counts]) -> tuple[float, float, float]:
    """Mean total variation over the tables: (estimate, lower, upper) with 95 % between the bounds.

    The plug-in distance is above 0 even for an exact sampler, so the estimate is cross-fitted: one half of
    the images chooses the cells that look too frequent, the other half measures their excess, and the two
    directions are averaged. Before clamping at 0 its mean never exceeds the true distance and is 0 for an
    exact sampler. The lower bound is its normal limit. The upper bound is the smaller of plug-in plus
    McDiarmid's term and half the root of the chi-square divergence that Pearson's statistic still allows.
    """
    n = sum(counts.total.sum() for counts in tables)
    estimate = plug_in = 0.0
    for counts in tables:
        share = counts.total.sum() / n
        excess = counts.observed / counts.observed.sum(1, keepdims=True) - counts.exact
        estimate += share * (np.sign(excess) * excess[::-1]).sum() / 4
        plug_in += share * np.abs(counts.total / counts.total.sum() - counts.exact).sum() / 2
    tests = [chi_square(counts) for counts in tables]
    statistic, dof = sum(test[0] for test in tests), sum(test[1] for test in tests)
    allowed = math.sqrt(noncentrality(max(statistic, dof), dof, z=2.24) / n) / 2
    high = min(1.0, plug_in + math.sqrt(math.log(1 / 0.0125) / (2 * n)), allowed)
    low = estimate - 1.96 / math.sqrt(2 * n)
    return max(0.0, estimate), max(0.0, low), max(high, estimate, 0.0)


def noncentrality(statistic: float, dof: float, z: float) -> float:
    """Largest noncentrality under which chi-square is as low as `statistic`, `z` deviations below its mean.

    Normal approximation, good for the hundreds of degrees of freedom an audit has.
    """
    if math.isinf(statistic):
        return math.inf
    gap = statistic - dof + 2 * z * z
    return max(0.0, gap + math.sqrt(max(0.0, gap**2 - (statistic - dof) ** 2 + 2 * z * z * dof)))


def detectable_tv(dof: int, n: int) -> float:
    """Mean total variation the summed test misses with probability at most 1 - POWER, however it is spread.

    By Cauchy-Schwarz a distance t makes a chi-square divergence of at least 4 t**2.
    """
    z = NormalDist().inv_cdf(1 - LEVEL / 2)
    reject_at = dof * (1 - 2 / (9 * dof) + z * math.sqrt(2 / (9 * dof))) ** 3
    return math.sqrt(noncentrality(reject_at, dof, NormalDist().inv_cdf(POWER)) / n) / 2
