"""Compare a sampler's images with an exact joint distribution, and test whether they are independent: p-values, total
variation with bounds, and the smallest detectable distance."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
from scipy.special import chndtrinc, ndtr
from scipy.stats import chi2

AUDIT_LEVEL = 1e-4
AUDIT_POWER = 0.95
COUNTABLE = 2000  # With more possible images, runs of consecutive tokens are counted instead of whole images
RUN_CELLS = 128  # Maximum number of values of a run of tokens
POOLED = 5  # Cells with a smaller expected count are pooled
PAIRS = ("prompts", "samples", "seeds")  # Property in which the two images of a pair differ
VIEWS = 3  # Number of tests in `p_value`, each of which can reject


@dataclass(frozen=True)
class Counts:
    """Counts of images under one random table: `observed` [2, cells], a row per half of the samples; `exact` [cells].

    `vocab`: number of values of an image token, if cells are images in the order of `image_index`, with a last cell for
    streams that break the grammar; else 0. `agreement` [3, 2]: for each of PAIRS, the sums over all pairs of the
    function `agreement` and of its square; None if images were not paired.
    """

    observed: np.ndarray
    exact: np.ndarray
    vocab: int = 0
    agreement: np.ndarray | None = None

    @property
    def total(self) -> np.ndarray:
        return self.observed.sum(0)

    @cached_property
    def runs(self) -> list[Counts]:
        """Marginals of every run of consecutive tokens that can take at most RUN_CELLS values; empty if whole images
        are counted."""
        images = len(self.exact) - 1
        if not self.vocab or images <= COUNTABLE:
            return []
        length = round(math.log(images, self.vocab))
        return [self._run(start, length) for start in range(length - self._run_width + 1)]

    @property
    def _run_width(self) -> int:
        return int(math.log(RUN_CELLS + 0.5, self.vocab))

    def _run(self, start: int, length: int) -> Counts:
        """Marginal of a run of tokens from `start` on; the last cell still counts streams that break the grammar."""
        width = self._run_width
        shape = (self.vocab**start, self.vocab**width, self.vocab ** (length - start - width))
        observed = self.observed[:, :-1].reshape(2, *shape).sum((1, 3))
        exact = self.exact[:-1].reshape(shape).sum((0, 2))
        return Counts(np.append(observed, self.observed[:, -1:], 1), np.append(exact, self.exact[-1]))

    @cached_property
    def blocks(self) -> list[Counts]:
        """The whole images, or runs of tokens that together cover the image once, except for an overlap at its end."""
        if not self.runs:
            return [self]
        return [self.runs[start] for start in self._block_starts]

    @property
    def _block_starts(self) -> list[int]:
        last = len(self.runs) - 1
        return [*range(0, last, self._run_width), last]

    @cached_property
    def block_covariance(self) -> float:
        """Sum over all pairs of `blocks` of the covariance of their chi-square statistics, for an exact sampler.

        The statistics are squared norms of jointly normal vectors. The covariance of two statistics is therefore
        twice the mean square contingency of the exact joint distribution of the two blocks.
        """
        if not self.runs:
            return 0.0
        width, vocab = self._run_width, self.vocab
        images = np.arange(len(self.exact) - 1)
        joint = self.exact[:-1] / self.exact[:-1].sum()
        length = round(math.log(len(images), vocab))
        parts = []
        for start, block in zip(self._block_starts, self.blocks, strict=True):
            value = images // vocab ** (length - start - width) % vocab**width
            parts.append(_pooled(block.exact * block.total.sum())[value])
        return 2 * sum(2 * _contingency(joint, a, b) for a, b in itertools.combinations(parts, 2))


def _contingency(joint: np.ndarray, a: np.ndarray, b: np.ndarray) -> float:
    """Mean square contingency of two functions of images, given as cell numbers `a` and `b`; `joint`: probabilities."""
    columns = int(b.max()) + 1
    both = np.bincount(a * columns + b, joint, (int(a.max()) + 1) * columns).reshape(-1, columns)
    independent = np.outer(both.sum(1), both.sum(0))
    valid = independent > 0
    return float(((both - independent)[valid] ** 2 / independent[valid]).sum())


def chi_square(counts: Counts) -> tuple[float, int]:
    """Pearson's statistic and its degrees of freedom over the cells of `_pooled`.

    The statistic is infinite if an impossible image was observed.
    """
    seen, due = counts.total, counts.exact * counts.total.sum()
    if seen[due == 0].any():
        return math.inf, 1
    cells = _pooled(due)
    seen, due = (np.bincount(cells, x) for x in (seen, due))
    possible = due > 0
    statistic = ((seen - due)[possible] ** 2 / due[possible]).sum()
    return float(statistic), degrees_of_freedom(counts)


def degrees_of_freedom(counts: Counts) -> int:
    """Return the degrees of freedom of `chi_square`. The observed counts have no effect on them."""
    due = counts.exact * counts.total.sum()
    return int((np.bincount(_pooled(due), due) > 0).sum()) - 1


def _pooled(due: np.ndarray) -> np.ndarray:
    """Index of the pooled cell of each cell; `due`: expected counts. Cells below POOLED are merged, with the rarest
    other cell if their sum is below POOLED. Without merging, an image expected 0.001 times would decide the test."""
    rare = due < POOLED
    cells = np.where(rare, 0, np.cumsum(~rare))
    if 0 < due[rare].sum() < POOLED and not rare.all():
        cells[rare] = cells[np.where(rare, np.inf, due).argmin()]
    return cells


def p_value(tables: Sequence[Counts]) -> float:
    """P-value of the hypothesis "images follow the exact joint distribution of their table and are independent".

    Three tests, Bonferroni-corrected: the sum of the statistics of all blocks; the smallest p-value of the tests of
    single tables (whole images, or a run of tokens); and `dependence`.
    """
    single = [chi_square(view) for counts in tables for view in (counts, *counts.runs)]
    worst = min(_tail(*test) for test in single)
    together = _tail(*_summed(tables))
    return min(1.0, VIEWS * min(together, len(single) * worst, *(len(PAIRS) * p for p in dependence(tables).values())))


def agreement(a: np.ndarray, b: np.ndarray, vocab: int) -> np.ndarray:
    """[n] number of the M tokens in which images `a` and `b` [n, M] agree, minus the number expected from the
    frequencies of their tokens.

    If images are independent, the mean is 0 for any distributions, even the mean over only one image of the pairs
    (double centring).
    """
    agreed = np.zeros(len(a))
    for tokens_a, tokens_b in zip(a.T, b.T, strict=True):
        p, q = (np.bincount(tokens, minlength=vocab) / max(len(tokens), 1) for tokens in (tokens_a, tokens_b))
        agreed += (tokens_a == tokens_b) - q[tokens_a] - p[tokens_b] + p @ q
    return agreed


def dependence(tables: Sequence[Counts]) -> dict[str, float]:
    """For each of PAIRS, p-value of "the two images of a pair are independent"; empty if images were not paired."""
    paired = [counts.agreement for counts in tables if counts.agreement is not None]
    if not paired:
        return {}
    sums, squares = np.sum(paired, axis=0).T
    z = np.abs(sums) / np.sqrt(np.maximum(squares, 1))
    return dict(zip(PAIRS, (2 * ndtr(-z)).tolist(), strict=True))


def _summed(tables: Sequence[Counts]) -> tuple[float, float]:
    """Sum of the statistics of all blocks and its degrees of freedom, both divided by `_scale`."""
    scale = _scale(tables)
    tests = [chi_square(block) for counts in tables for block in counts.blocks]
    return sum(statistic for statistic, _ in tests) / scale, sum(dof for _, dof in tests) / scale


def _scale(tables: Sequence[Counts]) -> float:
    """Scale of the chi-square distribution that has the mean and variance of the summed statistics (Satterthwaite).
    It exceeds 1 because blocks of the same image are dependent."""
    dof = sum(degrees_of_freedom(block) for counts in tables for block in counts.blocks)
    return 1 + sum(counts.block_covariance for counts in tables) / max(2 * dof, 1)


def _tail(statistic: float, dof: float) -> float:
    """Probability of at least this statistic. A table with a single possible image has nothing to test."""
    return float(chi2.sf(statistic, dof)) if dof else 1.0


def total_variation(tables: Sequence[Counts]) -> tuple[float, float, float]:
    """Mean total variation over the blocks of all tables: (estimate, lower, upper), a 95 % interval.

    The plug-in distance is above 0 even for an exact sampler, so the estimate is cross-fitted: one half of the images
    chooses the cells that look too frequent, the other half measures their excess, and the two directions are averaged.
    Before clamping at 0, its mean never exceeds the true distance and is 0 for an exact sampler. The lower bound
    assumes a normal distribution of the estimate. The upper bound is the smaller of two values: the plug-in distance
    plus McDiarmid's term, and half the root of the largest chi-square divergence that Pearson's statistic allows.
    """
    blocks = [block for counts in tables for block in counts.blocks]
    n = sum(block.total.sum() for block in blocks)
    # McDiarmid: root of the sum over images of the squared largest change by an image, which changes all of its blocks.
    influence = math.sqrt(sum(counts.total.sum() * len(counts.blocks) ** 2 for counts in tables)) / n
    estimate = plug_in = 0.0
    for block in blocks:
        share = block.total.sum() / n
        excess = block.observed / block.observed.sum(1, keepdims=True) - block.exact
        estimate += share * (np.sign(excess) * excess[::-1]).sum() / 4
        plug_in += share * np.abs(block.total / block.total.sum() - block.exact).sum() / 2
    statistic, dof = _summed(tables)
    allowed = math.sqrt(_scale(tables) * noncentrality(max(statistic, dof), dof, 0.0125) / n) / 2
    high = min(1.0, plug_in + math.sqrt(math.log(1 / 0.0125) / 2) * influence, allowed)
    low = estimate - 1.96 / math.sqrt(2) * influence
    return float(max(0.0, estimate)), float(max(0.0, low)), float(max(0.0, high, estimate))


def noncentrality(statistic: float, dof: float, chance: float) -> float:
    """Noncentrality for which chi-square is at most `statistic` with probability `chance`."""
    return math.inf if math.isinf(statistic) else float(chndtrinc(statistic, dof, chance))


def detectable_tv(tables: Sequence[Counts]) -> float:
    """Smallest mean total variation over the blocks that the summed test detects with probability AUDIT_POWER, however
    the distance is divided among the blocks.

    By Cauchy-Schwarz a distance t implies a chi-square divergence of at least 4 t**2.
    """
    blocks = [block for counts in tables for block in counts.blocks]
    n = sum(int(block.total.sum()) for block in blocks)
    scale = _scale(tables)
    dof = max(sum(degrees_of_freedom(block) for block in blocks), 1) / scale
    return math.sqrt(scale * noncentrality(chi2.isf(AUDIT_LEVEL / VIEWS, dof), dof, 1 - AUDIT_POWER) / n) / 2
