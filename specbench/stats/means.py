"""Means over images, tokens or rounds as ratios of two totals: their intervals, and paired differences of runs.

Prompts are the independent units. Standard errors are those of the linearised ratio; intervals use Student's t.
"""

import math
from typing import Any

import numpy as np
import pandas as pd

from specbench.stats import drafts, speed, tokens
from specbench.stats.intervals import Difference, Estimate, mean_difference
from specbench.stats.numbers import Number

_KEY = ["prompt_id", "sample"]
_VALUES = [value for module in (speed, tokens, drafts) for value in vars(module).values()]
_DECLARED = [value for value in _VALUES if isinstance(value, Number) and value.of != "other"]
NUMBERS: dict[str, Number[..., Any]] = {number.name: number for number in _DECLARED}
RUN_NUMBERS = {name: number for name, number in NUMBERS.items() if number.of != "pairs"}
"""Numbers that are computed from the rows of the run alone."""
PAIR_NUMBERS = tuple(name for name, number in NUMBERS.items() if number.of == "pairs")
"""Names of the numbers of a run and an AR run."""
MEANS = (
    *(name for kind in ("per_image", "ratio", "totals") for name, of in RUN_NUMBERS.items() if getattr(of, kind)),
    "perplexity",
)
"""Numbers of a run with an `interval`, in the order of the key `intervals` of reports."""
_DOMAINS = {
    **{"logp_mean": (-math.inf, 0.0), "nll_gap": (-math.inf, math.inf)},
    **dict.fromkeys(("perplexity", "image_perplexity"), (1.0, math.inf)),
    **dict.fromkeys(("top1", "acceptance"), (0.0, 1.0)),
}
"""{mean: lowest and highest possible value}, which limit the bounds of its interval; other means are at least 0."""
TOKEN_MEANS = ("logp_mean", "entropy_mean")
"""Token statistics whose differences from AR form one family of tests. The test of log p also tests the perplexity."""


def interval(name: str, rows: pd.DataFrame) -> Estimate | None:
    """Compute one of `MEANS` with its 95 % interval; None if no image has it."""
    if name == "perplexity":
        if (logp := interval("logp_mean", rows)) is None:
            return None
        low, high = (None if x is None else float(np.exp(-x)) for x in (logp.high, logp.low))
        return Estimate(float(np.exp(-logp.value)), low, high)
    if (influences := _influences(name, rows)) is None:
        return None
    value, gaps = influences
    if not math.isfinite(value):
        return Estimate(value)
    mean = mean_difference(gaps, rows.loc[gaps.index, "prompt_id"], value)
    least, most = _DOMAINS.get(name, (0.0, math.inf))
    low, high = (None if bound is None else min(max(bound, least), most) for bound in (mean.low, mean.high))
    return Estimate(mean.value, low, high)


def difference_from(name: str, rows: pd.DataFrame, baseline: pd.DataFrame) -> Difference | None:
    """Compute a difference in one of `MEANS`, run minus baseline, over common images; None if there are none."""
    common = rows[_KEY].merge(baseline[_KEY], on=_KEY)
    first, second = (_influences(name, common.merge(side, on=_KEY)) for side in (rows, baseline))
    if first is None or second is None:
        return None
    (mine, gaps), (theirs, others) = first, second
    if not (math.isfinite(mine) and math.isfinite(theirs)):
        return None
    both = (gaps - others).dropna()
    return mean_difference(both, common.loc[both.index, "prompt_id"], mine - theirs)


def _influences(name: str, rows: pd.DataFrame) -> tuple[float, pd.Series] | None:
    """Return the ratio of totals, and the influence of each image on the ratio."""
    top, bottom = (side.astype("float64") for side in RUN_NUMBERS[name].sides(rows))
    defined = top.notna() & bottom.notna()
    top, bottom = top[defined], bottom[defined]
    if not bottom.sum():
        return None
    value = float(top.sum() / bottom.sum())
    return value, (top - value * bottom) / bottom.mean()
