"""Tree verification: the longest accepted path from the root.

Siblings are tested in sampling order, each against the residual distribution after rejected siblings (recursive
rejection sampling of SpecInfer and EAGLE). All drafts are tested in parallel and the path is selected afterwards,
without a host sync. Chains have a simpler module, `chain_verification`.
"""

import torch
from torch import Tensor

from specbench.decoding.draft_tree import Routes
from specbench.decoding.interfaces import Proposal, Verification
from specbench.decoding.noise import Noise, Stream
from specbench.decoding.sampling import at, without
from specbench.decoding.verification.ratio_tests import (
    DraftTests,
    FailedTest,
    Verifier,
    draw_after_drafts,
    residual_weights,
)
from specbench.decoding.verification.refinement import Refinement, refined_from


def verify_tree(
    p: Tensor,
    proposal: Proposal,
    tables: Routes,
    verifier: Verifier,
    refinement: Refinement,
    noise: Noise,
    step: Tensor,
) -> Verification:
    """Verify the drafts of a tree, given the target distributions p [B, C, V] of the forward's tokens. `tables`: of the
    proposal's tree. `step`: [B, 1] number of this target forward, per row, which addresses the noise."""
    slots, row = proposal.positions, torch.arange(len(p), device=p.device)[:, None]
    # One uniform per column [B, C], for the draft it consumes; drafts of the same slot have separate coins.
    stream = torch.where(tables.in_trunk, int(Stream.COIN), int(Stream.SIBLING_COIN))
    draw = torch.where(tables.in_trunk, step, step * proposal.max_columns + tables.peer)
    coin = noise.uniform(slots - 1, stream, draw)
    refined, refined_p = torch.zeros_like(proposal.tokens), None
    if refinement.keeps_tail or verifier.compares:
        # Per column, the test of its next draft along the path, a candidate for reuse.
        next_draft, its_coin, depth = proposal.tokens[:, tables.next], coin[:, tables.next], tables.depth + 1
        following = DraftTests.of(p, proposal.q, next_draft, its_coin, slots, depth, tables.has_next)
        refined_p = refined_from(refinement, p, following)
        refined = refinement.refine(p, following, noise, slots, step)
    tests = _tests(p, proposal, tables, verifier, coin)
    verdict = verifier.verify(tests, refined[:, tables.tested_parent])
    drafted, passed = tests.drafted[:, tables.test], (tests.drafted & verdict.accepted)[:, tables.test]
    # A draft is tested if all earlier siblings were rejected.
    tested = drafted & (passed.float() @ tables.before.T == 0)
    accepted = passed & tested
    alive = (~accepted).float() @ tables.ancestors[:, 1:].T == 0
    stop = torch.where(alive, tables.depth, -1).argmax(1)
    first, columns, last = tables.depth[stop], tables.route[stop], stop[:, None]
    # A column without q has no drafts, although it may have drafts in another row of the batch.
    has_drafts = tables.has_children[last] & (proposal.q[row, last] > 0).any(-1)
    failed, places = tests.at(tables.last_test[last]), (row, last)
    token = draw_after_drafts(p[places], failed, has_drafts, verifier, refined[places], noise, slots[places], step)
    drafts = torch.nn.functional.pad(proposal.tokens.gather(1, columns[:, 1:]), (0, 1))
    offset = torch.arange(columns.shape[1], device=stop.device) - first[:, None]
    tokens = torch.where(offset < 0, drafts, refined.gather(1, columns))
    tokens = torch.where(offset == 0, token, tokens)
    reached = alive[:, tables.parent[1:]]
    facts = {name: value.float()[:, tables.test] for name, value in verdict.facts.items()}
    refined_p = None if refined_p is None else refined_p[row, columns]
    return Verification(first, columns, tokens, p[row, columns], tested & reached, accepted & reached, facts, refined_p)


def _tests(p: Tensor, proposal: Proposal, tables: Routes, verifier: Verifier, coin: Tensor) -> DraftTests:
    """Tests of all drafts; siblings are tested against the residual after earlier siblings."""
    p, q = p[:, tables.first_parents], proposal.q[:, tables.first_parents]
    pairs = [(p, q)]
    for level in tables.levels:
        p, q, draft = p[:, level.within], q[:, level.within], proposal.tokens[:, level.earlier]
        failed = FailedTest(p, q, draft, at(q, draft) > 0, level.depth)
        p, q = residual_weights(verifier, failed), without(q, draft)
        p = p / p.sum(-1, keepdim=True)
        pairs.append((p, q))
    p, q = (torch.cat(by_level, 1) for by_level in zip(*pairs, strict=True))
    draft, own_coin = proposal.tokens[:, tables.tested], coin[:, tables.tested]
    return DraftTests.of(p, q, draft, own_coin, proposal.positions[:, tables.tested_parent], tables.tested_depth)
