"""Drafting with a vertical head: each draft is conditioned on the row above, whose features are known, and on the
previous draft.

The head's distribution is recorded as q, so verification makes the result exact. A refined draft of the previous step
is kept if the tokens that the head reads have not changed since the last forward: then the target's distribution is the
better guess. This condition depends on earlier slots only.

If drafts are drawn one by one, each draft reads the head's output matrix. With `passes`, each pass draws all drafts at
once, given the tokens of the previous pass, with the same random numbers. q of a slot then depends on random numbers of
earlier slots only, so verification stays exact. With as many passes as drafts, drafts equal those drawn one by one.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor

from specbench.decoding.drafters.jacobi import JacobiTree
from specbench.decoding.drafters.lookup import around
from specbench.decoding.drafters.token_init import Init, Uniform
from specbench.decoding.interfaces import Batch, Context, Proposal, Verification
from specbench.decoding.noise import Stream
from specbench.decoding.sampling import FEW, Target, at, draw, features_at, for_rows
from specbench.decoding.verification.ratio_tests import standard
from specbench.models.interface import TokenLayout
from specbench.models.transformer.compilation import in_turn
from specbench.models.vertical_head import embedded, known_features, places_before, slots_above, vertical_head_for

_LEAST_SHARE = 0.02  # Share of the largest probability below which the coupled head's q is 0


class Vertical(JacobiTree):
    """A chain of `window` - 1 drafts, or a tree with siblings of the first draft, as in `JacobiTree`.

    A sibling branch repeats the chain's next drafts. Their q depends on the chain's first draft, which is known when a
    sibling is tested.
    """

    def __init__(
        self, context: Context, init: Init, window: int, siblings: int, depth: int, head: str, passes: int = 0
    ):
        super().__init__(context, Uniform(context), window, siblings, depth)
        self._passes = passes
        self._model = context.model
        self._head = vertical_head_for(context.model, head)
        self._above = slots_above(context.layout).to(context.device)
        self._table = context.model.token_table()
        places, exists = places_before(self._above, torch.arange(len(self._above), device=context.device)[None])
        self._places = torch.where(exists, places, -1)[0]
        """[N + 1, 3] earlier slots whose tokens the head reads, -1 for missing slots."""
        self._reach = reach(context.layout)  # Largest number of drafts that can be prepared at once

    def begin(self, batch: Batch) -> None:
        super().begin(batch)
        rows = len(batch.session.draft_prompt().lengths)
        shape = rows, batch.tokens.shape[1], self._model.feature_size
        self._features = torch.zeros(shape, dtype=self._model.dtype, device=batch.tokens.device)
        """[R, L, d] target features by slot."""
        self._fed = torch.full_like(batch.tokens, -1)  # [B, L] stream tokens fed to the last forward
        self._known_before: Tensor | None = None  # [ids, h] `mixed_before` of every token, if prepared
        self._draft_target = batch.target
        self._news: tuple[Tensor, Tensor, Tensor] | None = None
        """Features [R, C, d] of the last step, and columns and stream slots [B, T] of its verified path."""

    def propose(self, committed: Tensor, width: int, step: Tensor) -> Proposal:
        proposal = super().propose(committed, width, step)
        self._fed.copy_(self._batch.tokens)
        return proposal

    def observe(self, verification: Verification, positions: Tensor, shift: Tensor, keep_tail: bool) -> None:
        super().observe(verification, positions, shift, keep_tail)
        self._news = self._batch.session.features, verification.columns, positions

    def restart(self, rows: Tensor) -> None:
        super().restart(rows)
        self._fed[rows] = -1

    def _fill(self, committed: Tensor, positions: Tensor, step: Tensor) -> Tensor:
        return self._draft(committed, positions, step, super()._fill(committed, positions, step))

    def _draft(self, committed: Tensor, positions: Tensor, step: Tensor, q: Tensor) -> Tensor:
        """Draw the drafts of `positions` [B, D] that are not kept. Return q of all drafts; `q`: q of refined drafts."""
        if positions.shape[1] == 0:
            return q
        self._learn()
        refined = positions < self._drafted_to[:, None]
        uniform = self._batch.noise.uniform(positions, Stream.SIBLING, step)
        drafts = []
        for start in range(0, positions.shape[1], self._reach):
            run = slice(start, start + self._reach)
            drafts.append(
                self._draft_run(committed, positions[:, run], refined[:, run], uniform[:, run], step, q[:, run])
            )
        keeps, recorded = zip(*drafts, strict=True)
        return torch.where(torch.cat(keeps, 1)[..., None], q, torch.cat(recorded, 1))

    def _learn(self) -> None:
        """Store the features of the last step. Called here, not in `observe`, so that it is compiled with drafting."""
        if self._news is None:  # None only before the first compiled step
            return
        features, columns, positions = self._news
        rows = torch.arange(len(features), device=features.device)[:, None]
        self._features[rows, self._twice(positions)] = features_at(features, columns)

    def _draft_run(
        self, committed: Tensor, positions: Tensor, refined: Tensor, uniform: Tensor, step: Tensor, q: Tensor
    ) -> tuple[Tensor, Tensor]:
        """Draft slots `positions` [B, k] from left to right; k is at most `_reach`. Return the mask [B, k]
        of slots that keep their refined draft and its `q` [B, k, V], and the head's distributions [B, k, V]. Only the
        preceding token of each slot is unknown at first; all other inputs are processed at once."""
        tokens = self._batch.tokens
        slots = self._twice(positions)
        # Slots past the image's end share the last entry; their drafts are never used.
        places = self._places[positions.clamp(max=len(self._places) - 1)]
        mixed = self._mixed(slots, self._twice(committed[:, None]))
        is_fed = around(tokens, places[..., 1:]) == around(self._fed, places[..., 1:])
        same_above = refined & is_fed.all(-1)
        fed_before = around(self._fed, places[..., 0])
        refined_tokens = tokens.gather(1, positions)
        coupled = self._coupled(positions, refined, refined_tokens, step, q)
        first = around(tokens, places[:, 0, :1])

        def drawn(
            token: Tensor,
            before: Tensor,
            mixed: Tensor,
            positions: Tensor,
            uniform: Tensor,
            same_above: Tensor,
            fed_before: Tensor,
            old: Tensor,
            least: Tensor | None = None,
            shared: Tensor | None = None,
        ) -> tuple[Tensor, Tensor, Tensor]:
            """Draw n drafts, given the `token` [B, n] before each draft and its term of the first layer. Return tokens
            [B, n], whether they keep their q, and the head's distributions [B, n, V]."""
            proposed = self._draft_target(self._head_logits(self._head.features(mixed + before)), positions)
            kept = same_above & (token == fed_before)
            stays, weights = kept, proposed
            if shared is not None:
                stays = kept | (at(proposed, old) > least)
                weights = standard(proposed, shared)
            return torch.where(stays, old, draw(weights, uniform)), kept, proposed

        def one(carry: tuple[Tensor, ...], given: Sequence[Tensor]) -> tuple[tuple[Tensor, ...], tuple[Tensor, ...]]:
            chosen = drawn(*carry, *given)
            return (chosen[0], self._mixed_before(chosen[0])), chosen

        # Slot 0 has no preceding token; only the first slot of the run can be slot 0.
        start = torch.where(slots[:, :1, None] > 0, self._mixed_before(first.clamp(min=0)), 0.0)
        given = mixed, positions, uniform, same_above, fed_before, refined_tokens, *coupled
        if self._passes:
            chosen = torch.where(refined, refined_tokens, around(tokens, places[..., 1]).clamp(min=0))
            for _ in range(min(self._passes, positions.shape[1])):
                before = torch.cat([start, self._mixed_before(chosen[:, :-1])], 1)
                chosen, kept, proposed = drawn(torch.cat([first, chosen[:, :-1]], 1), before, *given)
        else:
            chosen, kept, proposed = in_turn(one, (first, start), given)
        tokens.scatter_(1, positions, chosen)
        return kept, proposed

    def _coupled(
        self, positions: Tensor, refined: Tensor, tokens: Tensor, step: Tensor, q: Tensor
    ) -> tuple[Tensor, ...]:
        """Return the last arguments of `drawn`, which couple redrawn drafts with the refined `tokens` [B, k]."""
        return ()

    def _head_logits(self, features: Tensor) -> Tensor:
        return self._batch.session.logits(features)

    def _mixed(self, slots: Tensor, count: Tensor) -> Tensor:
        """Compute the head's first layer [R, k, h] for `slots` [R, k], without the term of the token before each slot.
        The features of the first `count` [R, 1] slots are known."""
        ids = self._model.table_ids(self._twice(self._batch.tokens))
        places, exists = places_before(self._above, slots)
        exists[..., 0] = False  # `mixed_before` adds the term of the token before a slot
        words = embedded(self._table, ids, places, exists)
        features = known_features(self._features, self._above, count, slots)
        return self._head.mixed(torch.cat([features, words], dim=-1), slots - count)

    def _mixed_before(self, tokens: Tensor) -> Tensor:
        """`VerticalHead.mixed_before` [R, n, h] of `tokens` [B, n]."""
        ids = self._model.table_ids(self._twice(tokens))
        if self._known_before is None:
            return self._head.mixed_before(self._table[ids])
        return self._known_before[ids]

    def _twice(self, columns: Tensor) -> Tensor:
        """Repeat [B, K] to [R, K]."""
        return for_rows(columns, len(self._features))


class CoupledVertical(Vertical):
    """`Vertical` that couples a redrawn draft with the refined draft x, which was drawn from p. It keeps x with
    probability min(1, q(x)/p(x)), else draws from [q - p]+. Fewer tokens change, so more later drafts keep p as q.

    If the target has top-p, which needs sorting, q is instead cut off at a share of its largest probability. If the
    token table is small, its products with the first layer are computed once per batch.
    """

    def begin(self, batch: Batch) -> None:
        super().begin(batch)
        if len(self._table) <= FEW:
            self._known_before = self._head.mixed_before(self._table[None])[0]
        sampling = batch.target.sampling
        if sampling.top_p < 1:
            least = max(sampling.min_p or 0.0, _LEAST_SHARE)
            layout, device = self._model.layout, batch.tokens.device
            self._draft_target = Target(layout, replace(sampling, top_p=1.0, min_p=least), device)

    def _coupled(
        self, positions: Tensor, refined: Tensor, tokens: Tensor, step: Tensor, q: Tensor
    ) -> tuple[Tensor, ...]:
        """Return thresholds [B, k] and q [B, k, V]. A token [B, k] is kept if its probability exceeds its threshold."""
        # In this step, only slots without a refined draft have used this random number.
        coin = self._batch.noise.uniform(positions, Stream.FRESH, step)
        least = torch.where(refined, coin * at(q, tokens), torch.inf)
        return least, torch.where(refined[..., None], q, 0.0)


def reach(layout: TokenLayout) -> int:
    """Return the number of consecutive slots in which no slot is above, or above right of, another slot. Within such a
    run a draft depends on the previous token only."""
    above = layout.neighbour(1, 0)
    # In an image of one column the slot above is the previous slot.
    return min((max(slot - up - 1, 1) for slot, up in enumerate(above) if up >= 0), default=layout.length)
