"""Derived numbers against hand-computed values, closed forms and simulations. It concerns several modules: speed,
drafts and tokens."""

import json
import math

import numpy as np
import pandas as pd
import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from synthetic import ar, frame, generation, sjd

from specbench import stats
from specbench.stats import Estimate
from specbench.store.schema import with_facts


def free_tokens(logp, entropy=None) -> pd.DataFrame:
    """Images [n, N] of free tokens in the form of statistics."""
    nothing = np.zeros_like(logp)
    lists = {"logp": logp, "entropy": logp if entropy is None else entropy, "top1": logp}
    lists |= {name: nothing for name in ("forced", "committed_step", "drafted")}
    columns = {name: pa.array(list(np.asarray(values, dtype=np.float64))) for name, values in lists.items()}
    return stats.condense(pa.table(columns))


def test_step_compression_is_a_mean_over_images_and_tokens_per_step_a_ratio_of_totals():
    rows = frame([generation(2, 20.0), generation(4, 40.0)])
    assert stats.nfe(rows) == 3.0
    assert stats.tokens_per_step(rows) == 8 / 6
    assert stats.step_compression(rows) == (4 / 2 + 4 / 4) / 2


def test_latencies_are_means_per_image_and_step_time_a_ratio_of_totals():
    rows = frame([generation(2, 20.0, 2.0), generation(4, 40.0, 4.0)])
    assert stats.latency_ms(rows) == (23.0 + 45.0) / 2
    assert stats.latency_e2e_ms(rows) == (25.0 + 47.0) / 2
    assert stats.step_ms(rows) == (23.0 + 45.0) / 6
    assert stats.throughput(rows) == pytest.approx(2 / (0.025 + 0.047)), "each span once, sums of spans never"


def test_batched_rows_have_throughput_and_no_latency():
    rows = frame([generation(2, 20.0, batch=2), generation(4, 20.0, batch=2)], timed=False)
    assert stats.latency_ms(rows) is None and stats.latency_e2e_ms(rows) is None and stats.step_ms(rows) is None
    assert stats.speed_up(rows, frame(ar())) is None
    assert stats.throughput(rows) == pytest.approx(2 / 0.023)
    assert stats.images_per_hour(rows) == pytest.approx(3600 * 2 / 0.023)
    staged = rows.assign(stage2_ms=0.7)
    assert stats.throughput(staged) == stats.throughput(rows), "the second stage is in the span `render`"


def test_the_speed_up_is_a_ratio_of_totals_over_pairs_and_of_ar_against_itself_one():
    result = stats.speed_up(frame(sjd(3)), frame(ar(5)))
    assert result.pairs == 3
    assert result.total.value == pytest.approx(3 * 45 / (35 + 35 + 52))
    assert result.steps == pytest.approx(12 / 7)
    assert result.window_cost == pytest.approx(1.5)
    assert result.overhead == pytest.approx((122 / 105) / (135 / 120))
    assert result.equal_forwards == pytest.approx(135 / (7 * 120 / 12 + 122 - 105)), "only the forwards get faster"
    assert result.end_to_end == pytest.approx(3 * 47 / (37 + 37 + 54))
    assert result.total.low <= result.total.value <= result.total.high
    result = stats.speed_up(frame(ar()), frame(ar()))
    assert (result.total, result.steps, result.window_cost, result.overhead) == (Estimate(1.0, 1.0, 1.0), 1.0, 1.0, 1.0)


positive = st.floats(0.1, 1e4)
image = st.tuples(st.integers(1, 500), positive, positive)


@given(st.lists(st.tuples(image, image), min_size=1, max_size=8))
@settings(max_examples=60, deadline=None)
def test_the_factors_multiply_to_the_speed_up(pairs):
    mine, theirs = zip(*pairs, strict=True)
    result = stats.speed_up(frame([generation(*item) for item in mine]), frame([generation(*item) for item in theirs]))
    assert result.total.value == pytest.approx(result.steps / (result.window_cost * result.overhead), rel=1e-12)


def test_one_prompt_has_no_interval_rather_than_a_zero_one():
    result = stats.speed_up(frame(sjd(1)), frame(ar(1)))
    assert result.total.value > 1 and result.total.low is None and result.total.high is None
    assert stats.nll_gap_se(frame(ar(1))) is None
    assert stats.mean_interval([3.0], ["p"]) == Estimate(3.0, None, None)
    assert stats.proportion_interval([1], ["p"]) == Estimate(1.0, None, None)
    assert stats.logp_std(free_tokens([[-1.0]])) is None


def test_no_rows_at_all_or_in_common_give_missing_numbers():
    assert stats.speed_up(frame(sjd(2)).assign(prompt_id=["x", "y"]), frame(ar(2))) is None
    empty = frame(ar(1)).iloc[:0]
    assert [f(empty) for f in (stats.nfe, stats.tokens_per_step, stats.step_compression, stats.step_ms)] == [None] * 4
    assert not stats.tokens_measured(empty) and stats.acceptance(empty) is None and stats.throughput(empty) is None


def test_the_bootstrap_resamples_prompts_not_images_and_is_seeded():
    """Ten copies of an image per prompt carry no more information than a single image."""
    top, bottom = pd.Series([1.0, 2.0, 3.0, 5.0]), pd.Series([1.0, 1.0, 1.5, 1.0])
    prompts = pd.Series(list("abcd"))
    once = stats.ratio_of_totals(top, bottom, prompts)
    copies = [pd.concat([column] * 10, ignore_index=True) for column in (top, bottom, prompts)]
    again = stats.ratio_of_totals(*copies)
    assert (again.value, again.low, again.high) == pytest.approx((once.value, once.low, once.high))
    values = np.random.default_rng(2).random((2, 30))
    columns = pd.Series(values[0]), pd.Series(values[1]), pd.Series(range(30))
    assert stats.ratio_of_totals(*columns) == stats.ratio_of_totals(*columns)
    assert stats.ratio_of_totals(*columns) != stats.ratio_of_totals(*columns, seed=1)


def test_token_statistics_see_free_tokens_only():
    rows = frame([generation(4, 1.0, logp=(-1.0, -2.0, -99.0, -3.0), entropy=(1.5, 1.5, 99.0, 2.0))])
    assert stats.logp_mean(rows) == -2.0 and stats.logp_std(rows) == 1.0
    assert stats.perplexity(rows) == pytest.approx(math.exp(2.0))
    assert stats.nll_gap(rows) == pytest.approx(2.0 - 5.0 / 3)
    assert stats.zero_probability(rows) == 0


def test_the_perplexity_is_pooled_or_a_mean_over_images():
    rows = frame([generation(2, 1.0, logp=(-1.0, -1.0, 0.0, -1.0)), generation(2, 1.0, logp=(-3.0, -3.0, 0.0, -3.0))])
    assert stats.perplexity(rows) == pytest.approx(math.exp(2.0))
    assert stats.image_perplexity(rows) == pytest.approx((math.e + math.exp(3.0)) / 2)
    assert stats.image_perplexity(rows.iloc[:0]) is None


def test_statistics_of_tokens_match_all_tokens_laid_end_to_end():
    """Images with no, one and several free tokens; a spread needs at least two tokens, and two images."""
    images = [[], [-1.0], [-2.0, -5.0, -0.5], [-3.0, -1.5]]
    for kept in (images, images[:1] + images[-1:], [[-1.0], [-3.0]]):
        rows = pd.DataFrame({
            "free_tokens": [len(image) for image in kept],
            "logp_sum": [sum(image) for image in kept],
            "logp_spread": [sum((value - np.mean(image)) ** 2 for value in image) for image in kept],
            "entropy_sum": [0.25 * len(image) ** 2 for image in kept],
        })  # fmt: skip
        every = np.array([value for image in kept for value in image])
        assert stats.logp_std(rows) == pytest.approx(every.std(ddof=1))
        assert stats.perplexity(rows) == pytest.approx(math.exp(-every.mean()))
        excess = [(-sum(image) - 0.25 * len(image) ** 2, len(image)) for image in kept if image]
        n, tokens = len(excess), len(every)
        gap = sum(value for value, _ in excess) / tokens
        squares = sum((value - gap * count) ** 2 for value, count in excess)
        expected = None if n == 1 else pytest.approx(math.sqrt(n / (n - 1) * squares) / tokens)
        assert stats.nll_gap(rows) == pytest.approx(gap) and stats.nll_gap_se(rows) == expected
    assert stats.perplexity(rows.iloc[:0]) is None


def test_a_token_of_probability_zero_makes_the_gap_infinite_and_is_counted():
    rows = frame([generation(4, 1.0, logp=(-1.0, -math.inf, 0.0, -3.0)), generation(4, 1.0)])
    assert stats.nll_gap(rows) == math.inf and stats.nll_gap_se(rows) is None
    assert stats.logp_mean(rows) == -math.inf and stats.perplexity(rows) == math.inf and stats.logp_std(rows) is None
    assert stats.zero_probability(rows) == 1


def test_the_gap_of_an_exact_sampler_is_zero_within_its_error():
    draw = np.random.default_rng(1)
    logits = draw.normal(0.0, 2.0, (60, 50, 8))
    p = np.exp(logits) / np.exp(logits).sum(-1, keepdims=True)
    tokens = (p.cumsum(-1) > draw.random((60, 50, 1))).argmax(-1)
    logp = np.log(np.take_along_axis(p, tokens[..., None], -1))[..., 0]
    entropy = -(p * np.log(p)).sum(-1)
    rows = free_tokens(logp, entropy)
    assert abs(stats.nll_gap(rows)) < 3 * stats.nll_gap_se(rows)
    biased = free_tokens(np.log(p.max(-1)), entropy)
    assert stats.nll_gap(biased) < -5 * stats.nll_gap_se(biased), "greedy tokens must show"


def test_acceptance_is_accepted_over_verified_drafts():
    rows = frame(
        [generation(2, 1.0, tested=(3, 1, 0), accepted=(2, 1, 0)), generation(2, 1.0, tested=(1,), accepted=(0,))]
    )
    assert stats.acceptance(rows) == 3 / 5
    assert stats.acceptance_by_offset(rows) == [2 / 4, 1.0, None]
    assert stats.acceptance(frame(ar())) is None, "AR tests nothing"


def test_what_is_said_of_drafts():
    first = {"rounds": 5, "draft_tv_1": 0.2, "sibling_0_tested": 4, "sibling_0_accepted": 0.5, "theorem2_bound": 1}
    second = {"rounds": 8, "draft_tv_1": 0.4, "draft_tv_2": 0.6, "sibling_0_tested": 12, "sibling_0_accepted": 0.25}
    rows = pd.DataFrame({
        "stream_tokens": [20, 20], "nfe": [6, 9], "draft_ms": [3.0, 5.0], "latency_ms": [30.0, 50.0],
        "facts": [json.dumps(facts) for facts in (first, second)],
    })  # fmt: skip
    rows = with_facts(pa.Table.from_pandas(rows)).to_pandas()
    assert stats.rounds(rows) == 6.5 and stats.draft_ms(rows) == 4.0 and stats.theorem2_bound(rows) == 1.0
    assert stats.acceptance_length(rows) == pytest.approx((19 + 19) / (5 + 8)), "the first token needed no round"
    assert stats.draft_tv_by_depth(rows) == pytest.approx([0.3, 0.6])
    assert stats.acceptance_by_sibling(rows) == pytest.approx([5 / 16])
    ar = with_facts(pa.table({"stream_tokens": [20], "nfe": [20], "facts": ["{}"]})).to_pandas()
    assert stats.acceptance_length(ar) == 1.0 and stats.rounds(ar) is None and stats.theorem2_bound(ar) is None


def test_the_mean_interval_is_the_textbook_one_without_clusters():
    values = [1.0, 2.0, 4.0, 7.0]
    result = stats.mean_interval(values, range(4))
    half = 3.182446305284263 * np.std(values, ddof=1) / 2
    assert (result.value, result.low, result.high) == pytest.approx((3.5, 3.5 - half, 3.5 + half))


def test_the_proportion_interval_is_wilsons_without_clusters():
    result = stats.proportion_interval([1] * 8 + [0] * 2, range(10))
    assert (result.value, result.low, result.high) == pytest.approx((0.8, 0.4902, 0.9433), abs=0.02)
    certain = stats.proportion_interval([1] * 10, range(10))
    assert certain.value == 1.0 and certain.high == 1.0 and certain.low == pytest.approx(0.7225, abs=1e-3)


def test_the_overall_interval_is_narrower_than_its_parts():
    part = ([1] * 8 + [0] * 2, range(10))
    alone, whole = stats.proportion_interval(*part), stats.mean_of_proportions([part] * 4)
    assert stats.mean_of_proportions([part]) == alone
    n, z = 4 * 9, 1.959964  # variance with divisor n - 1
    centre, half = 0.8 + z**2 / (2 * n), z * math.sqrt(0.16 / n + z**2 / (4 * n**2))
    expected = ((centre - half) / (1 + z**2 / n), (centre + half) / (1 + z**2 / n))
    assert whole.value == 0.8 and (whole.low, whole.high) == pytest.approx(expected, abs=1e-6)
    assert stats.mean_of_proportions([part, ([1], ["one prompt"])]).low is None


def test_tails_are_quantiles_between_order_statistics_and_the_slowest_category():
    rows = pd.DataFrame({"prompt_id": [str(n) for n in range(100)], "latency_ms": np.arange(1.0, 101), "nfe": 100.0})
    rows["category"], rows["stream_tokens"] = np.where(rows["latency_ms"] > 60, "late", "early"), 200.0
    p50, p95 = stats.latency_p50_ms(rows), stats.latency_p95_ms(rows)
    assert (p50.value, p50.low, p50.high) == (50.5, 40, 61) and (p95.low, p95.high) == (90, 100)
    assert stats.latency_p95_ms(rows[:20]).high is None and stats.tokens_per_step_p95(rows).value == 2
    name, mean = stats.slowest_category(rows)
    assert (name, mean.value) == ("late", 80.5) and mean.low < 80.5 < mean.high
    assert stats.slowest_category(rows.assign(category=None)) is None
    assert stats.latency_p50_ms(rows.assign(latency_ms=np.nan)) is None


def test_an_interval_without_width_is_not_shown():
    shown = stats.difference_to_show(stats.mean_difference([0.0] * 9, range(9)))
    assert (shown.value, shown.low, shown.high, shown.p) == (0, None, None, 1)
