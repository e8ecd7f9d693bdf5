"""Jacobi drafts that are looked up in the image if the tokens around a slot have changed.

If the neighbours of a refined draft's slot are the same as in the last forward, p is a good guess of the next p.
Otherwise the draft is redrawn: its q is the target's distribution at an earlier slot with the same neighbours. Any
lookup is lossless. The idea comes from retrieval drafts for text (REST, arXiv 2311.08252).

Slots are processed from left to right. A lookup is used if q of earlier lookups of equal quality in this image
overlapped with p clearly more than Jacobi's q. This decision and the result do not depend on the slot's draft.
"""

import torch
from torch import Tensor

from specbench.decoding.drafters.jacobi import JacobiTree
from specbench.decoding.drafters.token_init import Init
from specbench.decoding.interfaces import Batch, Context, Proposal, Verification
from specbench.decoding.noise import Stream
from specbench.decoding.sampling import draw, rows_at
from specbench.models.interface import TokenLayout

MATCHES = 4  # Match qualities, by which of the neighbours above and above right agree

WORTH_A_LOOKUP = 0.25
"""Minimum gain in overlap with p for a lookup, because a changed draft disturbs the refined drafts after it."""


class LookupJacobi(JacobiTree):
    """The Jacobi chain or tree. At most the first `lookups` drafts of the chain are looked up.

    A sibling branch repeats the chain's next drafts. If these were looked up, their q depends on the chain's first
    draft. That is valid, because this draft is known when a sibling is tested.
    """

    def __init__(self, context: Context, init: Init, window: int, lookups: int, siblings: int, depth: int):
        super().__init__(context, init, window, siblings, depth)
        self._needs_history = True
        self._lookups = lookups
        self._neighbours = neighbour_slots(context.layout).to(context.device)
        """[N, K] neighbours of each slot, -1 for missing neighbours."""
        slots, count = self._neighbours.shape
        # Each neighbour has a weight: 2^(K - 1), ..., 2, 1. Slots are ranked by the total weight of their agreeing
        # neighbours, then by slot number: rank = N * weight + number.
        self._slots_in_order = torch.arange(slots, device=context.device)
        self._weights = slots * 2 ** torch.arange(count - 1, -1, -1, device=context.device)
        agreeing, left = torch.arange(2**count, device=context.device), 2 ** (count - 1)
        self._is_match = agreeing >= left
        """[2^K] whether slots of this total weight match: the left neighbour has to agree."""
        self._match = (agreeing - left).clamp(min=0) * MATCHES // left  # [2^K] quality of the match
        self._free = torch.tensor(context.layout.forced, device=context.device) < 0

    def begin(self, batch: Batch) -> None:
        super().begin(batch)
        self._fed = torch.full_like(batch.tokens, -1)  # [B, L] stream tokens fed to the last forward
        self._gain = torch.zeros(len(batch.tokens), MATCHES, device=batch.tokens.device)
        """[B, MATCHES] sums of `common_mass(p, looked-up q) - common_mass(p, Jacobi's q) - WORTH_A_LOOKUP`."""
        self._candidates: tuple[Tensor, Tensor, Tensor, Tensor] | None = None
        """For the D drafts that may be looked up: whether a match exists, its slot and its quality, each [B, D]. Then q
        [B, D', V] of all Jacobi drafts, D' >= D."""

    def propose(self, committed: Tensor, width: int, step: Tensor) -> Proposal:
        proposal = super().propose(committed, width, step)
        self._fed.copy_(self._batch.tokens)
        return proposal

    def restart(self, rows: Tensor) -> None:
        super().restart(rows)
        self._fed[rows], self._gain[rows] = -1, 0

    def observe(self, verification: Verification, positions: Tensor, shift: Tensor, keep_tail: bool) -> None:
        super().observe(verification, positions, shift, keep_tail)
        if self._candidates is None:
            return
        matched, source, match, q = self._candidates
        drafts = matched.shape[1]
        p = verification.p[:, :drafts]
        better = common_mass(p, self._history[self._rows, source]) - common_mass(p, q[:, :drafts])
        # Up to the first rejected draft, p is conditioned on committed tokens only.
        judged = matched & (torch.arange(drafts, device=p.device) < shift[:, None])
        self._gain.scatter_add_(1, match, torch.where(judged, better - WORTH_A_LOOKUP, 0.0))

    def _fill(self, committed: Tensor, positions: Tensor, step: Tensor) -> Tensor:
        """Look up some of the Jacobi drafts of slots `positions` [B, D]."""
        q = super()._fill(committed, positions, step)
        self._candidates, drafts = None, min(self._lookups, positions.shape[1])
        if drafts == 0:
            return q
        tokens, length, slots = self._batch.tokens, len(self._free), positions[:, :drafts]
        inside = slots.clamp(max=length - 1)
        allowed = (slots < length) & self._free[inside]
        places = self._neighbours[inside]
        # -2 differs from every token, so a slot without a refined draft is always looked up.
        fed = torch.where((slots < self._drafted_to[:, None])[..., None], around(self._fed, places), -2)
        # Only committed slots are searched, because their neighbours no longer change.
        seen = around(tokens, self._neighbours.expand(len(tokens), -1, -1))
        past = (self._slots_in_order < committed[:, None]) & self._free
        order = torch.where(past, self._slots_in_order, -2 * self._weights[0])
        worthy = self._is_match & (self._gain[:, self._match] >= 0)
        uniform = self._batch.noise.uniform(slots, Stream.SIBLING, step)
        looked_up = []
        for draft in range(drafts):
            around_slot = around(tokens, places[:, draft])
            rank, source = ((seen == around_slot[:, None]) * self._weights).sum(-1).add(order).max(1, keepdim=True)
            changed = (around_slot != fed[:, draft]).any(-1, keepdim=True) & allowed[:, draft : draft + 1]
            agreeing = rank.clamp(min=0) // length
            taken = changed & worthy.gather(1, agreeing)
            token = draw(rows_at(self._history, source), uniform[:, draft : draft + 1])
            slot = slots[:, draft : draft + 1]
            tokens.scatter_(1, slot, torch.where(taken, token, tokens.gather(1, slot)))
            looked_up.append((changed, source, agreeing, taken))
        changed, source, agreeing, taken = (torch.cat(field, 1) for field in zip(*looked_up, strict=True))
        self._candidates = changed & self._is_match[agreeing], source, self._match[agreeing], q
        looked_up_q = torch.where(taken[..., None], rows_at(self._history, source), q[:, :drafts])
        return torch.cat([looked_up_q, q[:, drafts:]], dim=1)


def common_mass(p: Tensor, q: Tensor) -> Tensor:
    """1 - TV(p, q), the probability that a draft from q is accepted."""
    return torch.minimum(p, q).sum(-1)


def neighbour_slots(layout: TokenLayout) -> Tensor:
    """Return earlier slots [N, K] around each stream slot, by descending weight: left (the previous slot), above, above
    right, above left, and the slot before the left slot; -1 for missing slots."""
    slot = torch.arange(layout.length)
    above, left = torch.tensor(layout.neighbour(1, 0)), torch.tensor(layout.neighbour(0, 1))
    # The slot above right is above the slot to the right, in the same row.
    right = torch.where(left.roll(-1) == slot, above.roll(-1), -1)
    slots = torch.stack([slot - 1, above, right, torch.tensor(layout.neighbour(1, 1)), slot - 2], dim=1)
    return slots.clamp(min=-1)


def around(tokens: Tensor, slots: Tensor) -> Tensor:
    """Gather `tokens` [B, L] at `slots` [B, ..., K]. A missing slot, -1, gives token -1."""
    padded = torch.nn.functional.pad(tokens, (1, 0), value=-1)
    return padded.gather(1, slots.flatten(1) + 1).view(slots.shape)
