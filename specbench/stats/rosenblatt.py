"""Tests of the Rosenblatt transform: independence and uniformity of a run's u_i, and the size of deviations.

For an exact sampler every u_i is uniform given the past (see `specbench.decoding.uniforms`). So the u_i must also be
uniform in every group of tokens that is selected by the past: all tokens, or tokens at one place of the window, in one
range of entropy, or in one part of the image. In addition, u_i must not depend on the u of earlier tokens or of the
previous image. All tests of a run form one family, corrected by Holm's method.
"""

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from statistics import NormalDist
from typing import Any, Literal

import numpy as np
from scipy.special import kolmogi, ndtr, stdtrit
from scipy.stats import kstwo

from specbench.decoding.generation import Order
from specbench.stats.intervals import holm

LEVEL = 0.001  # Family-wise error rate of the verdict: the share of exact runs that are flagged
_POWER = 0.95
FEWEST = 200  # Minimum number of tokens for testing a group
PLACES = (0, 1, 2, 4, 8, 16, 32, 64)
ENTROPIES = (0.0, 0.5, 1.0, 2.0, 3.0, 4.0, 5.0, 6.0, 8.0)
"""Lower bounds of the groups by place in the window, and by entropy of p in nats."""
_PARTS = 4  # Number of groups of consecutive slots
LAGS = (1, 2, 4, 8, 16, 32)  # Distances between compared tokens; they include common window sizes
_MEAN_NULL_DISTANCE = 0.8687
"""Mean of the Kolmogorov distribution: expected sqrt(n) times the distance for uniform values."""
Grouping = Literal["all", "place", "entropy", "part"]
"""Groups of tokens: a single group, or groups by place in the window, entropy of p, or part of the image."""


@dataclass(frozen=True)
class Tokens:
    """The free tokens of a run's images. K images of M tokens each, in stream order."""

    u: Mapping[Order, np.ndarray]  # [K, M] by order; NaN for tokens without a value in that order
    # [K, M] each token's place in the window that committed the token; None for decoders without windows
    place: np.ndarray | None
    entropy: np.ndarray  # [K, M] entropy of p, in nats


@dataclass(frozen=True)
class Test:
    """A test of a run. All tests of the run are corrected together."""

    __test__ = False  # not a case of pytest

    order: Order  # order of the vocabulary
    # test of uniformity in a group, or of correlation with the token `group` tokens earlier or in the previous image
    kind: Literal[Grouping, "serial", "images"]
    group: str  # the group's bounds or the distance as text, empty for a single group
    n: int  # number of tokens, or of pairs of tokens
    distance: float  # largest distance of the empirical distribution function from uniform, or the correlation
    # p, corrected: p-value, and p-value corrected for all tests of the run
    p: float
    corrected: float = math.nan


@dataclass(frozen=True)
class Deviation:
    """A lower bound on the mean total variation per token between the decoder's choices and p."""

    # value, low, high: cross-fitted estimate of the bound and its 95 % interval over images, None with fewer than two
    # images per half. The total variation is at least `low` with 97.5 % confidence; it may be larger than `high`,
    # because one order shows only a part of the deviation.
    value: float
    low: float | None
    high: float | None
    # order, kind: order and grouping that were selected for the bound
    order: Order
    kind: Grouping


@dataclass(frozen=True)
class RosenblattResult:
    """All tests of a run, sorted by p-value."""

    tests: tuple[Test, ...]
    level: float
    deviates: bool  # whether any corrected p-value is below the level
    deviation: Deviation  # selected from all orders and groupings
    by_order: Mapping[Order, Deviation]  # deviation in each order, over all tokens
    detectable: float  # mean deviation in one order that is flagged with probability `_POWER`
    images: int
    tokens: int


def audit_tokens(tokens: Tokens, level: float = LEVEL) -> RosenblattResult:
    """Run all tests, correct their p-values and estimate the deviation."""
    if not (tests := list(all_tests(tokens))):
        raise ValueError(f"fewer than {FEWEST} tokens")
    corrected: Sequence[Any] = holm([test.p for test in tests])
    tests = [replace(test, corrected=p) for test, p in zip(tests, corrected, strict=True)]
    tests.sort(key=lambda test: (test.p, -abs(test.distance)))
    by_order = {order: deviation(tokens, [(order, "all")]) for order in tokens.u}
    candidates = [(order, kind) for order in tokens.u for kind in groupings(tokens)]
    return RosenblattResult(
        tests=tuple(tests),
        level=level,
        deviates=tests[0].corrected < level,
        deviation=deviation(tokens, candidates),
        by_order=by_order,
        detectable=detectable(tokens, level / len(tests)),
        images=len(tokens.entropy),
        tokens=tokens.entropy.size,
    )


def all_tests(tokens: Tokens) -> Iterator[Test]:
    """Yield every test with enough tokens, without correction."""
    for order, u in tokens.u.items():
        for kind, (labels, group) in groupings(tokens).items():
            if kind != "all" and len(np.unique(group[~np.isnan(u)])) < 2:
                continue  # a single group is tested as "all"
            for number, label in enumerate(labels):
                if len(values := u[(group == number) & ~np.isnan(u)]) >= FEWEST:
                    distance = uniform_distance(values)[0]
                    yield Test(order, kind, label, len(values), distance, float(kstwo.sf(distance, len(values))))
        for lag in LAGS:
            yield from _correlation(order, "serial", str(lag), u[:, :-lag], u[:, lag:])
        yield from _correlation(order, "images", "", u[:-1], u[1:])


def groupings(tokens: Tokens) -> dict[Grouping, tuple[Sequence[str], np.ndarray]]:
    """Return for each kind the names of the groups and each token's group number [K, M], a function of the past."""
    groups: dict[Grouping, Any] = {"all": ([""], np.zeros(tokens.entropy.shape, int))}
    if tokens.place is not None:
        groups["place"] = (_names(PLACES, whole=True), np.searchsorted(PLACES, tokens.place, side="right") - 1)
    # Rounding may put the entropy of a one-hot p just below 0.
    groups["entropy"] = (_names(ENTROPIES), np.searchsorted(ENTROPIES, np.maximum(tokens.entropy, 0), side="right") - 1)
    length = tokens.entropy.shape[1]
    bounds = np.arange(_PARTS) * length // _PARTS
    part = np.searchsorted(bounds, np.arange(length), side="right") - 1
    groups["part"] = (_names(bounds.tolist(), whole=True), np.broadcast_to(part, tokens.entropy.shape))
    return groups


def uniform_distance(values: np.ndarray) -> tuple[float, float, int]:
    """Return the Kolmogorov-Smirnov distance of `values` from uniform, its point t, and the sign of F(t) - t at t."""
    ordered, n = np.sort(values), len(values)
    above, below = np.arange(1, n + 1) / n - ordered, ordered - np.arange(n) / n
    high, low = int(above.argmax()), int(below.argmax())
    if above[high] >= below[low]:
        return float(above[high]), float(ordered[high]), 1
    # The empirical distribution function is too low just below this value.
    return float(below[low]), float(np.nextafter(ordered[low], -1)), -1


def deviation(tokens: Tokens, candidates: Sequence[tuple[Order, Grouping]]) -> Deviation:
    """Compute a cross-fitted lower bound on the mean total variation per token.

    P(u_i <= t | past) - t is the difference between the probabilities of a set of tokens under the decoder and under p.
    So its mean is at most the mean total variation for any t, also with a separate t per group. One half of the images
    selects an (order, grouping) of `candidates`, the points t and their signs; the other half measures. This avoids
    selection bias: for an exact sampler the estimate is 0 on average. Tokens without a value count as 0.
    """
    half: np.ndarray = np.arange(len(tokens.entropy)) % 2
    groups = groupings(tokens)
    gains, chosen = np.zeros(len(half)), candidates[0]
    for measured in (0, 1):
        train, test = half != measured, half == measured
        best = -math.inf
        for order, kind in candidates:
            _, group = groups[kind]
            u = tokens.u[order]
            points, score = _choose(u[train], group[train])
            if score > best:
                best, chosen = score, (order, kind)
                gains[test] = _measure(u[test], group[test], points)
    mean = float(gains.mean()) if len(gains) else 0.0
    if len(gains) < 4:
        return Deviation(max(0.0, mean), None, None, *chosen)
    error = float(stdtrit(len(gains) - 1, 0.975)) * float(gains.std(ddof=1)) / math.sqrt(len(gains))
    return Deviation(max(0.0, mean), max(0.0, mean - error), max(0.0, mean + error), *chosen)


def _choose(u: np.ndarray, group: np.ndarray) -> tuple[dict[int, tuple[float, int]], float]:
    """Return each group's point t and sign, and the distance per token minus its expectation for uniform values."""
    points, score = {}, 0.0
    for number in np.unique(group):
        if len(values := u[(group == number) & ~np.isnan(u)]) >= FEWEST // 2:
            distance, t, sign = uniform_distance(values)
            points[int(number)] = (t, sign)
            score += (distance - _MEAN_NULL_DISTANCE / math.sqrt(len(values))) * len(values) / u.size
    return points, score


def _measure(u: np.ndarray, group: np.ndarray, points: Mapping[int, tuple[float, int]]) -> np.ndarray:
    """Return for each image, [K], the mean of sign * (1(u <= t) - t) over the image's tokens."""
    gain: np.ndarray = np.zeros(u.shape)
    for number, (t, sign) in points.items():
        here = (group == number) & ~np.isnan(u)
        gain[here] = sign * ((u[here] <= t) - t)
    means: np.ndarray = gain.mean(1)
    return means


def detectable(tokens: Tokens, level: float) -> float:
    """Return the smallest mean deviation in one order that the test of all tokens at `level` detects with probability
    `_POWER`.

    Whole images are the independent units: the variance is multiplied by the ratio of the variance between images to
    the variance for independent tokens, measured at the median.
    """
    n = tokens.entropy.size
    factor = 1.0
    for u in tokens.u.values():
        if len(u) > 1 and not np.isnan(u).any():
            between = float((u <= 0.5).mean(1).var(ddof=1))
            factor = max(factor, between * u.shape[1] / 0.25)
    return (float(kolmogi(level)) + NormalDist().inv_cdf(_POWER) * 0.5 * math.sqrt(factor)) / math.sqrt(n)


def _correlation(
    order: Order, kind: Literal["serial", "images"], group: str, first: np.ndarray, second: np.ndarray
) -> Iterator[Test]:
    """Test for correlation: products of independent, centred values have mean 0 and variance 1/144."""
    products = (first - 0.5) * (second - 0.5)
    if len(products := products[~np.isnan(products)]) >= FEWEST:
        correlation = 12 * float(products.mean())
        p = 2 * float(ndtr(-abs(correlation) * math.sqrt(len(products))))
        yield Test(order, kind, group, len(products), correlation, p)


def _names(bounds: Sequence[float], whole: bool = False) -> list[str]:
    """Name the groups that begin at `bounds`."""
    ranges = [(low, high - whole) for low, high in pairwise(bounds)]
    names = [f"{low:g}" if whole and low == high else f"{low:g}-{high:g}" for low, high in ranges]
    return [*names, f"{bounds[-1]:g}+"]
