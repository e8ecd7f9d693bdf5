"""Inputs of recorders: steps of the draft-and-verify loop, and the slots that they commit."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from specbench.decoding.draft_tree import Routes
from specbench.decoding.interfaces import Proposal, Verification
from specbench.decoding.sampling import at, rows_at
from specbench.models.transformer.host_sync import to_host


class Committed(NamedTuple):
    """Committed slots of one or more steps. If selecting them would need a host sync, all slots are included; later
    steps overwrite the uncommitted slots. [...] is [S] for selected slots and [R, T] for all slots. V tokens."""

    rows: Tensor  # [S] or [R, 1] row of the batch
    # positions, tokens: [...] stream slot and token
    positions: Tensor
    tokens: Tensor
    p: Tensor  # [..., V] target distribution
    steps: Tensor  # [S] or [R, 1] number of the forward
    # q, drafted: [..., V] distribution of the first draft tested in each slot, and [...] whether the slot has a draft;
    # None in a forward without drafts
    q: Tensor | None = None
    drafted: Tensor | None = None
    tested: Tensor | None = None  # [...] whether that draft was tested
    # q_before, kept: [..., V] that draft's distribution one step before, and [...] whether the slot had a draft then;
    # None if drafts do not outlive a step
    q_before: Tensor | None = None
    kept: Tensor | None = None


class StepOutcome(NamedTuple):
    """A step without its distributions, or K joined steps of the same kind. R = K B rows, T slots, C columns."""

    # first, columns, tokens, tested, accepted: as in the step's `Verification`
    first: Tensor
    columns: Tensor
    tokens: Tensor
    tested: Tensor
    accepted: Tensor
    predicted: Tensor  # [R, C] stream slots of the columns
    positions: Tensor  # [R, T] stream slots of the verified path
    steps: Tensor  # [R, 1] number of the forward
    drafted: Tensor  # [R, C'] whether a draft follows each column: C' is C for a tree, C - 1 for a chain
    facts: dict[str, Tensor]  # facts of the step's `Verification`
    tables: Routes | None  # index tables of the proposal's tree, None for a chain
    by_depth: Tensor  # `first_drafts_by_depth` of the tree

    def have_drafts(self, row: Tensor, slot: Tensor) -> Tensor:
        """Return whether slots `slot` of the verified paths of rows `row` have a draft. The two are broadcast."""
        if self.tables is None:  # the last column of a chain has no draft
            drafts = self.drafted.shape[1]
            return (slot < drafts) & self.drafted[row, slot.clamp(max=drafts - 1)]
        return self.drafted[row, self.columns[row, slot]]


class RecordedStep(NamedTuple):
    """One step. B rows, T slots, C tokens of the forward (columns)."""

    # verified, proposal: outcome and input of the step
    verified: Verification
    proposal: Proposal
    # tables, by_depth, positions, steps: as in `StepOutcome`
    tables: Routes | None
    by_depth: Tensor
    positions: Tensor
    steps: Tensor

    @property
    def outcome(self) -> StepOutcome:
        verified, proposal, tables = self.verified, self.proposal, self.tables
        # A first draft with q = 0 is no draft.
        if tables is None:
            drafted = at(proposal.q[:, : proposal.tokens.shape[1] - 1], proposal.tokens[:, 1:]) > 0
        else:
            drafted = (at(proposal.q, proposal.tokens[:, tables.next]) > 0) & tables.has_children
        return StepOutcome(
            first=verified.first,
            columns=verified.columns,
            tokens=verified.tokens,
            tested=verified.tested,
            accepted=verified.accepted,
            predicted=proposal.positions,
            positions=self.positions,
            steps=self.steps,
            drafted=drafted,
            facts=verified.facts,
            tables=tables,
            by_depth=self.by_depth,
        )

    def every_slot(self) -> Committed:
        """Return all slots of the step, committed or not."""
        verified, proposal, outcome = self.verified, self.proposal, self.outcome
        device, (rows, width) = self.positions.device, self.positions.shape
        row, slot = torch.arange(rows, device=device)[:, None], torch.arange(width, device=device)
        seen = Committed(row, self.positions, verified.tokens, verified.p, self.steps)
        if outcome.predicted.shape[1] == 1:  # no drafts
            return seen
        columns = slot.clamp(max=outcome.drafted.shape[1] - 1) if self.tables is None else verified.columns
        drafted = outcome.have_drafts(row, slot)
        tested = drafted & (slot <= verified.first[:, None])
        seen = seen._replace(q=proposal.q[row, columns], drafted=drafted, tested=tested)
        if proposal.earlier is None:
            return seen
        before, start, drafts = proposal.earlier
        place = start[:, None] + slot
        kept = drafted & (slot < drafts[:, None]) & (place < before.shape[1])
        return seen._replace(q_before=before[row, place.clamp(max=before.shape[1] - 1)], kept=kept)

    def waiting(self) -> WaitingStep:
        """Copy the distributions of the committed slots only. The host waits for the number of these slots."""
        verified, q, tree, earlier = self.verified, self.proposal.q, self.proposal.tree, self.proposal.earlier
        width = max(to_host(verified.first)) + 1
        kind = tree, tuple(verified.facts), verified.p.shape[1], earlier is None
        waiting = WaitingStep(kind, self.outcome, _first_slots(verified.p, width))
        if not q.shape[1]:
            return waiting
        q = _first_slots(q, width) if self.tables is None else rows_at(q, verified.columns[:, :width])
        if earlier is None:
            return waiting._replace(q=q)
        before, start, drafts = earlier
        starts = to_host(start)
        skipped = min(*starts, before.shape[1] - 1)
        read = before[:, skipped : max(starts) + width].clone()
        return waiting._replace(q=q, before=Before(read, start, drafts, skipped, before.shape[1]))


class Before(NamedTuple):
    """The part of an `Earlier` that a `WaitingStep` keeps."""

    q: Tensor  # [B, M, V] distributions of some of the drafts
    # start, drafts: [B] as in `Earlier`
    start: Tensor
    drafts: Tensor
    skipped: int  # number of drafts before the first draft in `q`
    reach: int  # number of drafts in the `Earlier`


class WaitingStep(NamedTuple):
    """A step with the distributions of its first M <= T slots, which include all committed slots."""

    kind: Hashable  # steps of equal kind can be joined
    outcome: StepOutcome  # the step without its distributions
    # p, q: [B, M, V] target distribution of each slot, and q of its first tested draft; the last slot of a chain has no
    # draft
    p: Tensor
    q: Tensor | None = None
    before: Before | None = None  # distributions of the drafts one step before


def committed_slots(steps: Sequence[WaitingStep], rows: int) -> tuple[StepOutcome, Committed]:
    """Join consecutive steps of the same kind, of a batch of `rows`. Also return the slots that they commit."""
    outcomes = [step.outcome for step in steps]
    facts = {name: torch.cat([step.facts[name] for step in outcomes]) for name in outcomes[0].facts}
    outcome = StepOutcome(
        first=torch.cat([step.first for step in outcomes]),
        columns=torch.cat([step.columns for step in outcomes]),
        tokens=torch.cat([step.tokens for step in outcomes]),
        tested=torch.cat([step.tested for step in outcomes]),
        accepted=torch.cat([step.accepted for step in outcomes]),
        predicted=torch.cat([step.predicted for step in outcomes]),
        positions=torch.cat([step.positions for step in outcomes]),
        steps=torch.cat([step.steps for step in outcomes]),
        drafted=torch.cat([step.drafted for step in outcomes]),
        facts=facts,
        tables=outcomes[0].tables,
        by_depth=outcomes[0].by_depth,
    )
    slot = torch.arange(outcome.positions.shape[1], device=outcome.first.device)
    row, slot = (slot <= outcome.first[:, None]).nonzero(as_tuple=True)
    positions, tokens = outcome.positions[row, slot], outcome.tokens[row, slot]
    p = _rows_of([step.p for step in steps], row, slot)
    seen = Committed(row % rows, positions, tokens, p, outcome.steps[row, 0])
    if outcome.predicted.shape[1] == 1:  # no drafts
        return outcome, seen
    drafted = outcome.have_drafts(row, slot)
    seen = seen._replace(q=_rows_of([step.q for step in steps], row, slot), drafted=drafted, tested=drafted)
    if not (befores := [step.before for step in steps if step.before]):
        return outcome, seen
    start, drafts = (torch.cat([getattr(each, name) for each in befores])[row] for name in ("start", "drafts"))
    sizes = torch.tensor([[each.skipped, each.reach] for each in befores]).repeat_interleave(rows, 0)
    skipped, reach = sizes[row].unbind(1)
    place = start + slot
    q_before = _rows_of([before.q for before in befores], row, place - skipped)
    return outcome, seen._replace(q_before=q_before, kept=drafted & (slot < drafts) & (place < reach))


def _first_slots(distributions: Tensor, width: int) -> Tensor:
    """Copy the first slots of `distributions` [B, T, V], so that the rest can be freed. No copy if all are kept."""
    return distributions if width == distributions.shape[1] else distributions[:, :width].clone()


def _rows_of(tables: Sequence[Tensor], row: Tensor, slot: Tensor) -> Tensor:
    """Select rows [S, V] of `tables`, each [B, M, V] with a different M. `row` [S] counts the rows of all tables; a
    `slot` [S] past a table's end selects its last slot."""
    sizes = torch.tensor([table.shape[1] for table in tables]).repeat_interleave(len(tables[0]))
    start = sizes.cumsum(0) - sizes
    chosen = start[row] + slot.minimum(sizes[row] - 1)
    return torch.cat([table.flatten(0, 1) for table in tables]).index_select(0, chosen)
