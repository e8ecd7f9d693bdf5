"""Verification of a chain of drafts: speculative sampling (Leviathan et al. 2023, algorithm 1; SJD, algorithm 1).

With D drafts x_0 .. x_{D-1}, drawn from q_0 .. q_{D-1}, and the target distributions p_0 .. p_D of one forward:

    accept x_j with probability a(x_j; p_j, q_j), for every j, as if all earlier drafts were accepted
    n = number of accepted drafts before the first rejection
    n < D:  draw the token of slot n from the residual distribution of p_n and q_n
    n = D:  draw the token of slot n from p_D (bonus token)
    slots after n: refined for the next window

All slots are computed in parallel, without a host sync. The verifier `block` chooses n depending on later drafts, and
accepts the first n drafts; its other steps are as above.
"""

import torch
from torch import Tensor

from specbench.decoding.interfaces import Proposal, Verification
from specbench.decoding.noise import Noise, Stream
from specbench.decoding.sampling import rows_at
from specbench.decoding.verification.ratio_tests import DraftTests, Verifier, draw_after_drafts
from specbench.decoding.verification.refinement import Refinement, refined_from


def verify_chain(
    p: Tensor, proposal: Proposal, verifier: Verifier, refinement: Refinement, noise: Noise, step: Tensor
) -> Verification:
    """Verify the drafts of a chain, given the target distributions p [B, D + 1, V] of the forward's tokens. `step`:
    [B, 1] number of this target forward, per row, which addresses the noise."""
    drafts, positions = proposal.tokens[:, 1:], proposal.positions
    if drafts.shape[1] == 0:
        return _sample(p, positions, noise)
    slot = torch.arange(p.shape[1], device=p.device)
    coin = noise.uniform(positions[:, :-1], Stream.COIN, step)
    # Slot D has no draft and no test; its q is not read.
    tests = DraftTests.of(p[:, :-1], proposal.q[:, : drafts.shape[1]], drafts, coin, positions[:, :-1], slot[1:])
    if refinement.keeps_tail or verifier.compares:
        refined_p = refined_from(refinement, p, tests)
        refined = refinement.refine(p, tests, noise, positions, step)
    else:
        refined, refined_p = torch.zeros_like(positions), None
    verdict = verifier.verify(tests, refined[:, :-1])
    accepted = tests.drafted & verdict.accepted
    first = accepted.cumprod(1).sum(1, keepdim=True)
    token = draw_after_drafts(
        rows_at(p, first),
        verdict.failed(tests, first.clamp(max=drafts.shape[1] - 1)),
        first < drafts.shape[1],
        verifier,
        refined.gather(1, first),
        noise,
        positions.gather(1, first),
        step,
    )
    before = slot[:-1] < first
    tokens = torch.cat([torch.where(before, drafts, refined[:, :-1]), refined[:, -1:]], dim=1).scatter_(1, first, token)
    tested = tests.drafted & (slot[:-1] <= first)
    columns = slot.expand_as(positions)
    return Verification(first.squeeze(1), columns, tokens, p, tested, before, verdict.facts, refined_p)


def _sample(p: Tensor, positions: Tensor, noise: Noise) -> Verification:
    """Draw the token of a forward without drafts from p [B, 1, V], as autoregressive sampling does."""
    token = noise.run_race(p, positions, Stream.TOKEN)
    first = torch.zeros_like(token)
    no_drafts = token[:, :0].bool()
    return Verification(first.squeeze(1), first, token, p, no_drafts, no_drafts, {})
