"""Means over images, tokens or rounds as ratios of two totals over images: intervals, and paired differences of runs.

Prompts are the independent units. Errors are those of the linearised ratio, with Student's t.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping

import numpy as np
import pandas as pd
import pyarrow as pa
import pyarrow.compute as pc

from specbench.stats.drafts import round_totals
from specbench.stats.intervals import Difference, Estimate, mean_difference
from specbench.stats.tokens import image_perplexities

_KEY = ["prompt_id", "sample"]
Totals = Callable[[pd.DataFrame], tuple[pd.Series, pd.Series]]


def _per_image(value: Callable[[pd.DataFrame], pd.Series]) -> Totals:
    return lambda rows: (value(rows), pd.Series(1.0, rows.index))


def _columns(top: str, bottom: str) -> Totals:
    return lambda rows: (rows[top], rows[bottom])


_TOTALS: Mapping[str, Totals] = {
    "nfe": _per_image(lambda rows: rows["nfe"]),
    "latency_ms": _per_image(lambda rows: rows["latency_ms"]),
    "latency_e2e_ms": _per_image(lambda rows: rows["latency_e2e_ms"]),
    "step_compression": _per_image(lambda rows: rows["stream_tokens"] / rows["nfe"]),
    "image_perplexity": _per_image(image_perplexities),
    "tokens_per_step": _columns("stream_tokens", "nfe"),
    "step_ms": _columns("latency_ms", "nfe"),
    "logp_mean": _columns("logp_sum", "free_tokens"),
    "entropy_mean": _columns("entropy_sum", "free_tokens"),
    "top1": _columns("top1_sum", "free_tokens"),
    "nll_gap": lambda rows: (-rows["logp_sum"] - rows["entropy_sum"], rows["free_tokens"]),
    "acceptance": lambda rows: (_sums(rows["accepted"]), _sums(rows["tested"])),
    "acceptance_length": round_totals,
}
MEANS = (*_TOTALS, "perplexity")  # Numbers of a run that `interval` knows
TOKEN_MEANS = ("logp_mean", "entropy_mean")
"""Token statistics whose differences from AR are tested together; the perplexity follows from the first."""


def interval(name: str, rows: pd.DataFrame) -> Estimate | None:
    """One of `MEANS` with its 95 % interval; None without images that have it."""
    if name == "perplexity":
        logp = interval("logp_mean", rows)
        if logp is None:
            return None
        return Estimate(*(None if mean is None else float(np.exp(-mean)) for mean in (logp.value, logp.high, logp.low)))
    influences = _influences(name, rows)
    if influences is None:
        return None
    value, gaps = influences
    if not math.isfinite(value):
        return Estimate(value)
    mean = mean_difference(gaps, rows.loc[gaps.index, "prompt_id"], value)
    return Estimate(mean.value, mean.low, mean.high)


def difference_from(name: str, rows: pd.DataFrame, baseline: pd.DataFrame) -> Difference | None:
    """One of `MEANS` of a run minus that of the baseline over the images that both have; None without any."""
    common = rows[_KEY].merge(baseline[_KEY], on=_KEY)
    sides = [_influences(name, common.merge(side, on=_KEY)) for side in (rows, baseline)]
    if None in sides:
        return None
    (mine, gaps), (theirs, others) = sides
    if not (math.isfinite(mine) and math.isfinite(theirs)):
        return None
    both = (gaps - others).dropna()
    return mean_difference(both, common.loc[both.index, "prompt_id"], mine - theirs)


def _influences(name: str, rows: pd.DataFrame) -> tuple[float, pd.Series] | None:
    """The ratio, and each image's influence on it."""
    top, bottom = (side.astype("float64") for side in _TOTALS[name](rows))
    defined = top.notna() & bottom.notna()
    top, bottom = top[defined], bottom[defined]
    if not bottom.sum():
        return None
    value = float(top.sum() / bottom.sum())
    return value, (top - value * bottom) / bottom.mean()


def _sums(lists: pd.Series) -> pd.Series:
    """Sum of each list of a column; missing where the list is."""
    column = pa.array(lists.array)
    column = column.combine_chunks() if isinstance(column, pa.ChunkedArray) else column
    sums = np.bincount(pc.list_parent_indices(column), pc.list_flatten(column), len(column))
    return pd.Series(np.where(column.is_null(), np.nan, sums), lists.index)
