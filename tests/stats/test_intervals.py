"""Intervals have nominal coverage, p-values are calibrated, pairing helps, and the power analysis holds. Intervals of
means that are ratios of totals, and their paired differences. It concerns several modules: intervals, means and
drafts."""

import itertools
import math
from dataclasses import astuple

import numpy as np
import pandas as pd
import pyarrow as pa
import pytest
from scipy.stats import binomtest, ttest_rel

from specbench import stats
from specbench.stats import drafts, intervals

RUNS = 600


def honest(hits: int, rate: float, runs: int = RUNS) -> bool:
    """Whether `hits` of `runs` agree with a rate, at one false alarm in a thousand."""
    return binomtest(hits, runs, rate).pvalue > 1e-3


def covered(intervals_and_truths) -> int:
    return sum(estimate.low <= truth <= estimate.high for estimate, truth in intervals_and_truths)


@pytest.mark.parametrize("prompts", [2, 3, 5, 8, 40])
def test_the_speed_up_interval_covers_at_its_nominal_rate(prompts):
    draw = np.random.default_rng(prompts)
    hits = 0
    for seed in range(RUNS):
        base = draw.lognormal(0.0, 0.2, prompts)
        mine = base / 2 * draw.lognormal(0.0, 0.15, prompts)
        truth = 2 / math.exp(0.15**2 / 2)
        estimate = stats.ratio_of_totals(base, mine, range(prompts), seed)
        hits += estimate.low <= truth <= estimate.high
    assert honest(hits, 0.95), hits / RUNS


@pytest.mark.parametrize("prompts", [3, 40])
def test_bounds_do_not_depend_on_the_order_of_rows(prompts):
    draw = np.random.default_rng(prompts)
    base, mine = draw.integers(50, 99, (2, prompts))
    order = draw.permutation(prompts)
    shuffled = stats.ratio_of_totals(base[order], mine[order], order)
    assert shuffled == stats.ratio_of_totals(base, mine, range(prompts))


def test_bounds_of_what_is_positive_are_positive():
    draw = np.random.default_rng(1)
    for prompts in (2, 3, 7, 8, 20):
        estimate = stats.ratio_of_totals(draw.lognormal(0.0, 2.0, prompts), np.ones(prompts), range(prompts))
        assert 0 < estimate.low < estimate.value < estimate.high
    assert stats.ratio_of_totals([0, 0], [3, 4], list("ab")) == stats.Estimate(0.0, None, None)
    below = stats.ratio_of_totals([-1.0, -3.0], [1, 1], list("ab"))
    assert astuple(below) == pytest.approx(astuple(stats.mean_interval([-1.0, -3.0], list("ab")))), "not of a logarithm"


@pytest.mark.parametrize(("prompts", "images"), [(5, 1), (12, 4), (60, 2)])
def test_mean_and_difference_intervals_cover_with_several_images_a_prompt(prompts, images):
    draw = np.random.default_rng(prompts)
    clusters = np.repeat(np.arange(prompts), images)
    values = draw.normal(3.0, 1.0, (RUNS, prompts, 1)) + draw.normal(0.0, 0.7, (RUNS, prompts, images))
    means = [stats.mean_interval(run.ravel(), clusters) for run in values]
    assert honest(covered((mean, 3.0) for mean in means), 0.95)
    differences = [stats.mean_difference(run.ravel(), clusters) for run in values]
    assert [(mean.low, mean.high) for mean in differences] == [(mean.low, mean.high) for mean in means]


def test_the_proportion_interval_covers_with_several_images_a_prompt():
    draw = np.random.default_rng(3)
    chance = draw.beta(2.0, 2.0, (RUNS, 60, 1))
    values = draw.random((RUNS, 60, 3)) < chance
    clusters = np.repeat(np.arange(60), 3)
    hits = covered((stats.proportion_interval(run.ravel(), clusters), 0.5) for run in values)
    assert honest(hits, 0.95), hits / RUNS


@pytest.mark.parametrize(("prompts", "images"), [(2, 1), (10, 1), (50, 2)])
def test_the_mean_of_proportions_misses_as_often_above_as_below(prompts, images):
    """Shares of a good detector. Bounds combined from the parts' bounds missed 0 % of the means below, 9 % above."""
    draw, shares = np.random.default_rng(prompts), np.array([0.8, 0.93, 0.73, 0.8, 0.97, 0.97])
    clusters = np.repeat(np.arange(prompts), images)
    chances = draw.beta(1.5 * shares, 1.5 * (1 - shares), (RUNS, prompts, len(shares)))
    chances = chances if images > 1 else np.broadcast_to(shares, chances.shape)
    values = draw.random((images, *chances.shape)) < chances
    runs = values.transpose(1, 3, 2, 0).reshape(RUNS, len(shares), -1)
    ends = [stats.mean_of_proportions([(part, clusters) for part in run]) for run in runs]
    for missed in (sum(end.high < shares.mean() for end in ends), sum(end.low > shares.mean() for end in ends)):
        assert binomtest(missed, RUNS, 0.035, alternative="greater").pvalue > 1e-3, missed / RUNS


@pytest.mark.parametrize(("prompts", "images", "within"), [(20, 10, 0.05), (20, 10, 5.0), (100, 1, 0.0), (8, 10, 0.5)])
def test_the_median_and_p95_cover_with_several_images_a_prompt(prompts, images, within):
    """`within`: deviation between images of a prompt, relative to the deviation between prompts."""
    draw, runs = np.random.default_rng(prompts), 100
    clusters = pd.Series(np.repeat(np.arange(prompts), images))
    values = draw.normal(size=(runs, prompts, 1)) + within * draw.normal(size=(runs, prompts, images))
    frames = [pd.DataFrame({"latency_ms": 100 + run.ravel(), "prompt_id": clusters}) for run in values]
    hits = covered((stats.latency_p50_ms(frame), 100.0) for frame in frames)
    assert hits / runs >= 0.93, hits / runs
    assert prompts < 20 or honest(hits, 0.96, runs), "the few ranks of few prompts are a wider interval"
    truth = 100 + 1.6448536 * math.hypot(1, within)
    tails = [tail for tail in map(stats.latency_p95_ms, frames) if tail.low is not None]
    assert covered((tail, truth) for tail in tails) >= 0.93 * len(tails)
    alone = stats.latency_p50_ms(frames[0][frames[0]["prompt_id"] < 7])
    assert alone.low is None and alone.value > 90, "no interval of fewer than eight prompts"


def test_p_values_are_of_the_paired_t_test_and_small_as_often_as_they_say():
    x, y = np.random.default_rng(4).normal(size=(2, 15))
    assert stats.mean_difference(x - y, range(15)).p == pytest.approx(ttest_rel(x, y).pvalue)
    draw = np.random.default_rng(5)
    base = draw.lognormal(0.0, 0.5, (RUNS, 30))
    noise = draw.lognormal(0.0, 0.1, (2, RUNS, 30))
    pairs = (
        pd.DataFrame({"prompt_id": range(30), "latency_ms": b * n, "latency_ms_base": b * m})
        for b, n, m in zip(base, *noise, strict=True)
    )
    hits = sum(stats.speed_difference(pair).p < 0.05 for pair in pairs)
    assert honest(hits, 0.05), hits / RUNS


def test_holm_is_the_closed_bonferroni_test():
    """By definition: a hypothesis is rejected if every set that contains it is rejected by Bonferroni."""
    p = [0.011, 0.3, 0.02, 0.0004, 0.02]
    sets = [s for n in range(1, 6) for s in itertools.combinations(range(5), n)]
    closed = [max(min(1.0, len(s) * min(p[j] for j in s)) for s in sets if i in s) for i in range(5)]
    assert stats.holm(p) == pytest.approx(closed)
    assert stats.holm([None, 0.01, None]) == [None, 0.01, None] and stats.holm([]) == []


def test_a_verdict_is_the_corrected_p_value_below_the_level_and_none_without_a_test():
    corrected = stats.holm([0.03, None, 0.04, 0.001])
    assert corrected == pytest.approx([0.06, None, 0.06, 0.003])
    assert [stats.is_real(p) for p in (*corrected, 0.03, 0.05)] == [False, False, False, True, True, False]
    few = stats.difference_to_show(stats.mean_difference([1.0, 1.1, 1.2], list("abc")))
    assert not stats.is_real(few.p), "three prompts are too few"


@pytest.mark.parametrize(("spread", "change"), [(0.1, 0.02), (0.5, 0.3), (0.01, 0.02)])
def test_the_prompts_needed_are_enough_and_no_more(spread, change):
    needed = stats.prompts_needed(spread, change)
    draw = np.random.default_rng(8)

    def seen(n: int) -> float:
        gaps = draw.normal(change, spread, (4000, n))
        t = gaps.mean(1) / (gaps.std(1, ddof=1) / math.sqrt(n))
        return float(np.mean(t > intervals.stdtrit(n - 1, 0.975)))

    assert seen(needed) > 0.775 and (needed < 4 or seen(math.ceil(needed * 0.8)) < 0.8)
    if needed > 50:
        assert needed == pytest.approx(((1.96 + 0.8416) * spread / change) ** 2, rel=0.03)


def test_what_a_pilot_cannot_show_is_missing():
    assert stats.prompts_needed(None, 0.02) is None and stats.prompts_needed(0.1, 0.0) is None
    assert stats.prompts_needed(1e6, 1e-6) is None and stats.prompts_needed(0.0, 0.02) is None
    assert stats.mean_difference([0.3], ["p"]) == stats.Difference(0.3, None, None, None, None, 1)


def test_prompts_needed_come_from_pairs():
    """Latencies that vary widely between prompts but together need few prompts."""
    draw = np.random.default_rng(9)
    base = draw.lognormal(0.0, 0.8, 200)
    pairs = pd.DataFrame(
        {"prompt_id": range(200), "latency_ms_base": base, "latency_ms": base / 2 * draw.lognormal(0, 0.02, 200)}
    )
    assert stats.prompts_needed(stats.speed_difference(pairs).spread, 0.02) < 40
    assert stats.prompts_needed(float(np.std(base) / base.mean()), 0.02) > 5000


def test_groups_of_many_prompts_say_the_same(monkeypatch):
    draw, n = np.random.default_rng(10), intervals.MOST_UNITS
    base = draw.lognormal(0.0, 0.3, n)
    mine = base / 2 * draw.lognormal(0.0, 0.2, n)
    every = stats.ratio_of_totals(base, mine, range(n))
    monkeypatch.setattr(intervals, "MOST_UNITS", 300)
    grouped = stats.ratio_of_totals(base, mine, range(n))
    assert grouped.low < grouped.value == every.value < grouped.high
    assert grouped.high - grouped.low == pytest.approx(every.high - every.low, rel=0.2)


def test_prompts_that_show_a_change_of_two_percent_follow_from_the_spread_over_prompts():
    values = np.random.default_rng(0).normal(0.7, 0.2, 60)
    estimate = stats.mean_interval(values, range(60))
    needed = stats.prompts_needed(np.sqrt(2) * values.std(ddof=1), 0.02 * values.mean())
    assert stats.prompts_for_change(estimate, 60) == needed > 1000
    assert stats.prompts_for_change(stats.Estimate(0.7, None, None), 60) is None
    drawn = np.random.default_rng(1).normal(values.mean(), values.std(ddof=1), (2000, 2, needed))
    drawn[:, 1] += 0.02 * values.mean()
    gap = drawn.mean(2) @ [-1, 1] / (drawn.var(2, ddof=1).sum(1) / needed) ** 0.5
    assert 0.75 < (gap > 1.96).mean() < 0.86, "power 80 %"


def lists(values: list) -> pd.Series:
    return pd.Series(pd.arrays.ArrowExtensionArray(pa.array(values)))


def run_of(seed: int = 0, prompts: int = 32, shift: float = 0.0) -> pd.DataFrame:
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
    rows = run_of()
    mean = stats.interval("logp_mean", rows)
    bootstrap = stats.ratio_of_totals(rows["logp_sum"], rows["free_tokens"], rows["prompt_id"])
    expected = (bootstrap.value, bootstrap.low, bootstrap.high)
    assert (mean.value, mean.low, mean.high) == pytest.approx(expected, abs=0.02)
    pooled = stats.interval("perplexity", rows)
    assert (pooled.low, pooled.high) == pytest.approx((math.exp(-mean.high), math.exp(-mean.low)))
    assert pooled.value == pytest.approx(stats.perplexity(rows))


def test_bounds_are_possible_values_of_the_number():
    rows = run_of(prompts=4)
    rows["entropy_sum"] = rows["free_tokens"] * np.array([9.0] + [0.0] * 7)
    rows["logp_sum"] = -rows["entropy_sum"]
    logp, entropy, perplexity = (stats.interval(name, rows) for name in ("logp_mean", "entropy_mean", "perplexity"))
    assert (logp.high, entropy.low, perplexity.low) == (0, 0, 1) and logp.low < logp.value < 0 < entropy.value
    assert stats.interval("image_perplexity", rows).low == 1 and stats.interval("nll_gap", rows).value == 0


def test_runs_of_one_distribution_differ_far_less_than_their_intervals_are_wide_and_a_shift_is_found():
    ar, same, shifted = run_of(0), run_of(1), run_of(1, shift=-0.2)
    wide, gap = stats.interval("logp_mean", ar), stats.difference_from("logp_mean", same, ar)
    assert gap.low < 0 < gap.high and gap.high - gap.low < 0.2 * (wide.high - wide.low) and gap.prompts == 32
    assert stats.difference_from("logp_mean", shifted, ar).p < 1e-3
    backwards = stats.difference_from("logp_mean", shifted.iloc[::-1].iloc[:40], ar)
    assert backwards.value == pytest.approx(-0.2, abs=0.06) and backwards.prompts == 20


def test_what_is_not_known_has_no_interval():
    rows = run_of()
    assert stats.interval("latency_ms", rows) is None and stats.interval("nfe", rows).low == pytest.approx(100)
    assert stats.interval("acceptance", rows).value == 1
    impossible = rows.assign(logp_sum=-math.inf)
    assert stats.interval("logp_mean", impossible).low is None
    assert stats.difference_from("logp_mean", impossible, rows) is None
    assert stats.difference_from("logp_mean", rows, rows.iloc[:0]) is None
    assert drafts._sums(lists([[1, 2], None, [], [4]])).tolist()[::3] == [3, 4]
