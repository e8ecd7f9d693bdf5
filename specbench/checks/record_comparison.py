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

COMPARED = {"logp": "log p", "u_id": "u by token id", "u_p": "u by p descending", "entropy": "entropy"}
"""Printed names of the recorded values that are compared with those recomputed."""
_JUDGED = ("logp", "u_id")
"""Values that are judged in fewer bits: rounding swaps ranks of p, which moves u by p too far to judge."""
_TOLERANCE = 0.01
"""Difference of a float32 run's recorded value to the recomputed one, in nats or of u, beyond the last digits."""
_BEYOND = 0.001
"""Share of the tokens of a float32 run that may be beyond it: a token at the edge of top-p falls to either side."""
_ROUNDING = 2.0
"""Distance of two roundings over that of one to the exact value, at most: that of sums of two equal ones."""
_ERRORS = 5.0  # Standard errors by which a mean must exceed that: the larger of those over tokens and over images
_FLIPS = 5.0  # Tokens that rounding moves by a nat, of which a control may hold none by chance
_FEW = 8  # Images whose spread is no estimate: fewer
_SLACK = 0.001  # Difference of mean entropies, in nats, that is no verdict


class Rounding(NamedTuple):
    """What rounding does to values of the run's model and prompts, in M of the run's images."""

    free: np.ndarray  # [M, N] bool, slots that the grammar leaves free
    # values in the run's number format, of tokens drawn from p in it, each given the image's own before it
    drawn: Values
    exact: Values  # values of the same tokens in float32


def compare_recorded(
    recorded: Mapping[str, np.ndarray], values: Values, free: np.ndarray, rounding: Rounding | None
) -> dict[str, dict[str, object]]:
    """Distance of recorded values to those recomputed in the run's number format, and whether rounding explains it.

    Args:
        recorded: [K, N] by name of COMPARED, NaN where an image has none.
        free: [K, N] bool, slots that the grammar leaves free.
        rounding: of a run of fewer bits than float32.

    Returns:
        By printed name: mean distance `mean` (of entropy in fewer bits: recorded minus recomputed, out of which
        rounding averages; it tells another temperature), the share `beyond` 0.01, `differs`, and in fewer bits the mean
        distance that `rounding` makes and the number of `images` that are too far by themselves, else None.
    """
    found = {}
    for name in [name for name in COMPARED if name in recorded]:
        gap = _gap(recorded[name], _value(values, name), free)
        if rounding is None:
            mean, beyond = float(np.nanmean(gap)), _share_beyond(gap)
            held = {"mean": mean, "beyond": beyond, "rounding": None, "images": None, "differs": beyond > _BEYOND}
            found[COMPARED[name]] = held
            continue
        control = _gap(_value(rounding.drawn, name), _value(rounding.exact, name), rounding.free)
        if name == "entropy":
            signed = np.where(np.isnan(gap), np.nan, recorded[name] - values.entropy)
            moved = np.where(np.isnan(control), np.nan, rounding.drawn.entropy - rounding.exact.entropy)
            held = _against(signed, moved, _SLACK) | {"images": None}
        elif name in _JUDGED:
            slots = (~np.isnan(gap)).sum(1)
            images = int(_outliers(np.nansum(gap, 1), np.nanmean(control, 1).max(), slots).sum())
            held = _against(gap, control)
            held |= {"images": images, "differs": held["differs"] or images > 0}
        else:
            held = _against(gap, control) | {"images": None, "differs": False}
        found[COMPARED[name]] = held
    return found


def rounding_explains(impossible: np.ndarray, free: np.ndarray, rounding: Rounding) -> bool:
    """Whether rounding makes so many tokens [K, N] of probability 0, in each image and in all of them."""
    counts, slots = (impossible & free).sum(1), free.sum(1)
    lost, of = (~rounding.exact.possible & rounding.free).sum(1), rounding.free.sum(1)
    together = _outliers(counts.sum(), (lost.sum() + _FLIPS) / of.sum(), slots.sum())
    return not (together or _outliers(counts, (lost / of).max(), slots).any())


def _value(values: Values, name: str) -> np.ndarray:
    return {"logp": values.logp, "entropy": values.entropy, **values.u}[name]


def _gap(one: np.ndarray, other: np.ndarray, free: np.ndarray) -> np.ndarray:
    """[K, N] distances of the values of `free` slots, at most 1, as where one p of the two is 0; NaN where a slot is
    not free or a value is missing."""
    with np.errstate(invalid="ignore"):
        gap = np.where(one == other, 0.0, np.abs(one - other))
    return np.where(free, np.minimum(gap, 1.0), np.nan)


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
    than such rounding, chance and `slack`.

    The chance is that of `control`: values which differ much in some images alone are no reason to allow for more.
    Where rounding moves few tokens, but far, as between ties under top-k 1, `control` may hold none of these: `_FLIPS`
    of them are allowed for on either side.
    """
    own, control = (held[~np.isnan(held).all(1)] for held in (own, control))
    mean, rounding = float(np.nanmean(own)), float(np.nanmean(control))
    tokens = [int((~np.isnan(held)).sum()) for held in (own, control)]
    spread = np.nanvar(control) / tokens[1]
    if len(control) >= _FEW:
        spread = max(spread, np.nanmean(control, 1).var() / len(control))
    error = _ROUNDING * math.sqrt(spread * (1 + len(control) / len(own)))
    unseen = 2 * _ROUNDING * _FLIPS / min(tokens)
    differs = abs(mean) > _ROUNDING * abs(rounding) + _ERRORS * error + unseen + slack
    return {"mean": mean, "beyond": _share_beyond(own), "rounding": rounding, "differs": bool(differs)}
