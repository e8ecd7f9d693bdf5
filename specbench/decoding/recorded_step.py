"""One step of the draft-and-verify loop as the recorders take it, and the slots that it commits."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from specbench.decoding.draft_tree import Routes
from specbench.decoding.interfaces import Earlier, Proposal, Verification


class Committed(NamedTuple):
    """Slots of one or more steps: the committed ones, or, where selecting them would need a host sync, also the slots
    after them, which a later step writes again. [...] is [S] for a selection and [R, T] without one. V tokens.

    Attributes:
        rows: [S] or [R, 1] row of the batch.
        positions, tokens: [...] stream slot and token.
        p: [..., V] target distribution.
        steps: [S] or [R, 1] number of the forward.
        q, drafted: [..., V] distribution of the first draft tested in each slot, and [...] whether there was one; None
            in a forward without drafts.
        tested: [...] whether that draft was tested.
        q_before, kept: [..., V] that draft's distribution one step before, and [...] whether there was one; None where
            drafts do not outlive a step.
    """

    rows: Tensor
    positions: Tensor
    tokens: Tensor
    p: Tensor
    steps: Tensor
    q: Tensor | None = None
    drafted: Tensor | None = None
    tested: Tensor | None = None
    q_before: Tensor | None = None
    kept: Tensor | None = None


class RecordedStep(NamedTuple):
    """Outcome of one step, or of K consecutive steps of one kind joined. R = K B rows, T slots, C columns.

    Attributes:
        verified, proposal: of the step.
        tables: of the proposal's tree, None for a chain.
        by_depth: `first_drafts_by_depth` of the tree.
        positions: [R, T] stream slots of the verified path.
        steps: [R, 1] number of the forward.
    """

    verified: Verification
    proposal: Proposal
    tables: Routes | None
    by_depth: Tensor
    positions: Tensor
    steps: Tensor

    @property
    def bytes(self) -> int:
        """Memory of the distributions that the step keeps alive."""
        earlier = self.proposal.earlier
        return self.verified.p.nbytes + self.proposal.q.nbytes + (0 if earlier is None else earlier.q.nbytes)

    @property
    def kind(self) -> Hashable:
        """Equal for steps that can be joined."""
        earlier = self.proposal.earlier
        widths = self.positions.shape[1], self.proposal.q.shape[1], earlier and earlier.q.shape[1]
        return self.proposal.tree, tuple(self.verified.facts), widths

    def committed(self, rows: int, select: bool) -> Committed:
        """The slots to record of a batch of `rows` rows B; `select` the committed ones, for which the host waits."""
        verified, proposal = self.verified, self.proposal
        device, (joined, width) = self.positions.device, self.positions.shape
        own, slot = torch.arange(joined, device=device)[:, None], torch.arange(width, device=device)
        if select:
            own, slot = (slot <= verified.first[:, None]).nonzero(as_tuple=True)
            fields = (field[own, slot] for field in (self.positions, verified.tokens, verified.p))
            steps, first = self.steps[own, 0], verified.first[own]
        else:
            fields, steps, first = (self.positions, verified.tokens, verified.p), self.steps, verified.first[:, None]
        seen = Committed(own % rows, *fields, steps)
        if proposal.tokens.shape[1] == 1:
            return seen
        if self.tables is None:  # the last column of a chain has no draft
            columns, drafted = (
                slot.clamp(max=proposal.q.shape[1] - 1),
                (slot < proposal.q.shape[1]).expand(seen.positions.shape),
            )
        else:
            columns = verified.columns[own, slot]
            drafted = self.tables.has_children[columns]
        seen = seen._replace(q=proposal.q[own, columns], drafted=drafted, tested=drafted & (slot <= first))
        if proposal.earlier is None:
            return seen
        before, start, drafts = proposal.earlier
        place = start[own] + slot
        kept = drafted & (slot < drafts[own]) & (place < before.shape[1])
        return seen._replace(q_before=before[own, place.clamp(max=before.shape[1] - 1)], kept=kept)


def join_steps(steps: Sequence[RecordedStep]) -> RecordedStep:
    """Consecutive steps of one `kind` as one of more rows, step by step."""
    if len(steps) == 1:
        return steps[0]
    verified, proposals = [step.verified for step in steps], [step.proposal for step in steps]
    facts = {name: torch.cat([own.facts[name] for own in verified]) for name in verified[0].facts}
    earlier = None
    if proposals[0].earlier is not None:
        earlier = Earlier(*map(torch.cat, zip(*(own.earlier for own in proposals), strict=True)))
    tokens, positions, q = (torch.cat(fields) for fields in zip(*(own[:3] for own in proposals), strict=True))
    return steps[0]._replace(
        # No recorder reads `refined_from`.
        verified=Verification(*map(torch.cat, zip(*(own[:6] for own in verified), strict=True)), facts),
        proposal=proposals[0]._replace(tokens=tokens, positions=positions, q=q, earlier=earlier),
        positions=torch.cat([step.positions for step in steps]),
        steps=torch.cat([step.steps for step in steps]),
    )
