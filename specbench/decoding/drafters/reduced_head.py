"""Draft heads with a reduced vocabulary (FR-Spec, EAGLE-3): logits only for image ids that were probable recently.

Without this, each draft reads the whole output matrix; for 65,536 ids that takes half as long as a step. The kept ids
are the most probable ids in the slots that the last step committed, so that they depend on committed tokens only. q is
0 for other ids; verification can draw them from the residual distribution.
"""

from typing import Any

import torch
from torch import Tensor

from specbench.decoding.drafters.eagle import Eagle
from specbench.decoding.drafters.token_init import Init
from specbench.decoding.drafters.vertical import CoupledVertical
from specbench.decoding.interfaces import Batch, Context, Verification

_Drafter: Any = object  # the class that follows the mixin


class ReducedHead(_Drafter):
    """Mixin for drafters that use a draft head; it replaces their `_head_logits`."""

    def __init__(self, context: Context, init: Init | None, *options: object, head_ids: int, **more: object):
        super().__init__(context, init, *options, **more)
        self._v_image = context.layout.v_image
        self._first_ids = torch.arange(min(head_ids, self._v_image), device=context.device)

    def begin(self, batch: Batch) -> None:
        super().begin(batch)
        self._ids = self._first_ids.repeat(len(batch.tokens), 1)  # [B, K] ids of the next drafts
        self._reduced = batch.session.reduced_head(self._ids)

    def observe(self, verification: Verification, positions: Tensor, shift: Tensor, keep_tail: bool) -> None:
        super().observe(verification, positions, shift, keep_tail)
        slots = torch.arange(positions.shape[1], device=positions.device)
        committed = (slots < shift[:, None])[..., None]
        mass = torch.where(committed, verification.p, 0.0).sum(1)[:, : self._v_image]
        self._ids = torch.where(shift[:, None] > 0, mass.topk(self._ids.shape[1]).indices, self._ids)
        self._reduced = self._batch.session.reduced_head(self._ids)

    def _head_logits(self, features: Tensor) -> Tensor:
        few = self._reduced.logits(features)
        every = few.new_full((*few.shape[:2], self._v_image), -torch.inf)
        return every.scatter(2, self._ids[:, None].expand(few.shape), few)


class ReducedEagle(ReducedHead, Eagle):
    """`Eagle` with a reduced vocabulary."""


class ReducedVertical(ReducedHead, CoupledVertical):
    """`CoupledVertical` with a reduced vocabulary."""

    def restart(self, rows: Tensor) -> None:
        super().restart(rows)
        self._ids[rows] = self._first_ids
        self._reduced = self._batch.session.reduced_head(self._ids)
