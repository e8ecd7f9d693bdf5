"""Relaxed acceptance and the residual distribution: the papers' formulas, a linear program, and the exact joint. It
concerns several modules: verification.ratio_tests, lantern, residuals and tree_verification."""

import itertools
import math
import zlib

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from refusals import refused
from scipy.optimize import linprog

from specbench.checks.audit_settings import AUDIT_SETTINGS
from specbench.checks.divergence import total_variation
from specbench.checks.enumerable_model import EnumerableModel
from specbench.checks.losslessness import audit_decoders, observe
from specbench.decoding.interfaces import Context
from specbench.decoding.loop import decode
from specbench.decoding.verification import lantern
from specbench.decoding.verification.lantern import Lantern, LanternPlusPlus, paper, release_p, release_q
from specbench.decoding.verification.ratio_tests import (
    DepthWeighted,
    DraftTests,
    Exact,
    RatioTest,
    exponential,
    linear,
    optimal,
    ratio,
    standard,
)
from specbench.models.interface import TokenLayout
from specbench.prompts import Request
from specbench.specs.presets import resolve
from specbench.specs.run_spec import Sampling

P = torch.tensor([[0.5, 0.3, 0.15, 0.05]], dtype=torch.float64)
Q = torch.tensor([[0.2, 0.3, 0.1, 0.4]], dtype=torch.float64)
TOKENS = torch.arange(4)[None]
V = 6
steady = settings(derandomize=True, deadline=None, max_examples=20)
seeds = st.integers(0, 2**32 - 1)


def context(residual=optimal, codebook=None, drafts=5) -> Context:
    return Context(TokenLayout.plain(1, 4, 4), codebook, torch.device("cpu"), residual, drafts)


def omega(residual=optimal, **changed) -> DepthWeighted:
    options = {"schedule": "uniform", "delta": 1.1, "nu": 0.7, "slope": 0.5, "floor": 0.0} | changed
    return DepthWeighted(context(residual), **options)


def outcome(rule, p=P, q=Q, tokens=TOKENS):
    """Acceptance [V], accepted mass, residual distribution and distribution of the emitted token of a rule."""
    a = rule.acceptance(p, q, tokens).clamp(max=1)
    coin = torch.ones(len(p), 1, dtype=torch.double)
    window = DraftTests.of(p[:, None], q[:, None], tokens[:, :1], coin, tokens[:, :1], torch.tensor([1]))
    left = rule.residual_weights(window)[:, 0]
    left = left / left.sum(-1, keepdim=True)
    mass = (a * q).sum(-1, keepdim=True)
    return a, mass, left, a * q + (1 - mass) * left


@pytest.mark.parametrize(("delta", "a", "mass", "left", "emitted"), [
    (1.0, (1, 1, 1, 0.125), 0.65, (0.857143, 0, 0.142857, 0), (0.5, 0.3, 0.15, 0.05)),
    (2.0, (1, 1, 1, 0.25), 0.70, (0.857143, 0, 0.142857, 0), (0.457143, 0.3, 0.142857, 0.1)),
    (0.5, (1, 0.5, 0.75, 0.0625), 0.45, (0.545455, 0.272727, 0.136364, 0.045455), (0.5, 0.3, 0.15, 0.05)),
])  # fmt: skip
def test_worked_example(delta, a, mass, left, emitted):
    for actual, expected in zip(outcome(omega(delta=delta)), (a, mass, left, emitted), strict=True):
        np.testing.assert_allclose(actual.squeeze(0), expected, atol=2e-6)
    biased = outcome(omega(standard, delta=0.5))[3]
    assert math.isclose((biased - P).abs().sum() / 2, 0.175, abs_tol=1e-6), "an acceptance below one"


@pytest.mark.parametrize(("delta", "expected"), [
    (1.1, (2.855, 1.418, 0.704, 0.350, 0.174)), (2.0, (5.191, 2.578, 1.280, 0.636, 0.316)),
    (5.0, (12.977, 6.444, 3.200, 1.589, 0.789)),
])  # fmt: skip
def test_exponential_schedule_over_five_drafts(delta, expected):
    np.testing.assert_allclose(exponential(5, delta, 0.7), expected, atol=6e-4)


@steady
@given(drafts=st.integers(1, 64), delta=st.floats(0.1, 10), fall=st.floats(0, 1))
def test_schedules_fall_and_keep_their_budget(drafts, delta, fall):
    for weights in (exponential(drafts, delta, fall), linear(drafts, delta, fall)):
        assert math.isclose(np.mean(weights), delta, rel_tol=1e-9)
        assert all(later <= earlier + 1e-12 for earlier, later in itertools.pairwise(weights))
        assert min(weights) >= -1e-12


def test_weights_follow_the_depth_and_the_floor_lifts_them():
    rule, floored = omega(schedule="exponential"), omega(schedule="exponential", floor=1.0)
    p, q = P.expand(7, 4), P.expand(7, 4)
    depth = torch.arange(1, 8)
    ratio = rule.acceptance(p, q, torch.zeros(7, 1, dtype=torch.long), depth).squeeze(1)
    expected = exponential(5, 1.1, 0.7)
    np.testing.assert_allclose(ratio, expected + expected[-1:] * 2, rtol=1e-6)
    assert floored.weights.tolist() == pytest.approx([max(1.0, weight) for weight in expected])


def simplex(rng, rows=8):
    p = rng.dirichlet(np.full(V, 0.6), rows)
    p = np.where(rng.permuted(np.tile(np.arange(V) < 5, (rows, 1)), axis=1), p, 0) + 1e-12
    return torch.from_numpy(p / p.sum(1, keepdims=True))


@steady
@given(seeds)
def test_optimal_residual_is_a_minimiser(seed):
    rng = np.random.default_rng(seed)
    p, q = simplex(rng), simplex(rng)
    a = torch.from_numpy(rng.random(p.shape))
    left = optimal(p, q, lambda p, q, x: a.gather(-1, x))
    left = left / left.sum(-1, keepdim=True)
    for row in range(len(p)):
        accepted = (a * q)[row].numpy()
        rejected = 1 - accepted.sum()
        ours = np.abs(accepted + rejected * left[row].numpy() - p[row].numpy()).sum() / 2
        assert math.isclose(ours, best_distance(accepted, rejected, p[row].numpy()), abs_tol=1e-8)


def best_distance(accepted, rejected, p) -> float:
    """min over distributions G of TV(accepted + rejected G, p): variables G, and t >= the absolute differences."""
    eye = np.eye(V)
    above = np.hstack([rejected * eye, -eye])
    below = np.hstack([-rejected * eye, -eye])
    result = linprog(
        np.r_[np.zeros(V), np.full(V, 0.5)], A_ub=np.vstack([above, below]), b_ub=np.r_[p - accepted, accepted - p],
        A_eq=np.r_[np.ones(V), np.zeros(V)][None], b_eq=[1.0],
    )  # fmt: skip
    return result.fun


@steady
@given(seeds)
def test_optimal_is_standard_if_acceptance_is_no_stricter_than_exact(seed):
    rng = np.random.default_rng(seed)
    p, q = simplex(rng), simplex(rng)
    rule = omega(delta=1.0 + 3 * rng.random())
    torch.testing.assert_close(optimal(p, q, rule.acceptance), standard(p, q), atol=1e-12, rtol=0)


LINE = torch.tensor([[9.0], [1.6], [2.0], [2.9], [3.0]]) / 10
"""Five codes on a line: the nearest to code 4 are 3, then 2, then 1."""


def lantern_rule(residual, rule=LanternPlusPlus, codebook=LINE, k=3, **limit):
    return rule(context(residual, codebook), k, *limit.values(), "raw")


@pytest.mark.parametrize(("rule", "limit", "members", "accepted"), [
    (LanternPlusPlus, 2.0, [], 0.125), (LanternPlusPlus, 5.0, [2], 0.5), (Lantern, 0.1, [], 0.125),
    (Lantern, 0.2, [2], 0.5),
])  # fmt: skip
def test_neighbourhood_of_the_worked_example(rule, limit, members, accepted):
    codebook = torch.tensor([[1.0], [0.6], [2.8], [2.0]])  # nearest to token 3: 2, 0, 1
    lantern = lantern_rule(standard, rule, codebook, limit=limit)
    x = torch.tensor([[3]])
    around = lantern.neighbourhood(P, x)
    assert around.ids.flatten().tolist() == [2, 0, 1]
    assert around.ids[around.member].tolist() == members
    assert math.isclose(lantern.acceptance(P, Q, x), accepted, rel_tol=1e-6)


def test_the_default_k_has_its_additional_neighbour():
    k = resolve("lantern").options["k"]
    lantern = lantern_rule(paper, Lantern, torch.arange(k + 3.0)[:, None], k, limit=0.1)
    around = lantern.neighbourhood(torch.full((1, k + 3), 1 / (k + 3)), torch.tensor([[0]]))
    assert (around.ids.shape[-1], around.wide.shape[-1]) == (k, k + 1)


def slow_neighbourhood(p, x, codebook, k, limit) -> list[int]:
    others = sorted((v for v in range(len(p)) if v != x), key=lambda v: abs(codebook[v] - codebook[x]))[:k]
    members, mass = [], 0.0
    for other in others:
        mass += p[other]
        if mass > limit * (1 + 1e-6):
            break
        members.append(other)
    return members


@steady
@given(seed=seeds, k=st.integers(1, V - 1), lambda_=st.sampled_from([1.0, 1.5, 3.0, 20.0]))
def test_lantern_plus_plus_read_off_token_by_token(seed, k, lambda_):
    rng = np.random.default_rng(seed)
    p, q, codebook = simplex(rng, 4), simplex(rng, 4), torch.from_numpy(rng.normal(size=(V, 1))).float()
    rule = lantern_rule(paper, codebook=codebook, k=k, limit=lambda_)
    accepted = rule.acceptance(p, q, torch.arange(V).expand(4, V))
    for row in range(4):
        for x in range(V):
            members = slow_neighbourhood(p[row].numpy(), x, codebook[:, 0].numpy(), k, (lambda_ - 1) * p[row, x])
            mass = float(p[row, x] + p[row, members].sum())
            assert math.isclose(accepted[row, x], mass / q[row, x], rel_tol=1e-9)
            assert mass <= lambda_ * p[row, x] * (1 + 1e-5) + 1e-15
            moved = p[row].clone()
            moved[members], moved[x] = 0, mass
            around = rule.neighbourhood(p[row], torch.tensor([x]))
            torch.testing.assert_close(paper(p[row], q[row], around), moved - q[row])
            nearest = slow_neighbourhood(p[row].numpy(), x, codebook[:, 0].numpy(), k + 1, math.inf)
            emptied_q, emptied_p = q[row].clone(), p[row].clone()
            if members:
                emptied_q[nearest], emptied_p[nearest] = 0, 0
            torch.testing.assert_close(release_q(p[row], q[row], around), p[row] - emptied_q)
            torch.testing.assert_close(release_p(p[row], q[row], around), emptied_p - q[row])


def test_neighbour_table_is_built_once(tmp_path, monkeypatch):
    codebook = torch.randn(40, 3, generator=torch.Generator().manual_seed(0))
    table = lantern.neighbour_table(codebook, folder=tmp_path)
    assert table.shape == (40, 39)
    assert table.dtype == torch.int32
    scaled = torch.nn.functional.normalize(codebook, dim=1)
    assert table[7, 0] == (scaled @ scaled[7]).scatter(0, torch.tensor([7]), -2.0).argmax()
    monkeypatch.setattr(lantern, "nearest", None)
    assert torch.equal(lantern.neighbour_table(codebook.clone(), folder=tmp_path), table)
    monkeypatch.undo()
    assert not torch.equal(lantern.neighbour_table(codebook, raw=True, folder=tmp_path), table)
    for file in tmp_path.glob("*-normalised.npy"):
        file.write_bytes(b"torn")
    assert torch.equal(lantern.neighbour_table(codebook, folder=tmp_path), table)


STRICT = [
    {"verifier": "omega", "delta": 0.6},
    {"verifier": "omega", "delta": 0.5, "schedule": "exponential", "nu": 0.02},
    {"verifier": "omega", "delta": 0.7, "drafter": "jacobi-tree", "siblings": 3},
    {"verifier": "omega", "delta": 0.4, "drafter": "jacobi-tree", "siblings": 4, "refine": "couple"},
]


@pytest.mark.parametrize(("options", "residual"), [*((each, "optimal") for each in STRICT), (STRICT[0], "standard")])
def test_any_stricter_acceptance_is_lossless_with_the_optimal_residual_alone(options, residual):
    [result] = audit_decoders([resolve("sjd", options | {"residual": residual})], samples=8_000)
    assert result["verdict"] == ("lossy" if residual == "standard" else "no deviation seen"), result


RELAXED = [
    ("sjd", {"verifier": "omega", "delta": 2.0, "residual": "optimal"}),
    ("sjd", {"verifier": "omega", "delta": 1.5, "schedule": "exponential", "residual": "optimal"}),
    ("sjd", {"verifier": "lantern++", "lambda": 3.0, "k": 2, "residual": "optimal"}),
    ("sjd", {"verifier": "lantern", "delta": 0.3, "k": 2, "residual": "optimal"}),
    ("sjd", {"verifier": "omega", "delta": 2.0, "drafter": "jacobi-tree", "residual": "optimal"}),
    ("uniform-rsd", {"delta": 2.0, "tree": "chain"}),
    ("uniform-rsd", {"delta": 2.0, "tree": "0 1 00 01 10"}),
    ("cool-sd", {"delta": 1.5, "tree": "0 1 2 00 01 000"}),
    ("lantern++-optimal", {"lambda": 3.0, "k": 2, "tree": "0 1 00 01"}),
    ("lantern", {"delta": 0.3, "k": 2, "tree": "0 1 00", "residual": "optimal"}),
]


@pytest.mark.parametrize(("name", "options"), RELAXED, ids=str)
def test_measured_distance_stays_under_the_bound_estimated_while_decoding(name, options):
    setting = AUDIT_SETTINGS[0]
    spec = resolve(name, options | ({"window": setting.window} if name == "sjd" else {}))
    distance, low, _ = total_variation(observe(setting, spec, 15_000, seed=1))
    assert 0.003 < low <= distance < mean_bound(setting, spec, 2000)


def mean_bound(setting, spec, images) -> float:
    """Mean of the recorded bound over images of the same model that `observe` decodes."""
    model = EnumerableModel(setting.layout, ("table 0",), seed=zlib.crc32(setting.name.encode()) + 1)
    requests = [Request("table 0", "p", sample) for sample in range(images)]
    rows = decode(model, requests, spec, setting.sampling, 5, render=False)
    return float(np.mean([row.facts["theorem2_bound"] for row in rows]))


def test_exact_decoding_records_no_bound_and_the_draft_s_true_distance():
    model = EnumerableModel(TokenLayout.plain(1, 1, 4))
    requests = [Request("", "p", sample) for sample in range(4000)]
    rows = decode(model, requests, resolve("sjd", {"window": 2}), Sampling(1.0), 0, render=False)
    assert max(row.facts["theorem2_bound"] for row in rows) == 0
    truth = float((model.conditional[0, 0].softmax(-1) - 0.25).abs().sum() / 2)
    assert math.isclose(np.mean([row.facts["draft_tv_1"] for row in rows]), truth, abs_tol=0.03)


def test_a_residual_without_its_verifier_is_refused():
    refused("lantern", resolve, "sjd", {"residual": "lantern"})
    assert resolve("sjd", {"verifier": "lantern", "residual": "lantern-release-q"}).verifier == "lantern"


@pytest.mark.parametrize(
    ("tree", "seed"), [("chain", 0), ("mc_sim_7b_63", 1), ("0 1 2 00 01 20 21 22 000", 2), ("0 1 10 11 100 1000", 3)]
)
def test_any_stricter_acceptance_is_lossless_on_any_tree(tree, seed, monkeypatch):
    """The acceptance is a random share of p/q, by token and depth, of a draft head."""
    share = torch.rand(8, 8, generator=torch.Generator().manual_seed(seed))

    def damped(self, p, q, x, depth=1):
        place = torch.as_tensor(depth).clamp(max=7)[..., None]
        return share[place.expand(x.shape), x] * ratio(p, q, x).clamp(max=1)

    monkeypatch.setattr(Exact, "acceptance", damped)
    monkeypatch.setattr(Exact, "of_drafts", RatioTest.of_drafts)  # Exact overrides it with p/q
    decoder = resolve("eagle", {"tree": tree, "verifier": "exact", "residual": "optimal"})
    assert audit_decoders([decoder], samples=3_000, seed=seed)[0]["verdict"] == "no deviation seen"
