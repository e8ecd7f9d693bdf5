"""Chain verification agrees with the paper's algorithm, and with tree verification of a tree of only children; values
of a proposal in slots without a draft have no effect."""

import numpy as np
import pytest
import torch

from specbench.checks.enumerable_model import EnumerableModel
from specbench.decoding import loop as loop_module
from specbench.decoding.build import build
from specbench.decoding.draft_tree import chain, routes
from specbench.decoding.drafters.eagle import Eagle
from specbench.decoding.drafters.jacobi import Jacobi
from specbench.decoding.interfaces import Proposal
from specbench.decoding.loop import decode
from specbench.decoding.noise import Noise
from specbench.decoding.verification.chain_verification import verify_chain
from specbench.decoding.verification.refinement import Couple
from specbench.decoding.verification.tree_verification import verify_tree
from specbench.models.interface import TokenLayout
from specbench.prompts import Request
from specbench.specs.components import DRAFTERS
from specbench.specs.presets import PRESETS, resolve
from specbench.specs.run_spec import Sampling

ROWS, WIDTH, VOCAB = 400, 5, 6
CHAINS = [
    *((name, {}) for name in ("jacobi", "sjd", "sjd-norefine", "sjd++", "gsd", "amplify", "add", "scd-mc", "scd-gs")),
    ("predictive", {}),
    ("sjd", {"residual": "optimal"}),
    ("gsd", {"residual": "optimal", "refine": "couple"}),
    ("jacobi", {"refine": "reuse"}),
    ("sjd", {"verifier": "match", "refine": "restart"}),
    ("sjd", {"verifier": "omega", "schedule": "exponential", "delta": 1.5, "residual": "optimal"}),
    ("sjd", {"verifier": "lantern", "residual": "lantern"}),
]


def inputs(seed: int, impossible: int):
    """Target distributions and a proposal of a chain. Some q are 0 for some tokens; the drafts of the last `impossible`
    rows may be such tokens, unlike any draft of a decoder."""
    draw = torch.Generator().manual_seed(seed)
    p = torch.randn(ROWS, WIDTH, VOCAB, generator=draw).mul(2).softmax(-1)
    q = torch.randn(ROWS, WIDTH - 1, VOCAB, generator=draw).mul(2)
    q = q.masked_fill(torch.rand(q.shape, generator=draw) < 0.2, -torch.inf)
    q[..., 0] = q[..., 0].clamp(min=0)
    q = q.softmax(-1)
    close = torch.rand(ROWS, WIDTH - 1, 1, generator=draw) < 0.5
    q = torch.where(close, p[:, :-1], q)
    tokens = torch.randint(VOCAB, (ROWS, WIDTH), generator=draw)
    probable = torch.multinomial(q.flatten(0, 1), 1, generator=draw).view(ROWS, -1)
    tokens[: ROWS - impossible, 1:] = probable[: ROWS - impossible]
    positions = torch.randint(1, 50, (ROWS, 1), generator=draw) + torch.arange(WIDTH)
    step = torch.randint(1, 9, (ROWS, 1), generator=draw)
    return p, Proposal(tokens, positions, q, chain(WIDTH), WIDTH), step


@pytest.mark.parametrize(("name", "options"), CHAINS, ids=lambda value: value if isinstance(value, str) else "-")
def test_a_chain_is_verified_as_a_tree_of_only_children(name, options):
    model = EnumerableModel(TokenLayout.plain(1, 4, VOCAB))
    method = build(resolve(name, {"window": WIDTH, **options}), model)
    for seed in range(3):
        p, proposal, step = inputs(seed, impossible=0 if isinstance(method.refinement, Couple) else 40)
        noise = Noise([seed * ROWS + row for row in range(ROWS)], VOCAB)
        chained = verify_chain(p, proposal, method.verifier, method.refinement, noise, step)
        as_tree = proposal._replace(q=torch.nn.functional.pad(proposal.q, (0, 0, 0, 1), value=torch.nan))
        tables = routes(proposal.tree, torch.device("cpu"))
        tree = verify_tree(p, as_tree, tables, method.verifier, method.refinement, noise, step)
        assert set(chained.first.tolist()) == set(range(WIDTH)), "every number of accepted drafts must occur"
        for tensor, other in zip(chained[:6], tree[:6], strict=True):
            assert torch.equal(tensor, other)
        assert chained.refined_from is None and tree.refined_from is None
        assert chained.facts.keys() == tree.facts.keys()
        for fact, value in chained.facts.items():
            assert torch.equal(value[chained.tested].float(), tree.facts[fact][tree.tested])


def test_a_chain_follows_the_algorithm_box():
    """Row by row in plain Python: first rejection, residual distribution or bonus token, compared by statistics."""
    p, q = torch.tensor([0.5, 0.3, 0.2]), torch.tensor([0.2, 0.2, 0.6])
    rows, generator = 60_000, torch.Generator().manual_seed(0)
    drafts = torch.multinomial(q.expand(rows, 3), 2, replacement=True, generator=generator)
    tokens = torch.cat([torch.zeros(rows, 1, dtype=torch.long), drafts], dim=1)
    proposal = Proposal(tokens, torch.arange(1, 4).expand(rows, -1), q.expand(rows, 2, 3), chain(3), 3)
    method = build(resolve("sjd", {"window": 3}), EnumerableModel(TokenLayout.plain(1, 4, 3)))
    noise, step = Noise(range(rows), 3), torch.ones(rows, 1, dtype=torch.long)
    verified = verify_chain(p.expand(rows, 3, 3), proposal, method.verifier, method.refinement, noise, step)
    accepts = float(torch.minimum(p, q).sum())
    expected = np.array([1 - accepts, accepts * (1 - accepts), accepts**2])
    shares = np.bincount(verified.first, minlength=3) / rows
    np.testing.assert_allclose(shares, expected, atol=0.008)
    for slot in range(3):  # every committed token follows p, whether accepted or replaced
        committed = verified.tokens[verified.first >= slot, slot]
        np.testing.assert_allclose(np.bincount(committed, minlength=3) / len(committed), p, atol=0.012)


IN_WINDOWS = [name for name in PRESETS if "image_rows" not in DRAFTERS[resolve(name).drafter].memory]


@pytest.mark.parametrize("poison", [float("nan"), "stale"])
@pytest.mark.parametrize(
    "name", [name for name in PRESETS if "image_rows" not in DRAFTERS[resolve(name).drafter].memory]
)
def test_q_of_a_column_without_a_draft_changes_nothing(name, poison, monkeypatch):
    model = EnumerableModel(TokenLayout.with_row_ends(2, 3, 3), ("a", "b"))
    requests = [Request("ab"[index % 2], "p", index) for index in range(48)]
    spec = resolve(name, {"window": 3} if "window" in PRESETS[name].defaults or name[:3] in ("sjd", "gsd") else {})

    def images():
        return decode(model, requests, spec, Sampling(2.0, 0.9), 3, render=False)

    expected, poisoned = images(), 0

    def poison_in(propose):
        def proposed(self, *args):
            nonlocal poisoned
            proposal = propose(self, *args)
            if proposal.tree.is_chain:
                # The chain's last column has no draft after it, and no q at all.
                assert proposal.q.shape[1] == proposal.tokens.shape[1] - 1
                poisoned += 1
                return proposal
            tables = routes(proposal.tree, proposal.q.device)
            ends = ~tables.has_children if isinstance(self, Eagle) else ~tables.has_next
            poisoned += int(ends.sum())
            garbage = proposal.q.roll(1, dims=1) if poison == "stale" else torch.tensor(poison)
            return proposal._replace(q=torch.where(ends[:, None], garbage, proposal.q))

        return proposed

    for drafter in (Jacobi, Eagle):
        monkeypatch.setattr(drafter, "propose", poison_in(drafter.propose))
    for image, other in zip(images(), expected, strict=True):
        np.testing.assert_array_equal(image.tokens, other.tokens)
        assert (image.nfe, image.facts) == (other.nfe, other.facts)
    assert poisoned or name in ("ar", "replace")


def test_trees_and_chains_go_through_their_own_verification(monkeypatch):
    model, calls = EnumerableModel(TokenLayout.plain(2, 3, 3)), []
    for name in ("verify_chain", "verify_tree"):
        honest = getattr(loop_module, name)
        monkeypatch.setattr(loop_module, name, lambda *args, f=honest, n=name: calls.append(n) or f(*args))
    for decoder, used in (("ar", {"verify_chain"}), ("sjd", {"verify_chain"}), ("sjd-pac", {"verify_tree"})):
        calls.clear()
        decode(model, [Request("", "p")], resolve(decoder), Sampling(1.0), 0, render=False)
        assert used <= set(calls) and ("verify_tree" in used or "verify_tree" not in calls)
