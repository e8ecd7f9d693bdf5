"""Jacobi drafts that are looked up in the image wherever the tokens around a slot have changed.

A refined draft was drawn from p under the drafts that the last forward was fed. Where the neighbours of its slot still
are these drafts, p is a good guess of the next p. Where one of them was replaced, it is not: there the draft is drawn
anew, from the distribution that the target had at an earlier slot with the same neighbours. Its q is that distribution,
so that whatever is looked up is lossless. The idea is that of prompt lookup and retrieval drafts for text (for example
REST, arXiv 2311.08252), on the grid of an image and with distributions in the place of tokens.

Slots are looked up from the left, each with the drafts before it as its neighbours. Neither whether a slot is looked up
nor what is found depends on the draft it has.
"""

from __future__ import annotations

import torch
from torch import Tensor

from specbench.decoding.context import Context
from specbench.decoding.drafters.jacobi import JacobiTree
from specbench.decoding.drafters.token_init import Init
from specbench.decoding.interfaces import Batch, Proposal
from specbench.decoding.noise import Stream
from specbench.decoding.sampling import draw
from specbench.models.interface import TokenLayout


class LookupJacobi(JacobiTree):
    """The Jacobi chain, or tree, with at most the first `lookups` drafts of the chain looked up.

    A sibling branch repeats the chain's next drafts. Where these were looked up, their q depends on the chain's first
    draft, which is known once a sibling is tested.
    """

    def __init__(self, context: Context, init: Init, window: int, lookups: int, siblings: int, depth: int):
        super().__init__(context, init, window, siblings, depth)
        self._needs_history = True
        self._lookups = lookups
        self._neighbours = neighbour_slots(context.layout).to(context.device)
        """[N, K] neighbours of each slot, -1 where there is none."""
        # Better matches have larger sums: agreeing neighbours count 2^(K - 1), ..., 2, 1.
        self._weights = 2 ** torch.arange(self._neighbours.shape[1] - 1, -1, -1, device=context.device)
        self._free = torch.tensor(context.layout.forced, device=context.device) < 0

    def begin(self, batch: Batch) -> None:
        super().begin(batch)
        self._fed = torch.full_like(batch.tokens, -1)
        """[B, L] stream tokens that the last forward was fed."""

    def propose(self, committed: Tensor, width: int, step: Tensor) -> Proposal:
        proposal = super().propose(committed, width, step)
        self._fed.copy_(self._batch.tokens)
        return proposal

    def restart(self, rows: Tensor) -> None:
        super().restart(rows)
        self._fed[rows] = -1

    def _fill(self, committed: Tensor, positions: Tensor, step: Tensor) -> Tensor:
        return self._look_up(committed, positions, step, super()._fill(committed, positions, step))

    def _look_up(self, committed: Tensor, positions: Tensor, step: Tensor, q: Tensor) -> Tensor:
        """Look up drafts of the slots `positions` [B, D]; q [B, D, V] of all drafts, given that of the Jacobi ones."""
        tokens, length = self._batch.tokens, len(self._free)
        # Only committed slots are searched, so that what their neighbours hold does not change meanwhile.
        seen = around(tokens, self._neighbours.expand(len(tokens), -1, -1))
        past = (torch.arange(length, device=tokens.device) < committed[:, None]) & self._free
        looked_up = []
        for draft in range(min(self._lookups, positions.shape[1])):
            slot = positions[:, draft : draft + 1]
            inside = slot.clamp(max=length - 1)
            found, source = self._find(inside, seen, past, slot < self._drafted_to[:, None])
            found = found & (slot < length) & self._free[inside]
            distribution = self._history[self._rows, source]
            token = draw(distribution, self._batch.noise.uniform(slot, Stream.SIBLING, step))
            tokens.scatter_(1, slot, torch.where(found, token, tokens.gather(1, slot)))
            looked_up.append(torch.where(found[..., None], distribution, q[:, draft : draft + 1]))
        return torch.cat([*looked_up, q[:, len(looked_up) :]], dim=1)

    def _find(self, slot: Tensor, seen: Tensor, past: Tensor, refined: Tensor) -> tuple[Tensor, Tensor]:
        """Whether the draft of `slot` [B, 1] is looked up, and the slot [B, 1] in which.

        Args:
            seen: [B, N, K] neighbours of every slot.
            past: [B, N] slots that are searched.
            refined: [B, 1] whether the slot has a refined draft.
        """
        places = self._neighbours[slot]
        own = around(self._batch.tokens, places)
        changed = ~refined | (own != around(self._fed, places)).any(-1)
        agree = (seen == own).long() @ self._weights
        # The latest of the best matches; the left neighbour has to agree.
        rank = torch.arange(past.shape[1], device=slot.device)
        score, source = torch.where(past, agree * past.shape[1] + rank, -1).max(1, keepdim=True)
        return changed & (score >= self._weights[0] * past.shape[1]), source


def neighbour_slots(layout: TokenLayout) -> Tensor:
    """[N, K] earlier slots around each stream slot, in the order of their weight: left (the slot before), above, above
    to the right, above to the left, and the one before the left; -1 where there is none.
    """
    own = torch.arange(layout.length)
    above, left = torch.tensor(layout.neighbour(1, 0)), torch.tensor(layout.neighbour(0, 1))
    # What is above to the right is above the slot to the right, in the same row.
    right = torch.where(left.roll(-1) == own, above.roll(-1), -1)
    slots = torch.stack([own - 1, above, right, torch.tensor(layout.neighbour(1, 1)), own - 2], dim=1)
    return slots.clamp(min=-1)


def around(tokens: Tensor, slots: Tensor) -> Tensor:
    """Tokens [B, ..., K] of `tokens` [B, L] at `slots` [B, ..., K]; -1 at slot -1, where there is none."""
    known = torch.nn.functional.pad(tokens, (1, 0), value=-1)
    return known.gather(1, slots.flatten(1) + 1).view(slots.shape)
