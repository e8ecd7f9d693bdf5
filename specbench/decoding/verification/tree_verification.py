"""Tree verification: the longest accepted path from the root.

Siblings are tested in sampling order, each against the residual distribution after rejected siblings (recursive
rejection sampling of SpecInfer and EAGLE). All drafts are tested in parallel and the path is selected afterwards,
without a host sync. Chains have a simpler module, `chain_verification`.
"""

from __future__ import annotations

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
    """Verify the drafts of a tree, given the target distributions p [B, C, V] of its columns. `tables`: of the
    proposal's tree. `step`: [B, 1] number of this target forward, per row, which addresses the noise."""
    return _TreeVerifier(p, proposal, tables, verifier, noise, step).verify(refinement)


class _TreeVerifier:
    """Verification of a forward: B rows, C columns."""

    def __init__(self, p: Tensor, proposal: Proposal, tables: Routes, verifier: Verifier, noise: Noise, step: Tensor):
        self._p, self._proposal, self._verifier, self._noise, self._step = p, proposal, verifier, noise, step
        self._tables = tables
        self._rows = torch.arange(len(p), device=p.device)
        self._refined = torch.zeros_like(proposal.tokens)

    def verify(self, refinement: Refinement) -> Verification:
        tables, proposal, step = self._tables, self._proposal, self._step
        # One uniform per column [B, C], for the draft it consumes; drafts of the same slot have separate coins.
        stream = torch.where(tables.in_trunk, int(Stream.COIN), int(Stream.SIBLING_COIN))
        draw = torch.where(tables.in_trunk, step, step * proposal.max_columns + tables.peer)
        coin = self._noise.uniform(proposal.positions - 1, stream, draw)
        refined_p = None
        if refinement.keeps_tail or self._verifier.compares:
            # Per column, the test of its next draft along the path, a candidate for reuse.
            next_draft, its_coin, depth = proposal.tokens[:, tables.next], coin[:, tables.next], tables.depth + 1
            slots = proposal.positions
            following = DraftTests.of(self._p, proposal.q, next_draft, its_coin, slots, depth, tables.has_next)
            refined_p = refined_from(refinement, self._p, following)
            self._refined = refinement.refine(self._p, following, self._noise, slots, step)
        tests = self._tests(coin)
        verdict = self._verifier.verify(tests, self._refined[:, tables.tested_parent])
        drafted, passed = tests.drafted[:, tables.test], (tests.drafted & verdict.accepted)[:, tables.test]
        # A draft is tested if all earlier siblings were rejected.
        tested = drafted & (passed.float() @ tables.before.T == 0)
        accepted = passed & tested
        alive = (~accepted).float() @ tables.ancestors[:, 1:].T == 0
        stop = torch.where(alive, tables.depth, -1).argmax(1)
        first, columns = tables.depth[stop], tables.route[stop]
        drafts = torch.nn.functional.pad(proposal.tokens.gather(1, columns[:, 1:]), (0, 1))
        offset = torch.arange(columns.shape[1], device=stop.device) - first[:, None]
        tokens = torch.where(offset < 0, drafts, self._refined.gather(1, columns))
        tokens = torch.where(offset == 0, self._after_the_drafts(stop, tests), tokens)
        reached = alive[:, tables.parent[1:]]
        tested, accepted = tested & reached, accepted & reached
        facts = {name: value.float()[:, tables.test] for name, value in verdict.facts.items()}
        path = self._rows[:, None], columns
        refined_p = None if refined_p is None else refined_p[path]
        return Verification(first, columns, tokens, self._p[path], tested, accepted, facts, refined_p)

    def _tests(self, coin: Tensor) -> DraftTests:
        """Tests of all drafts; siblings are tested against the residual after earlier siblings."""
        tables, proposal = self._tables, self._proposal
        p, q = self._p[:, tables.first_parents], proposal.q[:, tables.first_parents]
        pairs = [(p, q)]
        for level in tables.levels:
            p, q, draft = p[:, level.within], q[:, level.within], proposal.tokens[:, level.earlier]
            failed = FailedTest(p, q, draft, at(q, draft) > 0, level.depth)
            p, q = residual_weights(self._verifier, failed), without(q, draft)
            p = p / p.sum(-1, keepdim=True)
            pairs.append((p, q))
        p, q = (torch.cat(by_level, 1) for by_level in zip(*pairs, strict=True))
        draft, own_coin = proposal.tokens[:, tables.tested], coin[:, tables.tested]
        return DraftTests.of(p, q, draft, own_coin, proposal.positions[:, tables.tested_parent], tables.tested_depth)

    def _after_the_drafts(self, stop: Tensor, tests: DraftTests) -> Tensor:
        """Draw the token [B, 1] of the slot predicted by column `stop` [B], after the test of its last child failed. A
        column without q has no drafts, although it may have drafts in another row of the batch."""
        row, column = self._rows[:, None], stop[:, None]
        has_drafts = self._tables.has_children[column] & (self._proposal.q[row, column] > 0).any(-1)
        return draw_after_drafts(
            self._p[row, column],
            tests.at(self._tables.last_test[column]),
            has_drafts,
            self._verifier,
            self._refined[row, column],
            self._noise,
            self._proposal.positions[row, column],
            self._step,
        )
