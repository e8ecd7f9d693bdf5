"""The presets that follow released code, against their rules written out slowly, and against what they declare. It
concerns several modules: drafters.token_init, verification.grouped, lantern and ratio_tests."""

import math

import numpy as np
import pytest
import torch

from specbench.decoding.drafters.token_init import Slots, left_top1
from specbench.decoding.interfaces import Context
from specbench.decoding.noise import Noise
from specbench.decoding.verification.grouped import ReleasedGrouped
from specbench.decoding.verification.lantern import LanternPlusPlus, release
from specbench.decoding.verification.ratio_tests import DraftTests, standard
from specbench.models.interface import TokenLayout
from specbench.specs.presets import resolve

V = 24


class Embedded:
    """A model with a separate input embedding."""

    def __init__(self, table: torch.Tensor):
        self._table = table

    def token_table(self) -> torch.Tensor:
        return self._table

    def table_ids(self, tokens: torch.Tensor) -> torch.Tensor:
        return tokens + 4


def context(layout: TokenLayout, codebook=None, residual=standard, model=None) -> Context:
    return Context(layout, codebook, torch.device("cpu"), residual, model=model)


def drawn(seed: int, kept: int) -> np.ndarray:
    """One distribution of `V` tokens, `kept` of them possible, some equally likely."""
    rng = np.random.default_rng(seed)
    p = np.round(rng.dirichlet(np.full(V, 0.7)), 2) + 0.01
    p[rng.permutation(V)[kept:]] = 0
    return p / p.sum()


def slow_ratio(p, q, x, d, delta, rows) -> float:
    """The released acceptance ratio of a draft: a cluster sliced out of the ascending order, members filtered, sums
    over p and q; without a slice, the ratio of the draft."""
    order = sorted(range(V), key=lambda v: (p[v], v))
    at = order.index(x)
    members = []
    if at >= 7:
        for v in order[at - 7 : at + 7]:
            if abs(p[v] - p[x]) < delta and sum((rows[v] - rows[x]) ** 2) < d:
                members.append(v)
    members = members or [x]
    mass = sum(p[v] for v in members)
    return mass / sum(q[v] for v in members) if mass > 0 else 0.0


@pytest.mark.parametrize("zero_p", [True, False])
@pytest.mark.parametrize("d", [0.8, math.inf])
def test_gsd_as_released_accepts_by_the_cluster_of_fourteen(zero_p, d):
    table = torch.from_numpy(np.random.default_rng(0).normal(0, 0.4, (V + 4, 3)))
    rows = table[4:].numpy()
    rule = ReleasedGrouped(context(TokenLayout.plain(1, 4, V), model=Embedded(table)), d, 0.15, zero_p)
    beyond = 0
    for seed in range(30):
        p, q = drawn(seed, 6 + seed % 15), drawn(seed + 1000, V)
        accepted = rule.acceptance(*(torch.from_numpy(row)[None] for row in (p, q)), torch.arange(V)[None])[0]
        for x in range(V):
            expected = slow_ratio(p, q, x, d, 0.15, rows) if zero_p or p[x] > 0 else 0.0
            assert math.isclose(accepted[x], expected, rel_tol=1e-5), (seed, x)
            beyond += p[x] == 0 and expected > 0
    assert (beyond > 0) == zero_p, "drafts outside top-k are accepted, as there"


@pytest.mark.parametrize("row_ends", [True, False])
def test_lanterns_released_residual_zeroes_the_first_k_plus_1_neighbours(row_ends):
    k, limit = 3, 5.0
    codebook = torch.randn(V, 4, generator=torch.Generator().manual_seed(1))
    layout = TokenLayout.with_row_ends(2, 2, V) if row_ends else TokenLayout.plain(2, 2, V)
    rule = LanternPlusPlus(context(layout, codebook, release), k, limit, "raw")
    relaxed = 0
    for seed in range(20):
        p, q = drawn(seed, V), drawn(seed + 1000, V)
        for x in range(0, V, 5):
            near = sorted((v for v in range(V) if v != x), key=lambda v: float((codebook[v] - codebook[x]).norm()))
            has_any = p[near[0]] <= (limit - 1) * p[x]
            changed = (p if row_ends else q).copy()
            if has_any:
                changed[near[: k + 1]] = 0
            left = np.clip(changed - q if row_ends else p - changed, 0, None)
            expected = left / left.sum() if left.sum() > 0 else p
            got = rule.residual_weights(_tests(p, q, x))[0, 0].numpy()
            np.testing.assert_allclose(got / got.sum(), expected, atol=1e-6)
            relaxed += has_any
    assert relaxed


def _tests(p: np.ndarray, q: np.ndarray, x: int) -> DraftTests:
    fields = dict.fromkeys(DraftTests._fields)
    fields |= {name: torch.from_numpy(row).float()[None, None] for name, row in (("p", p), ("q", q))}
    return DraftTests(**fields | {"draft": torch.tensor([[x]])})


def test_gsd_as_released_is_biased():
    """One draft accepted by its cluster and else replaced from [p - q]+ does not follow p."""
    assert not resolve("gsd-released").lossless
    rule = ReleasedGrouped(context(TokenLayout.plain(1, 4, V)), math.inf, 1.0, True)
    p, q = (torch.from_numpy(drawn(seed, V))[None] for seed in (1, 2))
    accepted = q * rule.acceptance(p, q, torch.arange(V)[None]).clamp(max=1)
    residual = (p - q).clamp(min=0)
    assert (accepted + (1 - accepted.sum()) * residual / residual.sum() - p).abs().sum() / 2 > 0.01


def test_released_horizontal_sampling_takes_the_most_probable_token_of_the_left_neighbour():
    """Slot by slot: the last distribution of the left neighbour, or of its source if it is also fresh; no draw."""
    height, width, start = 3, 4, 5
    history = torch.from_numpy(np.stack([drawn(seed, V) for seed in range(height * width)])).float()[None]
    positions = torch.arange(start, start + 6)[None]
    fresh = torch.tensor([[False, True, True, True, True, True]])
    empty = torch.zeros(1, height * width + 1, dtype=torch.long)
    slots = Slots(torch.tensor([start]), positions, fresh, empty, history, torch.tensor([[3]]))
    tokens, q = left_top1(context(TokenLayout.plain(height, width, V))).fill(slots, Noise([7], V))
    for column, position in enumerate(positions[0].tolist()):
        source = position
        while source > start and source % width:  # position `start` is a draft that was kept
            source -= 1
        if source > start:
            np.testing.assert_allclose(q[0, column], np.full(V, 1 / V), rtol=1e-6)
        elif fresh[0, column]:
            best = int(history[0, source].argmax())
            assert tokens[0, column] == best and q[0, column].tolist() == np.eye(V)[best].tolist()
