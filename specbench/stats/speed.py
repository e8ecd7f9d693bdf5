"""Speed of a run, speed-up over another run on the same images, and roofline ratio: measured decode time relative to
the device's lower bound."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import pandas as pd

from specbench.decoding.generation import SPANS
from specbench.models.network_sizes import Size
from specbench.stats.intervals import (
    Estimate,
    difference_to_show,
    mean_interval,
    quantile_interval,
    ratio_of_totals,
    speed_difference,
    without_few,
)
from specbench.stats.numbers import define
from specbench.store.schema import AR_SPANS

STALL = 3.0  # An image stalled if its time per target forward is more than this multiple of the median


@define("NFE: target forwards per image after prefill, mean over images; a conditional and unconditional pair counts "
        "once.", "forwards", "lower", per_image=lambda rows: rows["nfe"])  # fmt: skip
def nfe(rows: pd.DataFrame) -> float | None:
    return mean(rows["nfe"])


@define("Tokens per step: stream tokens over target forwards, both summed over all images (a ratio of totals).",
        "tokens", "higher", ratio=("stream_tokens", "nfe"))  # fmt: skip
def tokens_per_step(rows: pd.DataFrame) -> float | None:
    return ratio_or_none(rows["stream_tokens"].sum(), rows["nfe"].sum())


@define("Latency: milliseconds per image from the start of prefill to the last token, mean over images decoded one at "
        "a time.", "ms", "lower", per_image=lambda rows: rows["latency_ms"])  # fmt: skip
def latency_ms(rows: pd.DataFrame) -> float | None:
    return mean(rows["latency_ms"])


def stalled(rows: pd.DataFrame) -> pd.DataFrame:
    """Select the images whose time per target forward exceeds `STALL` times the run's median; none below 3 images."""
    pace = rows["latency_ms"].astype("float64") / rows["nfe"]
    return rows[pace > STALL * pace.median()] if pace.notna().sum() >= 3 else rows.iloc[:0]


@define("End-to-end latency: latency plus prompt encoding and rendering of pixels.",
        "ms", "lower", per_image=lambda rows: rows["latency_e2e_ms"])  # fmt: skip
def latency_e2e_ms(rows: pd.DataFrame) -> float | None:
    return mean(rows["latency_e2e_ms"])


@define("Step compression: stream tokens over target forwards of each image, mean over images, as defined by SJD and "
        "SJD++; if all images have the same number of tokens, never below the tokens per step.",
        "tokens", "higher", per_image=lambda rows: rows["stream_tokens"] / rows["nfe"])  # fmt: skip
def step_compression(rows: pd.DataFrame) -> float | None:
    return mean(rows["stream_tokens"] / rows["nfe"])


@define("Step: latency over target forwards, milliseconds, a ratio of totals.",
        "ms", "lower", ratio=("latency_ms", "nfe"))  # fmt: skip
def step_ms(rows: pd.DataFrame) -> float | None:
    rows = rows.dropna(subset=["latency_ms"])
    return ratio_or_none(rows["latency_ms"].sum(min_count=1), rows["nfe"].sum())


@define("Throughput: images per second, from the decoding time of each batch.", "images/s", "higher", of="batches")
def throughput(rows: pd.DataFrame) -> float | None:
    rows = with_times(rows)
    seconds = (rows[[f"{span}_ms" for span in SPANS]].sum(axis=1) / rows["batch"]).sum() / 1e3
    return ratio_or_none(len(rows), seconds)


@define("Tokens per second: stream tokens over the time of the images from prefill to the last token (batch time over "
        "batch size), both summed over all images.", "tokens/s", "higher")  # fmt: skip
def tokens_per_second(rows: pd.DataFrame) -> float | None:
    rows = with_times(rows)
    times = rows[[f"{span}_ms" for span in AR_SPANS]].sum(axis=1) / rows["batch"]
    return ratio_or_none(1e3 * rows["stream_tokens"].sum(), times.sum())


@define("Images per hour: 3,600 s over the mean time per image (batch time over batch size), including prompt encoding "
        "and rendering.", "images/h", "higher", of="batches")  # fmt: skip
def images_per_hour(rows: pd.DataFrame) -> float | None:
    pace = throughput(rows)
    return pace and 3600 * pace


@dataclass(frozen=True)
class SpeedUp:
    """A paired speed-up and its factors: `total.value == steps / (window_cost * overhead)` exactly."""

    # total, steps, window_cost, overhead: see `speedup`, `step_ratio`, `window_cost`, `overhead`
    total: Estimate
    steps: float | None
    window_cost: float
    overhead: float
    end_to_end: float | None  # speed-up of the end-to-end latency
    pairs: int  # images that both runs decoded
    prompts: int  # prompts of these images, which are the independent units of the interval
    p: float | None  # p-value of `specbench.stats.speed_difference`; None below `FEW_UNITS` prompts
    equal_forwards: float  # see `equal_forwards`


def paired(rows: pd.DataFrame, baseline: pd.DataFrame) -> pd.DataFrame:
    """Join two runs on (prompt id, sample); the baseline's columns end in `_base`."""
    key, columns = ["prompt_id", "sample"], ["nfe", "target_ms", "latency_ms", "latency_e2e_ms"]
    theirs = baseline[[*key, *columns]].set_axis([*key, *(f"{name}_base" for name in columns)], axis=1)
    return rows[[*key, *columns]].merge(theirs, on=key)


def speed_up(rows: pd.DataFrame, baseline: pd.DataFrame) -> SpeedUp | None:
    """Compute the speed-up of `rows` over the AR rows `baseline`, and its factors, if there are timed pairs."""
    timed = paired(rows, baseline).dropna(subset=["latency_ms", "latency_ms_base"])
    if timed.empty or not (timed[["target_ms", "target_ms_base"]].sum() > 0).all():
        return None
    return SpeedUp(
        speedup(timed), step_ratio(timed), window_cost(timed), overhead(timed), speedup_e2e(timed),
        len(timed), timed["prompt_id"].nunique(), difference_to_show(speed_difference(timed)).p, equal_forwards(timed),
    )  # fmt: skip


@define("Speed-up: latency of AR over latency of this run, each summed over the same images (a ratio of totals), with "
        "a 95 % bootstrap interval over prompts (percentiles widened for few prompts, no interval below eight).",
        better="higher", of="pairs", bounded=True)  # fmt: skip
def speedup(pairs: pd.DataFrame) -> Estimate:
    # equal to tokens per step / (window cost x overhead), over the paired images
    return ratio_of_totals(pairs["latency_ms_base"], pairs["latency_ms"], pairs["prompt_id"])


@define("End-to-end speed-up: as speed-up, but with end-to-end latencies.", better="higher", of="pairs")
def speedup_e2e(pairs: pd.DataFrame) -> float | None:
    return ratio_or_none(pairs["latency_e2e_ms_base"].sum(), pairs["latency_e2e_ms"].sum())


@define("Steps saved: target forwards of AR over target forwards of this run, summed over the same images; tokens per "
        "step relative to AR.", better="higher", of="pairs")  # fmt: skip
def step_ratio(pairs: pd.DataFrame) -> float | None:
    return ratio_or_none(pairs["nfe_base"].sum(skipna=False), pairs["nfe"].sum(skipna=False))


@define("Window cost: time of a target forward of this run (a window of tokens) over the time of an AR forward (one "
        "token), on the same machine.", of="pairs")  # fmt: skip
def window_cost(pairs: pd.DataFrame) -> float:
    mine = pairs["target_ms"].sum() / pairs["nfe"].sum()
    return float(mine / (pairs["target_ms_base"].sum() / pairs["nfe_base"].sum()))


@define("Overhead: step time (including prefill, drafting, verification and the work of the host between them) over "
        "target-forward time, relative to the same ratio of AR.", of="pairs")  # fmt: skip
def overhead(pairs: pd.DataFrame) -> float:
    mine = pairs["latency_ms"].sum() / pairs["target_ms"].sum()
    return float(mine / (pairs["latency_ms_base"].sum() / pairs["target_ms_base"].sum()))


def equal_forwards(pairs: pd.DataFrame) -> float:
    """Compute the speed-up if each target forward took as long as AR's, and all other times were as measured. It is
    not steps / overhead, because the overhead is relative to the time of the forwards."""
    forwards = pairs["nfe"].sum() * pairs["target_ms_base"].sum() / pairs["nfe_base"].sum()
    others = pairs["latency_ms"].sum() - pairs["target_ms"].sum()
    return float(pairs["latency_ms_base"].sum() / (forwards + others))


@define("Roofline ratio: time of the decode loop over the roofline time of the same target forwards, both summed over "
        "images. If it is below 1, the device's measured peaks are too low, and reports leave it out. The roofline "
        "time is the larger of two times: bytes read over memory bandwidth, and FLOPs of matrix products over peak "
        "FLOP/s. A forward reads the weights once, and the KV cache of the image tokens once per row.",
        better="lower", of="other")  # fmt: skip
def roofline_ratio(rows: pd.DataFrame, floor: Mapping[str, Any] | None) -> float | None:
    """`floor`: inputs stored with the run, see `specbench.runs.preparation`. The bound is slightly too low, because it
    excludes the prompt's KV cache, tree branches, all work outside the target, and all writes."""
    if floor is None or (rows := with_times(rows)).empty:
        return None
    loop = rows[["draft_ms", "target_ms", "verify_ms", "host_ms"]].sum(axis=1) / rows["batch"]
    return ratio_or_none(loop.sum(), floor_ms(rows, floor).sum())


def floor_ms(rows: pd.DataFrame, floor: Mapping[str, Any]) -> pd.Series:
    """Return the roofline time in milliseconds per image, see `roofline_ratio`."""
    size, rows_per_image = Size(**floor["size"]), floor["rows_per_image"]
    nfe = rows["nfe"]
    visible = nfe * rows["stream_tokens"] - rows["committed_step_sum"] + nfe
    columns = (nfe + rows["drafted_sum"]).clip(lower=rows["stream_tokens"])
    read = size.read(nfe / rows["batch"], rows_per_image, visible, floor["itemsize"])
    read_ms = read / floor["bytes_per_s"] * 1e3
    computed_ms = size.operations(columns, rows_per_image, visible * columns / nfe) / floor["flops"] * 1e3
    return pd.concat([read_ms, computed_ms], axis=1).max(axis=1)


@define("Latency p50: median latency over images, milliseconds, with its distribution-free 95 % interval; far below "
        "the mean if an image stalled.", "ms", "lower", bounded=True)  # fmt: skip
def latency_p50_ms(rows: pd.DataFrame) -> Estimate | None:
    return quantile_interval(rows["latency_ms"], rows["prompt_id"], 0.5)


@define("Latency p95: the latency that 95 % of the images do not exceed, milliseconds, with its distribution-free 95 % "
        "interval (omitted if the images are too few for an upper bound).", "ms", "lower", bounded=True)  # fmt: skip
def latency_p95_ms(rows: pd.DataFrame) -> Estimate | None:
    return quantile_interval(rows["latency_ms"], rows["prompt_id"], 0.95)


@define("Tokens per step p50: median over images of the image's tokens per step, with its distribution-free 95 % "
        "interval.", "tokens", "higher", bounded=True)  # fmt: skip
def tokens_per_step_p50(rows: pd.DataFrame) -> Estimate | None:
    return quantile_interval(rows["stream_tokens"] / rows["nfe"], rows["prompt_id"], 0.5)


@define("Tokens per step p95: tokens per step that 95 % of the images reach, with its distribution-free 95 % interval.",
        "tokens", "higher", bounded=True)  # fmt: skip
def tokens_per_step_p95(rows: pd.DataFrame) -> Estimate | None:
    return quantile_interval(rows["stream_tokens"] / rows["nfe"], rows["prompt_id"], 0.05)


@define("Slowest category: category of prompts with the largest mean latency, milliseconds, and its 95 % interval over "
        "prompts; it was selected as the largest, so the same category of another run may be faster.",
        "ms", of="other")  # fmt: skip
def slowest_category(rows: pd.DataFrame) -> tuple[str, Estimate] | None:
    return _least_favourable(rows, rows["latency_ms"], 1)


@define("Slowest category by tokens per step: the category with the fewest tokens per step, mean over images, and its "
        "95 % interval over prompts; selected for this, so the same category of another run may have more.",
        "tokens", of="other")  # fmt: skip
def fewest_tokens_category(rows: pd.DataFrame) -> tuple[str, Estimate] | None:
    return _least_favourable(rows, rows["stream_tokens"] / rows["nfe"], -1)


def _least_favourable(rows: pd.DataFrame, values: pd.Series, sign: int) -> tuple[str, Estimate] | None:
    """Return the category with the largest mean of `sign` times `values`; None for less than two categories."""
    if "category" not in rows or (means := values.groupby(rows["category"]).mean().dropna()).size < 2:
        return None
    name = (sign * means).idxmax()
    worst = values[rows["category"] == name].dropna()
    prompts = rows.loc[worst.index, "prompt_id"]
    return str(name), without_few(mean_interval(worst, prompts), prompts.nunique())


def with_times(rows: pd.DataFrame) -> pd.DataFrame:
    """Select the rows with times. Images that were decoded with other library versions than most have no times."""
    return rows.dropna(subset=["target_ms"])


def mean(values: pd.Series) -> float | None:
    """Return the mean of the non-missing values, if any."""
    value = values.mean()
    return None if pd.isna(value) else float(value)


def ratio_or_none(top: float, bottom: float) -> float | None:
    """Return the quotient; None for a missing value or a `bottom` of 0."""
    return None if pd.isna(top) or pd.isna(bottom) or not bottom else float(top / bottom)
