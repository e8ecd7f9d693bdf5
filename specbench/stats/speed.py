"""Speed of a run, and speed-up over another run on the same images."""

from __future__ import annotations

from dataclasses import dataclass

import pandas as pd

from specbench.stats.intervals import Estimate, ratio_of_totals
from specbench.stats.ratios import mean, ratio_or_none

STALL = 3.0
"""Time per target forward over its median above which an image stalled."""


def nfe(rows: pd.DataFrame) -> float | None:
    """NFE: target forwards per image after prefill, mean over images; a conditional and unconditional pair counts
    once."""
    return mean(rows["nfe"])


def step_compression(rows: pd.DataFrame) -> float | None:
    """Step compression: stream tokens over target forwards, both summed over all images (a ratio of
    totals)."""
    return ratio_or_none(rows["stream_tokens"].sum(), rows["nfe"].sum())


def latency_ms(rows: pd.DataFrame) -> float | None:
    """Latency: milliseconds per image from the start of prefill to the last token, mean over images decoded
    one at a time."""
    return mean(rows["ar_ms"])


def latency_median_ms(rows: pd.DataFrame) -> float | None:
    """Median latency: median over images of the latency; far below the mean where an image stalled."""
    found = rows["ar_ms"].median()
    return None if pd.isna(found) else float(found)


def stalled(rows: pd.DataFrame) -> pd.DataFrame:
    """Images whose time per target forward exceeds `STALL` times the median of the run; of at least 3 images."""
    pace = rows["ar_ms"].astype("float64") / rows["nfe"]
    return rows[pace > STALL * pace.median()] if pace.notna().sum() >= 3 else rows.iloc[:0]


def latency_e2e_ms(rows: pd.DataFrame) -> float | None:
    """End-to-end latency: latency plus prompt encoding and rendering of pixels."""
    return mean(rows["e2e_ms"])


def step_ms(rows: pd.DataFrame) -> float | None:
    """Step: latency over target forwards, milliseconds, a ratio of totals."""
    return ratio_or_none(rows["ar_ms"].sum(min_count=1), rows["nfe"].sum())


def throughput(rows: pd.DataFrame) -> float | None:
    """Throughput: images per second, from the spans of the batches the images were decoded in."""
    spans = [name for name in rows.columns if name.endswith("_ms") and name not in ("ar_ms", "e2e_ms")]
    seconds = (rows[spans].sum(axis=1) / rows["batch"]).sum() / 1e3
    return ratio_or_none(len(rows), seconds)


def images_per_hour(rows: pd.DataFrame) -> float | None:
    """Images per hour: 3,600 s over the mean time per image (batch time over batch size), including prompt encoding and
    rendering."""
    pace = throughput(rows)
    return pace and 3600 * pace


@dataclass(frozen=True)
class SpeedUp:
    """A paired speed-up and its factors: `total.value == steps / (window_cost * overhead)` exactly.

    Attributes:
        total: see `speedup`.
        steps: see `step_ratio`.
        window_cost: see `window_cost`.
        overhead: see `overhead`.
        end_to_end: the same ratio for the end-to-end latency.
        pairs: images that both runs decoded.
        prompts: the prompts of these images, the independent units of the interval.
    """

    total: Estimate
    steps: float
    window_cost: float
    overhead: float
    end_to_end: float | None
    pairs: int
    prompts: int


def paired(rows: pd.DataFrame, baseline: pd.DataFrame) -> pd.DataFrame:
    """Join two runs on (prompt id, sample); the baseline's columns end in `_base`."""
    key, columns = ["prompt_id", "sample"], ["nfe", "target_ms", "ar_ms", "e2e_ms"]
    theirs = baseline[[*key, *columns]].set_axis([*key, *(f"{name}_base" for name in columns)], axis=1)
    return rows[[*key, *columns]].merge(theirs, on=key)


def speed_up(rows: pd.DataFrame, baseline: pd.DataFrame) -> SpeedUp | None:
    """Compute the speed-up of `rows` over the AR rows `baseline` and its factors; None without timed pairs."""
    pairs = paired(rows, baseline)
    timed = pairs.dropna(subset=["ar_ms", "ar_ms_base"])
    if timed.empty or not (timed[["target_ms", "target_ms_base"]].sum() > 0).all():
        return None
    return SpeedUp(
        speedup(timed), step_ratio(timed), window_cost(timed), overhead(timed),
        ratio_or_none(timed["e2e_ms_base"].sum(), timed["e2e_ms"].sum()), len(timed), timed["prompt_id"].nunique(),
    )  # fmt: skip


def speedup(pairs: pd.DataFrame) -> Estimate:
    """Speed-up: latency of AR over latency of this run, each summed over the same images (a ratio of totals), with a
    95 % bootstrap interval over prompts (none below eight prompts).

    Equal to step compression / (window cost x overhead), over the paired images.
    """
    return ratio_of_totals(pairs["ar_ms_base"], pairs["ar_ms"], pairs["prompt_id"])


def step_ratio(pairs: pd.DataFrame) -> float:
    """Steps: target forwards of AR over those of this run, summed over the same images; step compression relative to
    AR."""
    return float(pairs["nfe_base"].sum() / pairs["nfe"].sum())


def window_cost(pairs: pd.DataFrame) -> float:
    """Window cost: time of a target forward of this run (a window of tokens) over that of AR (one token), on the same
    machine."""
    mine = pairs["target_ms"].sum() / pairs["nfe"].sum()
    return float(mine / (pairs["target_ms_base"].sum() / pairs["nfe_base"].sum()))


def overhead(pairs: pd.DataFrame) -> float:
    """Overhead: step time (including prefill, drafting, verification) over target-forward time, relative to the same
    ratio of AR."""
    mine = pairs["ar_ms"].sum() / pairs["target_ms"].sum()
    return float(mine / (pairs["ar_ms_base"].sum() / pairs["target_ms_base"].sum()))
