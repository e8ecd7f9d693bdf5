"""Tree verification: the longest accepted path from the root.

Siblings are tested in sampling order, each against the residual distribution after the rejected ones (recursive
rejection sampling of SpecInfer and EAGLE). All columns are tested in parallel and the path is selected afterwards,
without a host sync. Chains have a simpler module, `chain_verification`.
"""

from __future__ import annotations

import torch
from torch import Tensor

from specbench.decoding.draft_tree import Level, Routes
from specbench.decoding.interfaces import Proposal, Verification
from specbench.decoding.noise import Noise, Stream
from specbench.decoding.sampling import without
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
    """Verify the drafts of a tree, given the target distributions p [B, C, V] of its columns.

    Args:
        tables: of the proposal's tree.
        step: [B, 1] number of this target forward, per row; it addresses the noise.
    """
    return _TreeVerifier(p, proposal, tables, verifier, noise, step).verify(refinement)


class _TreeVerifier:
    """Verification of one forward: B rows, C columns."""

    def __init__(self, p: Tensor, proposal: Proposal, tables: Routes, verifier: Verifier, noise: Noise, step: Tensor):
        self._p, self._proposal, self._verifier, self._noise, self._step = p, proposal, verifier, noise, step
        self._tables = tables
        self._rows = torch.arange(len(p), device=p.device)
        nothing = torch.zeros_like(proposal.tokens, dtype=torch.bool)
        self._refined = torch.zeros_like(proposal.tokens)
        self._tested, self._accepted, self._settled = nothing, nothing.clone(), nothing.clone()
        self._facts: dict[str, Tensor] = {}
        self._tests: list[DraftTests] = []

    def verify(self, refinement: Refinement) -> Verification:
        tables, proposal = self._tables, self._proposal
        coin = self._coins()
        refined_p = None
        if refinement.keeps_tail or self._verifier.compares:
            following = self._following(coin)
            refined_p = refined_from(refinement, self._p, following)
            self._refined = refinement.refine(self._p, following, self._noise, proposal.positions, self._step)
        for level in tables.levels:
            self._test(level, coin)
        rejected = (~self._accepted).float()
        rejected[:, 0] = 0
        alive = rejected @ tables.ancestors.T == 0
        stop = torch.where(alive, tables.depth, -1).argmax(1)
        first, columns = tables.depth[stop], tables.route[stop]
        drafts = torch.nn.functional.pad(proposal.tokens.gather(1, columns[:, 1:]), (0, 1))
        offset = torch.arange(columns.shape[1], device=stop.device) - first[:, None]
        tokens = torch.where(offset < 0, drafts, self._refined.gather(1, columns))
        tokens = torch.where(offset == 0, self._after_the_drafts(stop), tokens)
        reached = alive[:, tables.parent]
        tested, accepted = ((found & reached)[:, 1:] for found in (self._tested, self._accepted))
        facts = {name: value[:, 1:] for name, value in self._facts.items()}
        path = self._rows[:, None], columns
        refined_p = None if refined_p is None else refined_p[path]
        return Verification(first, columns, tokens, self._p[path], tested, accepted, facts, refined_p)

    def _coins(self) -> Tensor:
        """One uniform per column [B, C], for the draft it consumes; drafts of the same slot have separate coins."""
        tables, step = self._tables, self._step
        own = step * self._proposal.max_columns + tables.peer
        stream = torch.where(tables.in_trunk, int(Stream.COIN), int(Stream.SIBLING_COIN))
        return self._noise.uniform(self._proposal.positions - 1, stream, torch.where(tables.in_trunk, step, own))

    def _following(self, coin: Tensor) -> DraftTests:
        """Per column, the test of its next draft along the path (candidate for reuse by the refinement)."""
        tables, proposal = self._tables, self._proposal
        next_draft, depth = proposal.tokens[:, tables.next], tables.depth + 1
        slots = proposal.positions
        return DraftTests.of(self._p, proposal.q, next_draft, coin[:, tables.next], slots, depth, tables.has_next)

    def _test(self, level: Level, coin: Tensor) -> None:
        """Test the siblings with one sibling index, in all columns in parallel."""
        proposal, parents, children = self._proposal, level.parents, level.children
        if self._tests:
            earlier = self._tests[-1].failed(level.within)
            p, q = residual_weights(self._verifier, earlier), without(earlier.q, earlier.draft)
            p = p / p.sum(-1, keepdim=True)
        else:
            p, q = self._p[:, parents], proposal.q[:, parents]
        slots = proposal.positions[:, parents]
        tests = DraftTests.of(p, q, proposal.tokens[:, children], coin[:, children], slots, level.depth)
        verdict = self._verifier.verify(tests, self._refined[:, parents])
        tested = tests.drafted & ~self._settled[:, parents]
        accepted = tested & verdict.accepted
        self._tested[:, children], self._accepted[:, children] = tested, accepted
        self._settled[:, parents] |= accepted
        for name, value in verdict.facts.items():
            facts = self._facts.setdefault(name, torch.zeros_like(proposal.tokens, dtype=torch.float32))
            facts[:, children] = value.float()
        self._tests.append(tests)

    def _after_the_drafts(self, stop: Tensor) -> Tensor:
        """Draw the token [B, 1] of the slot predicted by column `stop` [B]."""
        row, column = self._rows[:, None], stop[:, None]
        return draw_after_drafts(
            self._p[row, column],
            self._last_failed(column),
            self._tables.has_children[column],
            self._verifier,
            self._refined[row, column],
            self._noise,
            self._proposal.positions[row, column],
            self._step,
        )

    def _last_failed(self, stop: Tensor) -> FailedTest:
        """Test [B, 1] of the last child of column `stop` [B, 1]; arbitrary if `stop` is a leaf."""
        tables = self._tables
        found: FailedTest | None = None
        for rank, tests in enumerate(self._tests):
            own = tests.at(tables.place[stop].clamp(max=tests.draft.shape[1] - 1))
            here = tables.last_rank[stop] == rank
            found = own if found is None else own.where(here, found)
        return found._replace(depth=tables.depth[stop] + 1)
