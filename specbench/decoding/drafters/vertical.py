"""Drafts of a vertical head: each is drawn from the row above, whose features are known, and from the draft before it.

The head knows what is committed, and the drafts before the slot; the distribution that it gives is recorded as q, so
that verification makes the result exact whatever the head has learnt. A draft that a refinement made in the step before
is kept where the tokens that the head looks at are those that the last forward was fed: there the target's own
distribution is the better guess. Whether it is kept depends on earlier slots alone.
"""

from __future__ import annotations

import torch
from torch import Tensor

from specbench.decoding.context import Context
from specbench.decoding.drafters.jacobi import JacobiTree
from specbench.decoding.drafters.lookup import around
from specbench.decoding.drafters.token_init import Init, Uniform
from specbench.decoding.interfaces import Batch, Proposal, Verification
from specbench.decoding.noise import Stream
from specbench.decoding.sampling import draw
from specbench.models.vertical_head import (
    embedded,
    known_features,
    places_before,
    slots_above,
    vertical_head_for,
)


class Vertical(JacobiTree):
    """A chain of `window` - 1 drafts, or a tree with siblings of the first one, as `JacobiTree` has them.

    A sibling branch repeats the chain's next drafts, whose q was made for the chain's first draft, which is known once
    a sibling is tested.
    """

    def __init__(self, context: Context, init: Init, window: int, siblings: int, depth: int, head: str):
        super().__init__(context, Uniform(context), window, siblings, depth)
        self._model = context.model
        self._head = vertical_head_for(context.model, head)
        self._above = slots_above(context.layout).to(context.device)
        self._table = context.model.token_table()
        own = torch.arange(len(self._above), device=context.device)
        right = torch.where(self._above < 0, -1, self._above + 1)
        self._neighbours = torch.stack([own - 1, self._above, right], dim=1)
        """[N + 1, 3] slots whose tokens the head looks at, -1 where there is none."""

    def begin(self, batch: Batch) -> None:
        super().begin(batch)
        rows = len(batch.session.draft_prompt().lengths)
        shape = rows, batch.tokens.shape[1], self._model.feature_size
        self._features = torch.zeros(shape, dtype=self._model.dtype, device=batch.tokens.device)
        """[R, L, d] of the target by slot."""
        self._fed = torch.full_like(batch.tokens, -1)
        """[B, L] stream tokens that the last forward was fed."""

    def propose(self, committed: Tensor, width: int, step: Tensor) -> Proposal:
        proposal = super().propose(committed, width, step)
        self._fed.copy_(self._batch.tokens)
        return proposal

    def observe(self, verification: Verification, positions: Tensor, shift: Tensor, keep_tail: bool) -> None:
        super().observe(verification, positions, shift, keep_tail)
        features = self._batch.session.features
        columns = self._twice(verification.columns)[..., None].expand(-1, -1, features.shape[-1])
        rows = torch.arange(len(features), device=shift.device)[:, None]
        self._features[rows, self._twice(positions)] = features.gather(1, columns)

    def restart(self, rows: Tensor) -> None:
        super().restart(rows)
        self._fed[rows] = -1

    def _fill(self, committed: Tensor, positions: Tensor, step: Tensor) -> Tensor:
        return self._draft(committed, positions, step, super()._fill(committed, positions, step))

    def _draft(self, committed: Tensor, positions: Tensor, step: Tensor, q: Tensor) -> Tensor:
        """Draw the drafts of the slots `positions` [B, D] that are not kept; q [B, D, V] of all, given that of the
        refined ones."""
        if positions.shape[1] == 0:
            return q
        batch, tokens, known = self._batch, self._batch.tokens, self._twice(committed[:, None])
        slots = self._twice(positions)
        features, depth = known_features(self._features, self._above, known, slots), slots - known
        places, exists = places_before(self._above, positions)
        looked_at = self._neighbours[positions.clamp(max=len(self._neighbours) - 1)]
        refined, fed = positions < self._drafted_to[:, None], around(self._fed, looked_at)
        uniform = batch.noise.uniform(positions, Stream.SIBLING, step)
        keeps, recorded = [], []
        for draft in range(positions.shape[1]):
            own = slice(draft, draft + 1)
            slot = positions[:, own]
            words = embedded(self._table, self._model.table_ids(tokens), places[:, own], exists[:, own])
            ahead = self._head(torch.cat([features[:, own], self._twice(words)], dim=-1), depth[:, own])
            proposed = batch.target(batch.session.logits(ahead), slot)
            kept = refined[:, own] & (around(tokens, looked_at[:, own]) == fed[:, own]).all(-1)
            token = draw(proposed, uniform[:, own])
            tokens.scatter_(1, slot, torch.where(kept, tokens.gather(1, slot), token))
            keeps.append(kept)
            recorded.append(proposed)
        return torch.where(torch.cat(keeps, 1)[..., None], q, torch.cat(recorded, 1))

    def _twice(self, columns: Tensor) -> Tensor:
        """[B, K] to [R, K]: unconditional rows have the slots and tokens of the conditional ones."""
        # `repeat` takes several times as long for a few numbers.
        return torch.cat([columns] * (len(self._features) // len(columns)))
