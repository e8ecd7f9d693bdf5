"""Agreement of a run's recorded values with those recomputed: does rounding explain the distance?

In float32 the two are equal but for the last digits. In a number format of fewer bits they are two roundings of one
value, and guidance multiplies the distance. How far rounding moves values is measured on other tokens than the run's:
drawn from p in that format and valued there and in float32, so that no fault of the run widens its own tolerance.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import NamedTuple

import numpy as np

from specbench.checks.teacher_forced import Values

COMPARED = {"logp": "log p", "u_id": "u by token id", "u_p": "u by p descending"}
"""Printed names of the recorded values that are compared with those recomputed."""
ENTROPY = "entropy"
_JUDGED = ("logp", "u_id")
"""Values that are judged in fewer bits: rounding swaps ranks of p, which moves u by p too far to judge."""
_TOLERANCE = 0.01
"""Difference of a float32 run's recorded value to the recomputed one, in nats or of u, that rounding never makes."""
_BEYOND = 0.001
"""Share of the tokens of a float32 run that may be beyond it: a token at the edge of top-p falls to either side."""
_ROUNDING = 2.0
"""Distance of two roundings over that of one to the exact value, at most: that of sums of two equal ones."""
_ERRORS = 5.0
"""Standard errors by which a mean must exceed that: the larger of those over tokens and over images."""
_FEW = 8
"""Images whose spread is no estimate: fewer."""
_SLACK = 0.001
"""Difference of mean entropies, in nats, that is no verdict."""


class Rounding(NamedTuple):
    """What rounding does to values of the run's model and prompts.

    Attributes:
        part: [M] images of the run whose prompts were taken.
        free: [M, N] bool, slots that the grammar leaves free.
        drawn: values in the run's number format, of tokens drawn from p in it.
        exact: values of the same tokens in float32.
    """

    part: np.ndarray
    free: np.ndarray
    drawn: Values
    exact: Values


def compare_recorded(
    recorded: Mapping[str, np.ndarray], values: Values, free: np.ndarray, rounding: Rounding | None
) -> dict[str, dict[str, object]]:
    """Distance of recorded values to those recomputed in the run's number format, and whether rounding explains it.

    Args:
        recorded: [K, N] by name of COMPARED and "entropy", NaN where an image has none.
        free: [K, N] bool, slots that the grammar leaves free.
        rounding: of a run of fewer bits than float32.

    Returns:
        By printed name: mean distance `mean` (of entropy: recorded minus recomputed, out of which rounding averages;
        it tells another temperature), the share `beyond` 0.01, `differs`, and in fewer bits the mean distance that
        `rounding` makes and the number of `images` that are too far by themselves, else None.
    """
    ours = {name: recorded[name] for name in COMPARED if name in recorded}
    gaps, found = _gaps(ours, _compared(values), free), {}
    if rounding is None:
        for name, gap in gaps.items():
            beyond = _share_beyond(gap)
            found[COMPARED[name]] = {
                "mean": float(np.nanmean(gap)),
                "beyond": beyond,
                "rounding": None,
                "images": None,
                "differs": beyond > _BEYOND,
            }
        return found
    control = _gaps(_compared(rounding.drawn), _compared(rounding.exact), rounding.free)
    for name, gap in gaps.items():
        slots = (~np.isnan(gap)).sum(1)
        alone = _outliers(np.nansum(gap, 1), np.nanmean(control[name], 1).max(), slots)
        held = _against(gap, control[name])
        judged = name in _JUDGED
        held |= {"images": int(alone.sum()) if judged else None, "differs": judged and (held["differs"] or alone.any())}
        found[COMPARED[name]] = held | {"differs": bool(held["differs"])}
    moved = np.where(rounding.free, rounding.drawn.entropy - rounding.exact.entropy, np.nan)
    difference = np.where(free & ~np.isnan(gaps["u_id"]), recorded["entropy"] - values.entropy, np.nan)
    found[ENTROPY] = _against(difference, moved, _SLACK) | {"images": None}
    return found


def rounding_explains(impossible: np.ndarray, free: np.ndarray, rounding: Rounding) -> bool:
    """Whether rounding makes so many tokens [K, N] of probability 0, in each image and in those of `rounding`."""
    counts, slots = (impossible & free).sum(1), free.sum(1)
    lost, of = (~rounding.exact.possible & rounding.free).sum(1), rounding.free.sum(1)
    together = _outliers(counts[rounding.part].sum(), lost.sum() / of.sum(), slots[rounding.part].sum())
    return not (together or _outliers(counts, (lost / of).max(), slots).any())


def _compared(values: Values) -> dict[str, np.ndarray]:
    return {"logp": values.logp, **values.u}


def _gaps(some: Mapping[str, np.ndarray], others: Mapping[str, np.ndarray], free: np.ndarray) -> dict[str, np.ndarray]:
    """[K, N] distances by name of the values of `free` slots, at most 1, as where one p of the two is 0; NaN where a
    slot is not free or a value is missing."""
    found = {}
    for name in some:
        with np.errstate(invalid="ignore"):
            gap = np.where(some[name] == others[name], 0.0, np.abs(some[name] - others[name]))
        found[name] = np.where(free, np.minimum(gap, 1.0), np.nan)
    return found


def _share_beyond(gap: np.ndarray) -> float:
    return float((np.abs(gap[~np.isnan(gap)]) > _TOLERANCE).mean())


def _outliers(sums: np.ndarray, mean: float, tokens: np.ndarray) -> np.ndarray:
    """Whether sums over so many tokens, of terms of at most 1, are larger than rounding of this mean makes them.

    By Bernstein's inequality an expected sum m is exceeded by 6 sqrt(m) + 12 once in 10^5 times at most.
    """
    expected = _ROUNDING * mean * tokens
    return sums > expected + 6 * np.sqrt(expected) + 12


def _against(own: np.ndarray, control: np.ndarray, slack: float = 0.0) -> dict[str, object]:
    """Means of the values [K, N] and of `control` [M, N], without NaN, and whether the first `differs` from 0 by more
    than such rounding and chance.

    The chance is that of `control`: values which differ much in some images alone are no reason to allow for more.
    """
    own, control = (held[~np.isnan(held).all(1)] for held in (own, control))
    mean, rounding = float(np.nanmean(own)), float(np.nanmean(control))
    spread = np.nanvar(control) / (~np.isnan(control)).sum()
    if len(control) >= _FEW:
        spread = max(spread, np.nanmean(control, 1).var() / len(control))
    error = _ROUNDING * math.sqrt(spread * (1 + len(control) / len(own)))
    # Where rounding moves few tokens, `control` may hold none of them: ties under top-k 1, a nat or so each.
    few = _ERRORS / (~np.isnan(own)).sum()
    differs = abs(mean) > _ROUNDING * abs(rounding) + _ERRORS * error + few + slack
    return {"mean": mean, "beyond": _share_beyond(own), "rounding": rounding, "differs": bool(differs)}
