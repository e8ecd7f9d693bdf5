"""Block verification agrees with its rule, written out one draft at a time in float64.

It concerns several modules: verification.ratio_tests and chain_verification, and the audit.
"""

import numpy as np
import pytest
import torch
from planted_bugs import plant

from specbench.checks.audit_settings import AuditSetting
from specbench.checks.divergence import AUDIT_LEVEL, p_value
from specbench.checks.enumerable_model import EnumerableModel
from specbench.checks.losslessness import observe
from specbench.decoding.build import build
from specbench.decoding.draft_tree import chain
from specbench.decoding.interfaces import Proposal
from specbench.decoding.loop import decode
from specbench.decoding.noise import Noise, Stream
from specbench.decoding.verification.chain_verification import verify_chain
from specbench.decoding.verification.ratio_tests import Verdict, joint_ratio
from specbench.errors import SpecbenchError
from specbench.models.interface import TokenLayout
from specbench.prompts import Request
from specbench.specs.presets import resolve
from specbench.specs.run_spec import Sampling

ROWS, DRAFTS, VOCAB, LENGTH = 600, 6, 5, 14
SETTINGS = (
    AuditSetting("12 tokens of 2, window 3", TokenLayout.plain(3, 4, 2), window=3),
    AuditSetting("16 tokens of 2, window 4", TokenLayout.plain(4, 4, 2), window=4),
)


def chains(seed=0):
    """Target distributions [B, D + 1, V] near and far from q, drafts drawn from q, and windows beyond the end."""
    draw = torch.Generator().manual_seed(seed)
    p = torch.randn(ROWS, DRAFTS + 1, VOCAB, generator=draw).mul(1.5).softmax(-1)
    near = torch.rand(ROWS, 1, 1, generator=draw)
    q = near * p[:, :-1] + (1 - near) * torch.randn(ROWS, DRAFTS, VOCAB, generator=draw).mul(1.5).softmax(-1)
    # Tokens outside top-k.
    p = torch.where(p < 0.03, 0, p)
    p = p / p.sum(-1, keepdim=True)
    tokens = torch.multinomial(q.flatten(0, 1), 1, generator=draw).view(ROWS, -1)
    start = torch.randint(1, LENGTH, (ROWS, 1), generator=draw)
    positions = start + torch.arange(DRAFTS + 1)
    return p, Proposal(torch.nn.functional.pad(tokens, (1, 0)), positions, q, chain(DRAFTS + 1), DRAFTS + 1)


def verified(name, options=None):
    """Outcome of a step, with the coins [B, D] that it used."""
    p, proposal = chains()
    model = EnumerableModel(TokenLayout.plain(1, LENGTH, VOCAB))
    method = build(resolve(name, options or {}), model)
    noise, step = Noise(range(ROWS), VOCAB), torch.ones(ROWS, 1, dtype=torch.long)
    coins = noise.uniform(proposal.positions[:, :-1], Stream.COIN, step)
    outcome = verify_chain(p, proposal, method.verifier, method.refinement, noise, step)
    return p.double().numpy(), proposal, coins.numpy(), outcome


def slow_block(p, q, x, u):
    """Accepted drafts and the weights of the next token, by algorithm 2 of the paper."""
    reach, last, drafts = 1.0, (0, p[0] - q[0] if len(x) else p[0]), len(x)
    for i in range(1, drafts + 1):
        reach = min(1.0, reach * p[i - 1][x[i - 1]] / q[i - 1][x[i - 1]])
        if i == drafts:
            h, weights = reach, p[drafts]
        else:
            weights = np.maximum(reach * p[i] - q[i], 0)
            h = weights.sum() / (weights.sum() + 1 - reach) if weights.sum() + 1 - reach > 0 else 1.0
        if u[i - 1] < h:
            last = (i, weights)
    return last[0], np.maximum(last[1], 0)


def inside(proposal, row):
    """Number of drafts of a row within the image."""
    return max(0, min(DRAFTS, LENGTH - int(proposal.positions[row, 0])))


def test_block_verification_is_the_papers_algorithm():
    p, proposal, coins, outcome = verified("sjd-block")
    q, x = proposal.q.double().numpy(), proposal.tokens[:, 1:].numpy()
    seen = set()
    for row in range(ROWS):
        drafts = inside(proposal, row)
        n, weights = slow_block(p[row, : drafts + 1], q[row, :drafts], x[row, :drafts], coins[row])
        assert outcome.first[row] == n
        position = proposal.positions[row : row + 1, n : n + 1]
        if int(position) < LENGTH:
            stream, draw = (Stream.TOKEN, 0) if n == drafts == DRAFTS else (Stream.RESIDUAL, 1)
            race = Noise([row], VOCAB).race(position, stream, draw)[0, 0].numpy()
            assert outcome.tokens[row, n] == (weights / race).argmax()
        seen.add((n, drafts))
    assert {n for n, drafts in seen if drafts == DRAFTS} == set(range(DRAFTS + 1))
    assert {drafts for _, drafts in seen} == set(range(1, DRAFTS + 1))


def test_a_residual_without_the_joint_ratio_is_noticed(monkeypatch):
    """The bug changes the joint distribution too little for the audit's 20,000 images, so it is planted here."""
    plant(monkeypatch, Verdict.failed, lambda plain, self, *args: plain(self._replace(scale=None), *args))
    with pytest.raises(AssertionError):
        test_block_verification_is_the_papers_algorithm()


def test_the_example_of_the_block_verification_paper():
    """Two tokens, q = (1/3, 2/3) throughout and p = (2/3, 1/3): 11/9 accepted drafts of two instead of 10/9."""
    p, q, rows = torch.tensor([2 / 3, 1 / 3]), torch.tensor([1 / 3, 2 / 3]), 60_000
    drafts = torch.multinomial(q.expand(rows, 2), 2, True, generator=torch.Generator().manual_seed(0))
    tokens, positions = torch.nn.functional.pad(drafts, (1, 0)), torch.arange(1, 4).expand(rows, -1)
    proposal = Proposal(tokens, positions, q.expand(rows, 2, 2), chain(3), 3)
    model, noise, step = EnumerableModel(TokenLayout.plain(1, 4, 2)), Noise(range(rows), 2), torch.ones(rows, 1).long()
    for name, accepted in (("sjd", 10 / 9), ("sjd-block", 11 / 9)):
        method = build(resolve(name), model)
        outcome = verify_chain(p.expand(rows, 3, 2), proposal, method.verifier, method.refinement, noise, step)
        assert abs(outcome.first.double().mean() - accepted) < 0.015


def test_the_joint_ratio_is_the_recursion():
    r = torch.rand(200, 9, generator=torch.Generator().manual_seed(0), dtype=torch.float64) * 2
    r[::7, 4] = 0
    ratio, reach = joint_ratio(r), torch.ones(200, dtype=torch.float64)
    for i in range(9):
        reach = (reach * r[:, i]).clamp(max=1)
        torch.testing.assert_close(ratio[:, i], reach)


@pytest.mark.parametrize("name", ["sjd-block", pytest.param("eagle-block", marks=pytest.mark.slow)])
def test_the_exact_ones_keep_the_joint_distribution_of_long_images(name):
    for setting in SETTINGS:
        assert p_value(observe(setting, resolve(name), 20_000, seed=0)) > AUDIT_LEVEL


@pytest.mark.slow
def test_a_block_beside_a_coupled_tail_does_not():
    """The combination that plans reject. Its bias is small; the model is chosen to show it, with 25x the images."""
    setting = AuditSetting("12 w3", TokenLayout.plain(3, 4, 2), window=3)
    counts = {
        refine: observe(setting, resolve("sjd", {"verifier": "block", "refine": refine, "any-tail": True}), 500_000, 0)
        for refine in ("couple", "resample")
    }
    assert p_value(counts["couple"]) < AUDIT_LEVEL / 100
    assert p_value(counts["resample"]) > AUDIT_LEVEL


def test_a_block_of_one_draft_is_the_usual_test():
    model = EnumerableModel(TokenLayout.with_row_ends(3, 4, 3))
    requests = [Request("", "p", sample) for sample in range(200)]

    def tokens(name):
        images = decode(model, requests, resolve(name, {"window": 2}), Sampling(2.0), 1, render=False)
        return np.stack([image.tokens for image in images])

    assert np.array_equal(tokens("sjd-block"), tokens("sjd"))


def test_an_image_does_not_depend_on_how_far_the_others_are():
    model = EnumerableModel(TokenLayout.plain(3, 4, 3))
    requests = [Request("", "p", sample) for sample in range(12)]
    spec = resolve("sjd-block", {"window": 5})
    together = decode(model, requests, spec, Sampling(1.0), 1, render=False)
    alone = [decode(model, [request], spec, Sampling(1.0), 1, render=False)[0] for request in requests]
    assert [image.nfe for image in together] == [image.nfe for image in alone]
    for image, other in zip(together, alone, strict=True):
        assert np.array_equal(image.tokens, other.tokens)


@pytest.mark.parametrize("refine", ["couple", "gumbel", "reuse"])
def test_drafts_that_were_looked_at_must_not_be_kept(refine):
    chosen = {"verifier": "block", "refine": refine}
    with pytest.raises(SpecbenchError, match=f"--verifier block looks at later drafts, which --refine {refine}"):
        resolve("sjd", chosen)
    assert not resolve("sjd", chosen | {"any-tail": True}).lossless


@pytest.mark.parametrize(
    ("name", "options"),
    [("sjd-pac", {"verifier": "block", "refine": "resample"}), ("eagle", {"verifier": "block"}),
     ("eagle-block", {"tree": "0 1"}), ("adt-tree", {"verifier": "block"})],
)  # fmt: skip
def test_branches_are_refused(name, options):
    with pytest.raises(SpecbenchError, match="verifies a chain"):
        resolve(name, options)
