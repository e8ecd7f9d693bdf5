"""Every derived number, one function each. The first paragraph of a docstring is the definition printed under
tables.

`rows` is a DataFrame of stored sample rows with status "ok" (see `specbench.records.SAMPLES`). A number that
the rows cannot give is None, never 0. Token statistics look at free slots only: where the grammar forced a
token nothing was chosen.
"""

from __future__ import annotations

import math
from collections.abc import Hashable, Sequence
from dataclasses import dataclass

import numpy as np
import pandas as pd

BOOTSTRAP_RESAMPLES = 2000
_Z95 = 1.959963984540054


@dataclass(frozen=True)
class Estimate:
    """A value with its 95 % interval; `low` and `high` are None where n does not allow one."""

    value: float
    low: float | None
    high: float | None


def nfe(rows: pd.DataFrame) -> float | None:
    """NFE: target forwards per image after prefill, mean over images; a guidance pair counts once."""
    return _mean(rows["nfe"])


def step_compression(rows: pd.DataFrame) -> float | None:
    """Step compression: stream tokens over target forwards, both summed over all images (a ratio of
    totals)."""
    return _ratio(_token_counts(rows).sum(), rows["nfe"].sum())


def latency_ms(rows: pd.DataFrame) -> float | None:
    """Latency: milliseconds per image from the start of prefill to the last token, mean over images decoded
    one at a time."""
    return _mean(rows["ar_ms"])


def latency_e2e_ms(rows: pd.DataFrame) -> float | None:
    """End-to-end latency: latency plus prompt encoding and rendering of pixels."""
    return _mean(rows["e2e_ms"])


def step_ms(rows: pd.DataFrame) -> float | None:
    """Step: latency over target forwards, milliseconds, a ratio of totals."""
    return _ratio(rows["ar_ms"].sum(min_count=1), rows["nfe"].sum())


def throughput(rows: pd.DataFrame) -> float | None:
    """Throughput: images per second, from the spans of the batches the images were decoded in."""
    spans = [name for name in rows.columns if name.endswith("_ms") and name not in ("ar_ms", "e2e_ms")]
    seconds = (rows[spans].sum(axis=1) / rows["batch"]).sum() / 1e3
    return _ratio(len(rows), seconds)


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
    """

    total: Estimate
    steps: float
    window_cost: float
    overhead: float
    end_to_end: float | None
    pairs: int


def paired(rows: pd.DataFrame, baseline: pd.DataFrame) -> pd.DataFrame:
    """The images both runs hold, matched by (prompt id, sample); the baseline's columns end in `_base`."""
    columns = ["prompt_id", "sample", "nfe", "target_ms", "ar_ms", "e2e_ms"]
    return rows[columns].merge(baseline[columns], on=["prompt_id", "sample"], suffixes=("", "_base"))


def speed_up(rows: pd.DataFrame, baseline: pd.DataFrame) -> SpeedUp | None:
    """The speed-up of `rows` over the AR rows `baseline` with its factors, or None without timed pairs."""
    pairs = paired(rows, baseline)
    timed = pairs.dropna(subset=["ar_ms", "ar_ms_base"])
    if timed.empty or not (timed[["target_ms", "target_ms_base"]].sum() > 0).all():
        return None
    return SpeedUp(
        speedup(timed), step_ratio(timed), window_cost(timed), overhead(timed),
        _ratio(timed["e2e_ms_base"].sum(), timed["e2e_ms"].sum()), len(timed),
    )  # fmt: skip


def speedup(pairs: pd.DataFrame) -> Estimate:
    """Speed-up: AR's latency over this run's, each summed over the same images (a ratio of totals); the
    interval is a 95 % bootstrap over prompts.

    Equal to step compression / (window cost x overhead), over the paired images.
    """
    return ratio_of_totals(pairs["ar_ms_base"], pairs["ar_ms"], pairs["prompt_id"])


def step_ratio(pairs: pd.DataFrame) -> float:
    """Steps: AR's target forwards over this run's, summed over the same images; step compression relative to
    AR's."""
    return float(pairs["nfe_base"].sum() / pairs["nfe"].sum())


def window_cost(pairs: pd.DataFrame) -> float:
    """Window cost: time of this run's target forward (a whole window) over the time of AR's (one token), on
    the machine that ran both."""
    mine = pairs["target_ms"].sum() / pairs["nfe"].sum()
    return float(mine / (pairs["target_ms_base"].sum() / pairs["nfe_base"].sum()))


def overhead(pairs: pd.DataFrame) -> float:
    """Overhead: step time over target-forward time (prefill, drafting and verification come on top), relative
    to the same ratio of AR."""
    mine = pairs["ar_ms"].sum() / pairs["target_ms"].sum()
    return float(mine / (pairs["ar_ms_base"].sum() / pairs["target_ms_base"].sum()))


def ratio_of_totals(numerator: pd.Series, denominator: pd.Series, cluster: pd.Series, seed: int = 0) -> Estimate:
    """Sum over sum with a percentile bootstrap interval that resamples whole clusters; none from fewer than
    two."""
    totals = pd.DataFrame({"top": numerator, "bottom": denominator}).groupby(cluster.to_numpy()).sum().to_numpy()
    value = float(totals[:, 0].sum() / totals[:, 1].sum())
    if len(totals) < 2:
        return Estimate(value, None, None)
    draw = np.random.default_rng(seed)
    ratios, at_once = [], max(1, 10**6 // len(totals))
    for start in range(0, BOOTSTRAP_RESAMPLES, at_once):
        size = (min(at_once, BOOTSTRAP_RESAMPLES - start), len(totals))
        sums = totals[draw.integers(0, len(totals), size)].sum(axis=1)
        ratios.extend(sums[:, 0] / sums[:, 1])
    low, high = np.percentile(ratios, [2.5, 97.5])
    return Estimate(value, float(low), float(high))


@dataclass(frozen=True)
class TokenStats:
    """Statistics of the free tokens' probabilities under the target distribution, in nats.

    Attributes:
        logp_mean, logp_std, perplexity, nll_gap: see the functions of these names.
        nll_gap_se: standard error of the gap, images being independent; None for one image.
        zero_probability: tokens that the target distribution gives probability 0; with any, the means are
        infinite.
    """

    logp_mean: float
    logp_std: float | None
    perplexity: float
    nll_gap: float
    nll_gap_se: float | None
    zero_probability: int


def token_stats(rows: pd.DataFrame) -> TokenStats | None:
    """All token statistics at once, or None without free tokens."""
    logp, entropy, image = _free_tokens(rows)
    if not len(logp):
        return None
    error, standard_error = nll_gap(logp, entropy, image)
    return TokenStats(
        logp_mean(logp), logp_std(logp), perplexity(logp), error, standard_error, int(np.isneginf(logp).sum())
    )


def logp_mean(logp: np.ndarray) -> float:
    """Log p: mean natural log of the committed tokens' probability under the target distribution, over all
    free tokens."""
    return float(logp.mean())


def logp_std(logp: np.ndarray) -> float | None:
    """Std of log p: standard deviation over all free tokens."""
    return float(logp.std(ddof=1)) if len(logp) > 1 and np.isfinite(logp).all() else None


def perplexity(logp: np.ndarray) -> float:
    """Perplexity: exp of minus the mean log p."""
    return float(np.exp(-logp.mean()))


def nll_gap(logp: np.ndarray, entropy: np.ndarray, image: np.ndarray) -> tuple[float, float | None]:
    """NLL - H gap: mean of -log p minus the mean entropy of the distributions the tokens were drawn from, in
    nats per token, with its standard error over images; 0 within its error for an exact sampler (a zero gap
    proves nothing, a gap proves bias)."""
    difference = -logp.astype(np.float64) - entropy
    mean = float(difference.mean())
    if not math.isfinite(mean):
        return math.inf, None
    per_image = pd.DataFrame({"sum": difference - mean}).groupby(image).sum()["sum"].to_numpy()
    n = len(per_image)
    if n < 2:
        return mean, None
    return mean, float(math.sqrt(n / (n - 1) * (per_image**2).sum()) / len(logp))


def acceptance(rows: pd.DataFrame) -> float | None:
    """Acceptance: draft tokens accepted over draft tokens the left-to-right scan reached, summed over all
    images, free slots only."""
    return _ratio(_offset_totals(rows["accepted"]).sum(), _offset_totals(rows["tested"]).sum())


def acceptance_by_offset(rows: pd.DataFrame) -> list[float | None]:
    """Acceptance by offset: the same for each place of the window, counted from its first draft."""
    accepted, tested = _offset_totals(rows["accepted"]), _offset_totals(rows["tested"])
    return [_ratio(yes, all_) for yes, all_ in zip(accepted, tested, strict=True)]


def top1(rows: pd.DataFrame) -> float | None:
    """Top-1 of p: largest probability of the target distribution, mean over free tokens."""
    return _mean(_slots(rows["top1"])[~_slots(rows["forced"]).astype(bool)])


def draft_tv(rows: pd.DataFrame) -> float | None:
    """TV(p, q): total variation between the target distribution and the law that the draft tested against it was drawn
    from, mean over the tested drafts of images decoded with --trace."""
    return _mean(_slots(rows["draft_tv"]))


def draft_top1(rows: pd.DataFrame) -> float | None:
    """Top-1 of q: largest probability of the law that a tested draft was drawn from, mean as TV(p, q)."""
    return _mean(_slots(rows["draft_top1"]))


def draft_tv_by_offset(rows: pd.DataFrame) -> list[float | None]:
    """TV(p, q) by offset: the same for each place of the window, counted from its first draft."""
    by_offset = _slots(rows["draft_tv"]).groupby(_slots(rows["committed_step"].map(_offsets)))
    return [_mean(values) for _, values in by_offset]


def mean_interval(values: Sequence[float], clusters: Sequence[Hashable]) -> Estimate:
    """Mean with its 95 % interval: normal, from the spread between clusters; none from fewer than two
    clusters."""
    values = np.asarray(values, dtype=np.float64)
    mean, variance = _clustered(values, clusters)
    if variance is None:
        return Estimate(mean, None, None)
    half = _Z95 * math.sqrt(variance)
    return Estimate(mean, mean - half, mean + half)


def proportion_interval(values: Sequence[float], clusters: Sequence[Hashable]) -> Estimate:
    """Share of ones with its 95 % Wilson interval; images of one prompt count as less than independent ones,
    by the spread between prompts."""
    values = np.asarray(values, dtype=np.float64)
    share, variance = _clustered(values, clusters)
    if variance is None:
        return Estimate(share, None, None)
    n = min(float(len(values)), share * (1 - share) / variance) if variance > 0 else float(len(set(clusters)))
    centre = (share + _Z95**2 / (2 * n)) / (1 + _Z95**2 / n)
    half = _Z95 / (1 + _Z95**2 / n) * math.sqrt(share * (1 - share) / n + _Z95**2 / (4 * n * n))
    return Estimate(share, min(share, centre - half), max(share, centre + half))


def mean_of_estimates(parts: Sequence[Estimate]) -> Estimate:
    """Unweighted mean of independent estimates; its interval combines theirs (the MOVER rule)."""
    value = float(np.mean([part.value for part in parts]))
    if any(part.low is None for part in parts):
        return Estimate(value, None, None)
    below = math.sqrt(sum((part.value - part.low) ** 2 for part in parts)) / len(parts)
    above = math.sqrt(sum((part.high - part.value) ** 2 for part in parts)) / len(parts)
    return Estimate(value, value - below, value + above)


def _clustered(values: np.ndarray, clusters: Sequence[Hashable]) -> tuple[float, float | None]:
    """Mean, and its variance with whole clusters as the independent units (None for a single one)."""
    mean = float(values.mean())
    sums = pd.Series(values - mean).groupby(np.asarray(clusters, dtype=object)).sum().to_numpy()
    n = len(sums)
    return mean, None if n < 2 else float(n / (n - 1) * (sums**2).sum() / len(values) ** 2)


def _free_tokens(rows: pd.DataFrame) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """log p and entropy of every free token, and the number of the image it belongs to."""
    if rows.empty:
        return np.empty(0), np.empty(0), np.empty(0)
    free = ~np.concatenate(rows["forced"].to_list()).astype(bool)
    image = np.repeat(np.arange(len(rows)), [len(tokens) for tokens in rows["forced"]])
    logp = np.concatenate(rows["logp"].to_list()).astype(np.float64)
    entropy = np.concatenate(rows["entropy"].to_list()).astype(np.float64)
    return logp[free], entropy[free], image[free]


def _token_counts(rows: pd.DataFrame) -> np.ndarray:
    return np.array([len(tokens) for tokens in rows["forced"]], dtype=np.int64)


def _slots(column: pd.Series) -> pd.Series:
    """One value per token from one list per image."""
    return column.explode(ignore_index=True).infer_objects()


def _offsets(step: np.ndarray) -> np.ndarray:
    """Place of each slot [N] in the window of the `step` that committed it."""
    starts = np.flatnonzero(np.diff(step, prepend=0))
    return np.arange(len(step)) - np.repeat(starts, np.diff(starts, append=len(step)))


def _offset_totals(counts: pd.Series) -> np.ndarray:
    width = max((len(row) for row in counts), default=0)
    totals = np.zeros(width, dtype=np.int64)
    for row in counts:
        totals[: len(row)] += np.asarray(row, dtype=np.int64)
    return totals


def _mean(values: pd.Series) -> float | None:
    mean = values.mean()
    return None if pd.isna(mean) else float(mean)


def _ratio(top: float, bottom: float) -> float | None:
    return None if pd.isna(top) or pd.isna(bottom) or not bottom else float(top / bottom)
