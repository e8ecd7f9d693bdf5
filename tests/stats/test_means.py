"""Intervals of means that are ratios of totals, and their paired differences."""

import math

import numpy as np
import pandas as pd
import pyarrow as pa
import pytest

from specbench import stats
from specbench.stats import drafts


def lists(values: list) -> pd.Series:
    return pd.Series(pd.arrays.ArrowExtensionArray(pa.array(values)))


def images(seed: int = 0, prompts: int = 32, shift: float = 0.0) -> pd.DataFrame:
    """Two images per prompt, whose mean log p varies from prompt to prompt by 1.0 and from run to run by 0.1."""
    free = np.random.default_rng(1).integers(200, 260, 2 * prompts).astype(float)
    level = np.repeat(np.random.default_rng(2).normal(-1.0, 1.0, prompts), 2)
    noise = np.random.default_rng(seed).normal(shift, 0.1, 2 * prompts)
    counts = lists([[1, 2], [3]] * prompts)
    return pd.DataFrame({
        "prompt_id": [f"p{n // 2}" for n in range(2 * prompts)], "sample": [n % 2 for n in range(2 * prompts)],
        "free_tokens": free, "logp_sum": free * (level + noise), "entropy_sum": free * 2.0, "nfe": 100.0,
        "stream_tokens": 256, "latency_ms": np.nan, "accepted": counts, "tested": counts,
    })  # fmt: skip


def test_a_mean_over_tokens_has_the_interval_of_the_bootstrap():
    rows = images()
    mean = stats.interval("logp_mean", rows)
    bootstrap = stats.ratio_of_totals(rows["logp_sum"], rows["free_tokens"], rows["prompt_id"])
    expected = (bootstrap.value, bootstrap.low, bootstrap.high)
    assert (mean.value, mean.low, mean.high) == pytest.approx(expected, abs=0.02)
    pooled = stats.interval("perplexity", rows)
    assert (pooled.low, pooled.high) == pytest.approx((math.exp(-mean.high), math.exp(-mean.low)))
    assert pooled.value == pytest.approx(stats.perplexity(rows))


def test_runs_of_one_distribution_differ_far_less_than_their_intervals_are_wide_and_a_shift_is_found():
    ar, same, shifted = images(0), images(1), images(1, shift=-0.2)
    wide, gap = stats.interval("logp_mean", ar), stats.difference_from("logp_mean", same, ar)
    assert gap.low < 0 < gap.high and gap.high - gap.low < 0.2 * (wide.high - wide.low) and gap.prompts == 32
    assert stats.difference_from("logp_mean", shifted, ar).p < 1e-3
    backwards = stats.difference_from("logp_mean", shifted.iloc[::-1].iloc[:40], ar)
    assert backwards.value == pytest.approx(-0.2, abs=0.06) and backwards.prompts == 20


def test_what_is_not_known_has_no_interval():
    rows = images()
    assert stats.interval("latency_ms", rows) is None and stats.interval("nfe", rows).low == pytest.approx(100)
    assert stats.interval("acceptance", rows).value == 1
    impossible = rows.assign(logp_sum=-math.inf)
    assert stats.interval("logp_mean", impossible).low is None
    assert stats.difference_from("logp_mean", impossible, rows) is None
    assert stats.difference_from("logp_mean", rows, rows.iloc[:0]) is None
    assert drafts._sums(lists([[1, 2], None, [], [4]])).tolist()[::3] == [3, 4]
