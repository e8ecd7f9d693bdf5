"""Verification: from the root of a tree of drafts down to the first slot without an accepted one.

At each column the siblings are tested in the order they were drawn, each against what the rejected ones left of p (the
recursive rejection of SpecInfer and EAGLE); a chain is a tree of only children. All columns are tested at once and the
path is read off afterwards, so nothing here waits for the host.
"""

from __future__ import annotations

import torch
from torch import Tensor

from specbench.decoding.draft_tree import Level, Routes
from specbench.decoding.interfaces import Proposal, Verification
from specbench.decoding.noise import Noise, Stream
from specbench.decoding.sampling import at, without
from specbench.decoding.verification.ratio_tests import DraftTests, Verifier
from specbench.decoding.verification.refinement import Resample


def verify_tree(
    p: Tensor, proposal: Proposal, tables: Routes, verifier: Verifier, refine: Resample, noise: Noise, step: Tensor
) -> Verification:
    """Verify the drafts of one forward, given p [B, C, V] of every column and the `tables` of its tree; `step` [B, 1]
    numbers the rows' forwards.
    """
    if not tables.levels:
        return _lone_root(p, proposal, noise)
    return Walker(p, proposal, tables, verifier, noise, step).verification(refine)


def _lone_root(p: Tensor, proposal: Proposal, noise: Noise) -> Verification:
    """The verification of a forward without drafts: one draw from p with the slot's own frozen noise."""
    token = noise.run_race(p, proposal.positions, Stream.TOKEN)
    here = torch.zeros_like(token)
    nothing = torch.zeros_like(token, dtype=torch.bool)
    return Verification(here[:, 0], here, token, p, nothing, nothing, {})


class Walker:
    """The verification of one forward. B rows, C columns."""

    def __init__(self, p: Tensor, proposal: Proposal, tables: Routes, verifier: Verifier, noise: Noise, step: Tensor):
        self._p, self._proposal, self._verifier, self._noise, self._step = p, proposal, verifier, noise, step
        self._tables = tables
        self._rows = torch.arange(len(p), device=p.device)
        self._refined = torch.zeros_like(proposal.tokens)
        self._tested, self._accepted, self._settled = (
            torch.zeros_like(proposal.tokens, dtype=torch.bool) for _ in range(3)
        )
        self._facts: dict[str, Tensor] = {}
        self._tests: list[DraftTests] = []

    def verification(self, refine: Resample) -> Verification:
        tables, tokens = self._tables, self._proposal.tokens
        coin = self._coins()
        if refine.keeps_tail or self._verifier.compares:
            self._refined = refine.refine(self._following(coin), self._noise, self._proposal.positions, self._step)
        for level in tables.levels:
            self._test(level, coin)
        lost = (~self._accepted).float()
        lost[:, 0] = 0
        alive = lost @ tables.ancestors.T == 0
        stop = torch.where(alive, tables.depth, -1).argmax(1)
        first, columns = tables.depth[stop], tables.route[stop]
        drafts = torch.nn.functional.pad(tokens.gather(1, columns[:, 1:]), (0, 1))
        offset = torch.arange(columns.shape[1], device=stop.device) - first[:, None]
        tokens = torch.where(offset < 0, drafts, self._refined.gather(1, columns))
        tokens = torch.where(offset == 0, self._after_the_drafts(stop)[:, None], tokens)
        reached = alive[:, tables.parent]
        p = self._p if tables.is_chain else self._p[self._rows[:, None], columns]
        return Verification(first, columns, tokens, p, self._tested & reached, self._accepted & reached, self._facts)

    def _coins(self) -> Tensor:
        """[B, C] one uniform per column's own draft; drafts for the same slot have coins of their own."""
        tables, step = self._tables, self._step
        own = step * self._proposal.max_columns + tables.peer
        stream = torch.where(tables.in_trunk, int(Stream.COIN), int(Stream.SIBLING_COIN))
        return self._noise.uniform(self._proposal.positions - 1, stream, torch.where(tables.in_trunk, step, own))

    def _following(self, coin: Tensor) -> DraftTests:
        """Per column, the draft that comes next on its route: what its slot's refinement may keep."""
        tables, proposal = self._tables, self._proposal
        drafted = tables.has_next.expand_as(proposal.tokens)
        return DraftTests(
            self._p, proposal.q, proposal.tokens[:, tables.next], drafted, coin[:, tables.next], tables.depth + 1
        )

    def _test(self, level: Level, coin: Tensor) -> None:
        """Test the siblings of one rank, all columns at once."""
        proposal, parents, children = self._proposal, level.parents, level.children
        draft = proposal.tokens[:, children]
        if self._tests:
            elder = self._tests[-1].pick(level.within)
            mass, law = residual_weights(self._verifier, elder), without(elder.q, elder.draft)
            mass = mass / mass.sum(-1, keepdim=True)
        else:
            mass, law = self._p[:, parents], proposal.q[:, parents]
        tests = DraftTests(mass, law, draft, at(law, draft) > 0, coin[:, children], level.depth)
        verdict = self._verifier.verify(tests, self._refined[:, parents])
        self._tested[:, children] = tests.drafted & ~self._settled[:, parents]
        self._accepted[:, children] = self._tested[:, children] & verdict.accepted
        self._settled[:, parents] |= self._accepted[:, children]
        for name, value in verdict.facts.items():
            self._facts.setdefault(name, torch.zeros_like(proposal.tokens, dtype=torch.float32))[:, children] = (
                value.float()
            )
        self._tests.append(tests)

    def _after_the_drafts(self, stop: Tensor) -> Tensor:
        """[B] tokens of the slots that column `stop` [B] predicts: a replacement where drafts failed there, else a
        bonus, which uses the slot's own frozen noise as AR does, so that a lone root is AR.
        """
        rows = self._rows
        position = self._proposal.positions[rows, stop][:, None]
        bonus = self._noise.run_race(self._p[rows, stop][:, None], position, Stream.TOKEN).squeeze(1)
        left = residual_weights(self._verifier, self._failed(stop)).squeeze(1)
        race = self._noise.race(position, Stream.RESIDUAL, self._step).squeeze(1)
        replacement = self._verifier.replace(left, self._refined[rows, stop], race)
        return torch.where(self._tables.has_children[stop], replacement, bonus)

    def _failed(self, stop: Tensor) -> DraftTests:
        """The test [B, 1] of the youngest child of column `stop`; any other one where that is a leaf."""
        tables, rows = self._tables, self._rows
        found: list[Tensor] = []
        for rank, tests in enumerate(self._tests):
            place = tables.place[stop].clamp(max=tests.draft.shape[1] - 1)
            here = tables.last_rank[stop] == rank
            fields = [field[rows, place] for field in tests[:-1]]
            if found:
                fields = [
                    torch.where(here.view(-1, *[1] * (new.dim() - 1)), new, old)
                    for new, old in zip(fields, found, strict=True)
                ]
            found = fields
        return DraftTests(*(field[:, None] for field in found), (tables.depth[stop] + 1)[:, None])


def residual_weights(verifier: Verifier, tests: DraftTests) -> Tensor:
    """[B, K, V] unnormalised p after a rejection; p itself where no draft stood to be rejected."""
    return torch.where(tests.drafted[..., None], verifier.residual_weights(tests), tests.p)
