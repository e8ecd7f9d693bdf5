"""Four readings of Cool-SD's schedule (equation 16, whose formula was lost in the text), and what each would accept.

A chain of five drafts whose p/q is lognormal under q is fitted to the length that the paper prints for EAGLE-1. The
same chain under a schedule then has a length that is compared with the one printed for Cool-SD.
"""

import math
from collections.abc import Sequence
from statistics import NormalDist

from scipy.optimize import brentq

from specbench.papers.table_files import load_table

DEPTH, NU = 5, 0.7


def _shape() -> list[float]:
    return [math.exp(-NU * depth) for depth in range(1, DEPTH + 1)]


def mean_weight(delta: float) -> list[float]:
    return [delta * weight * DEPTH / sum(_shape()) for weight in _shape()]


def geometric_mean(delta: float) -> list[float]:
    return [delta * weight / math.exp(-NU * (DEPTH + 1) / 2) for weight in _shape()]


def first_weight(delta: float) -> list[float]:
    return [delta * weight / _shape()[0] for weight in _shape()]


def excess(delta: float) -> list[float]:
    return [1 + weight for weight in mean_weight(delta - 1)]


READINGS = {
    "the mean of the weights is delta (run here)": mean_weight,
    "their geometric mean is delta": geometric_mean,
    "the first weight is delta": first_weight,
    "only what exceeds 1 decays, with mean delta - 1": excess,
}


def length(weights: Sequence[float], spread: float) -> float:
    """Tokens per round of a chain: 1 and, for each depth, the probability that all drafts up to it are accepted."""
    below = NormalDist().cdf
    reached, tokens = 1.0, 1.0
    for weight in weights:
        edge = (-math.log(weight) + spread**2 / 2) / spread
        reached *= weight * below(edge - spread) + 1 - below(edge)  # E[min(1, w r)], ln r normal, E[r] = 1
        tokens += reached
    return tokens


def fitted() -> dict[tuple[str, float], tuple[float, dict[str, float]]]:
    """By model and delta, the printed length of Cool-SD and that of each reading."""
    printed = [row for row in load_table("cool-sd-1").rows if "acceptance_length" in row.paper]
    eagle = {row.group: row.paper["acceptance_length"] for row in printed if row.decoder == "eagle"}
    found = {}
    for row in printed:
        if row.decoder == "cool-sd":
            exact, delta = eagle[row.group], row.settings.options["delta"]
            spread = brentq(lambda spread, exact=exact: length([1.0] * DEPTH, spread) - exact, 0.01, 10)
            lengths = {name: length(weights(delta), spread) for name, weights in READINGS.items()}
            found[row.group, float(delta)] = float(row.paper["acceptance_length"]), lengths
    return found
