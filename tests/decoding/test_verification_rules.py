"""The components of a decoder agree with their formulas, computed slowly in float64. It concerns several modules:
sampling, verification.grouped, ratio_tests and residuals."""

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.stats import chi2

from specbench.checks.enumerable_model import processed
from specbench.decoding.interfaces import Context
from specbench.decoding.noise import Noise, Stream, row_key
from specbench.decoding.sampling import draw, run_race, truncate
from specbench.decoding.verification.grouped import Grouped
from specbench.decoding.verification.ratio_tests import Add, Amplify, Exact, optimal, standard
from specbench.models.interface import TokenLayout
from specbench.specs.run_spec import Sampling

V = 6
steady = settings(derandomize=True, deadline=None, max_examples=60)
seeds = st.integers(0, 2**32 - 1)


def simplex(seed: int, rows: int = 32, support: int = V) -> torch.Tensor:
    """[rows, V] float64 distributions, some of them with zeros."""
    rng = np.random.default_rng(seed)
    p = rng.dirichlet(np.full(V, 0.6), rows)
    keep = rng.permuted(np.tile(np.arange(V) < support, (rows, 1)), axis=1)
    p = np.where(keep, p, 0) + 1e-9 * keep
    return torch.from_numpy(p / p.sum(1, keepdims=True))


def pair(seed: int) -> tuple[torch.Tensor, torch.Tensor]:
    """p and q; a third of the q are one-hot."""
    p, q = simplex(seed, support=4), simplex(seed + 1, support=5)
    q[::3] = torch.eye(V, dtype=torch.float64)[torch.arange(len(q[::3])) % V]
    return p, q


def context(codebook: torch.Tensor | None = None, residual=standard) -> Context:
    return Context(TokenLayout.plain(1, 4, V), codebook, torch.device("cpu"), residual)


def every_token(p: torch.Tensor) -> torch.Tensor:
    return torch.arange(V).expand(p.shape)


@steady
@given(seeds)
def test_acceptance_is_the_papers_formula(seed):
    p, q = pair(seed)
    rules = [
        (Exact(context()), lambda p, q: p / q),
        (Amplify(context(), k=2.5), lambda p, q: 2.5 * p / q),
        (Add(context(), eps=0.1), lambda p, q: (p + 0.1) / q),
    ]
    for rule, formula in rules:
        accepted = rule.acceptance(p, q, every_token(p)).clamp(max=1)
        for row in range(len(p)):
            for token in range(V):
                px, qx = float(p[row, token]), float(q[row, token])
                if qx > 0:
                    assert math.isclose(accepted[row, token], min(1.0, formula(px, qx)), abs_tol=1e-12)
                elif px == 0 and not isinstance(rule, Add):
                    assert accepted[row, token] == 0, "zero over zero"


@pytest.mark.parametrize("residual", [standard, optimal])
def test_residual_without_a_draft_or_without_mass_is_p(residual):
    p = simplex(3)
    torch.testing.assert_close(residual(p, torch.zeros_like(p), Exact(context()).acceptance), p)
    torch.testing.assert_close(residual(p, p, Exact(context()).acceptance), p)


def slow_cluster(p, q, x, G, d, delta, rank_by, order, bounds, codebook, cluster_q) -> list[int]:
    """Members of token x's cluster, read off the rule one token at a time."""
    if rank_by == "embedding":
        candidates = sorted(range(V), key=lambda v: (v != x, np.square(codebook[v] - codebook[x]).sum()))[:G]
    else:
        weight = p if rank_by == "target" else q
        sign = -1 if order == "descending" else 1
        ranked = sorted(range(V), key=lambda v: (sign * weight[v], v))
        place, half = ranked.index(x), G // 2
        stop = place + half + 1 if bounds == "inclusive" else place + half
        candidates = ranked[max(0, place - half) : stop]
    near = [
        v
        for v in candidates
        if (p[v] > 0 or cluster_q == "whole")
        and abs(p[v] - p[x]) < delta
        and np.square(codebook[v] - codebook[x]).sum() < d
    ]
    return sorted({x, *near})


@steady
@given(
    seed=seeds, G=st.integers(1, V + 3), d=st.sampled_from([0.3, 1.0, math.inf]),
    delta=st.sampled_from([0.05, 0.15, 1.0]), rank_by=st.sampled_from(["target", "draft", "embedding"]),
    order=st.sampled_from(["ascending", "descending"]), bounds=st.sampled_from(["half-open", "inclusive"]),
    cluster_q=st.sampled_from(["whole", "support"]),
)  # fmt: skip
def test_gsd_cluster_is_the_one_read_off_token_by_token(seed, G, d, delta, rank_by, order, bounds, cluster_q):
    p, q = pair(seed)
    codebook = torch.from_numpy(np.random.default_rng(seed).normal(0, 0.6, (V, 2)))
    rule = Grouped(context(codebook), G, d, delta, rank_by, order, bounds, cluster_q)
    accepted, size = rule._of_candidates(p, q, every_token(p))
    for x in range(V):
        # A single candidate uses only the ranks of the kept tokens, in float32.
        alone, alone_size = rule._of_draft(p.float(), q.float(), every_token(p)[:, x : x + 1])
        torch.testing.assert_close(alone, accepted[:, x].float(), equal_nan=True)
        assert torch.equal(alone_size, size[:, x])
    for row in range(len(p)):
        for x in range(V):
            cluster = slow_cluster(
                p[row].numpy(), q[row].numpy(), x, G, d, delta, rank_by, order, bounds, codebook.numpy(), cluster_q
            )
            assert size[row, x] == (len(cluster) if p[row, x] > 0 else 1)
            if q[row, cluster].sum() > 0:
                expected = p[row, cluster].sum() / q[row, cluster].sum() if p[row, x] > 0 else 0.0
                assert math.isclose(accepted[row, x], expected, rel_tol=1e-9)


@steady
@given(
    seed=seeds, top_k=st.integers(0, V), top_p=st.sampled_from([0.3, 0.8, 1.0]),
    temperature=st.sampled_from([0.5, 1.0, 2.0]), entropy_scale=st.sampled_from([None, 0.5, 3.0]),
    min_p=st.sampled_from([None, 0.2]), sigma=st.sampled_from([None, 0.7]),
)  # fmt: skip
def test_filters_match_float64_and_keep_ties_and_the_smallest_nucleus(
    seed, top_k, top_p, temperature, entropy_scale, min_p, sigma
):
    rng = np.random.default_rng(seed)
    logits = rng.choice([-2.0, -0.5, 0.25, 1.0, 3.0], size=(16, V))
    if seed % 2:
        logits = rng.normal(0, 2, size=(16, V))
        sampling = Sampling(1.0, temperature, top_k, top_p, entropy_scale, min_p, sigma)
    else:
        sampling = Sampling(1.0, temperature, top_k)
    ours = truncate(torch.from_numpy(logits), sampling).softmax(-1)
    for row in range(len(logits)):
        np.testing.assert_allclose(ours[row], processed(logits[row], sampling), atol=1e-12)


def test_tokens_a_model_rules_out_stay_out_however_few_are_left():
    left = truncate(torch.tensor([[0.0, -torch.inf, -torch.inf, -torch.inf]]), Sampling(1.0, 1.0, 2)).softmax(-1)
    assert left.tolist() == [[1.0, 0.0, 0.0, 0.0]]


def test_inversion_gives_each_token_its_share_and_never_one_without_weight():
    weights = torch.tensor([0.0, 0.5, 0.0, 2.0, 1.5, 0.0])
    grid = (torch.arange(4000, dtype=torch.float64) + 0.5) / 4000
    tokens = draw(weights.expand(4000, V), grid)
    assert torch.bincount(tokens, minlength=V).tolist() == [0, 500, 0, 2000, 1500, 0]
    edges = torch.tensor([2.0**-53, 1 - 2.0**-53], dtype=torch.float64)
    assert draw(weights.expand(2, V), edges).tolist() == [1, 4]


def fit(counts: np.ndarray, shares: np.ndarray | None = None) -> float:
    """P-value of `counts` under cell `shares`, equal by default."""
    shares = np.ones(len(counts)) if shares is None else shares.astype(float)
    expected = counts.sum() * shares / shares.sum()
    return float(chi2.sf(((counts - expected) ** 2 / expected).sum(), len(counts) - 1))


def uniforms(seed: int, stream: Stream, step: int = 0, rows: int = 500, slots: int = 100) -> np.ndarray:
    noise = Noise([row_key(seed, "prompt", sample) for sample in range(rows)], V)
    return noise.uniform(torch.arange(slots).expand(rows, slots), stream, step).numpy()


def independent(a: np.ndarray, b: np.ndarray) -> float:
    """P-value of an 8x8 contingency table against independent uniforms."""
    return fit(np.bincount((a.ravel() * 8).astype(int) * 8 + (b.ravel() * 8).astype(int), minlength=64))


def test_noise_is_uniform_and_at_two_addresses_independent():
    for stream in Stream:
        assert fit(np.bincount((uniforms(0, stream) * 256).astype(int).ravel(), minlength=256)) > 1e-4
    base = uniforms(0, Stream.TOKEN)
    assert independent(base[:, :-1], base[:, 1:]) > 1e-4, "neighbouring slots"
    assert independent(base[:-1], base[1:]) > 1e-4, "neighbouring samples"
    assert independent(base, uniforms(1, Stream.TOKEN)) > 1e-4, "seeds"
    for stream in list(Stream)[1:]:
        assert independent(base, uniforms(0, stream)) > 1e-4, "streams"
    for step in (1, 2, 7):
        assert independent(base, uniforms(0, Stream.TOKEN, step)) > 1e-4, "draws"
        assert independent(base[:, step:], uniforms(0, Stream.TOKEN, step)[:, :-step]) > 1e-4, "slot against draw"


def test_no_two_addresses_share_a_number():
    seen = np.concatenate(
        [uniforms(0, stream, step, rows=40, slots=40).ravel() for stream in Stream for step in range(12)]
    )
    assert len(np.unique(seen)) == len(seen)


def race(rows: int, vocab: int, stream: Stream = Stream.TOKEN) -> torch.Tensor:
    noise = Noise([row_key(0, "prompt", sample) for sample in range(rows)], vocab)
    return noise.race(torch.zeros(rows, 1, dtype=torch.long), stream)[:, 0]


def test_race_noise_is_standard_exponential_down_to_its_smallest_values():
    times = race(100_000, 8).double().numpy()
    assert fit(np.bincount((-np.expm1(-times.ravel()) * 128).astype(int).clip(max=127), minlength=128)) > 1e-4
    counts = np.bincount(np.minimum(-np.log10(times.ravel()), 4.99).clip(0).astype(int), minlength=5)
    below = -np.expm1(-(10.0 ** -np.arange(6.0)))
    below[0], below[-1] = 1, 0
    assert fit(counts, -np.diff(below)) > 1e-4


def test_race_between_tokens_draws_from_p():
    p = torch.tensor([0.5, 0.3, 0.0, 0.15, 0.0499, 0.0001])
    counts = torch.bincount(run_race(p.expand(200_000, V), race(200_000, V)), minlength=V).numpy()
    assert counts[2] == 0
    live = p.numpy() > 0
    assert fit(counts[live], p.numpy()[live]) > 1e-4
