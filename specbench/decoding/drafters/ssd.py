"""Spatially speculative decoding (SSD, arXiv 2606.20543): an image row is drafted at once from the row above by trained
heads, tested and corrected for a fixed number of rounds, then committed as it stands.

The first row of a grid is decoded exactly: the heads to the right draft a few tokens from the last committed one. A
row below it is drafted from the committed row above, each token on its own. A round is a target forward of the row, in
which every draft is kept with probability min(1, p/q), else drawn from its own residual distribution, in the middle of
the row too. After the rounds one more forward feeds the row, and all of it is committed. That is lossy: p of a draft
holds for the drafts before it, of which some were changed. A row whose drafts were all accepted is committed at once.

Not stated in what was read: q of a second round. Here it is p of the round before, which the draft follows, so that
with enough rounds the images are exact.
"""

from __future__ import annotations

from itertools import pairwise

import torch
from torch import Tensor

from specbench.decoding.drafters.token_init import Init
from specbench.decoding.drafters.vertical import Vertical
from specbench.decoding.interfaces import Batch, Context, Proposal, Verification
from specbench.decoding.noise import Stream
from specbench.decoding.sampling import draw, features_at
from specbench.models.interface import ImageModel, TokenLayout
from specbench.models.ssd_heads import RIGHT, SsdHeads, seen_from, ssd_heads_for


class Ssd(Vertical):
    """A chain of drafts, to the end of a block of `rows` image rows at most. B images, N stream slots."""

    def __init__(self, context: Context, init: Init, rounds: int, rows: int, head: str):
        ends, below = blocks(context.layout, rows)
        longest = max(end - slot for slot, end in enumerate(ends))
        super().__init__(context, init, longest + 1, 1, 1, head)
        self._rounds = rounds
        seen = [[*row, -1] for row in seen_from(context.layout).tolist()]
        sources = [seen[RIGHT - 1 + above][slot] for slot, above in enumerate(below)]
        self._ends, self._below, self._sources = (
            torch.tensor(x, device=context.device) for x in (ends, below, sources)
        )

    def _head_of(self, model: ImageModel, path: str) -> SsdHeads:
        return ssd_heads_for(model, path)

    def begin(self, batch: Batch) -> None:
        super().begin(batch)
        self._end = torch.full_like(self._drafted_to, -1)
        """[B] first slot after the block that is being decoded."""
        self._round = torch.zeros_like(self._end)
        """[B] forwards of that block before this one."""

    def propose(self, committed: Tensor, width: int, step: Tensor) -> Proposal:
        end = self._ends[committed]
        self._round = torch.where(end == self._end, self._round + 1, 0)
        self._end, self._opening = end, self._below[committed] == 0
        untested = (self._round >= self._rounds) & ~self._opening
        return super().propose(committed, width, step)._replace(untested=untested[:, None])

    def observe(self, verification: Verification, positions: Tensor, shift: Tensor, keep_tail: bool) -> None:
        super().observe(verification, positions, shift, keep_tail)
        after = positions[:, 0] + shift
        self._drafted_to = torch.where(self._opening, after, self._drafted_to.minimum(self._end).maximum(after))

    def restart(self, rows: Tensor) -> None:
        super().restart(rows)
        self._end[rows] = -1

    def _draft(self, committed: Tensor, positions: Tensor, step: Tensor, q: Tensor) -> Tensor:
        if positions.shape[1] == 0:
            return q
        self._learn()
        tokens, opening, last = self._batch.tokens, self._opening[:, None], committed[:, None] - 1
        slots, distance = positions.clamp(max=len(self._ends) - 1), positions - last
        source = torch.where(opening, last, self._sources[slots]).clamp(min=0)
        head = torch.where(opening, distance.clamp(max=RIGHT) - 1, RIGHT - 1 + self._below[slots])
        seen = torch.cat([features_at(self._features, source), self._word(tokens.gather(1, source))], -1)
        guesses = self._head(seen)
        chosen = self._twice(head)[..., None, None].expand(-1, -1, 1, guesses.shape[-1])
        own = self._batch.target(self._batch.session.logits(guesses.gather(2, chosen).squeeze(2)), positions)
        fresh = positions >= self._drafted_to[:, None]
        drawn = draw(own, self._batch.noise.uniform(positions, Stream.SIBLING, step))
        tokens.scatter_(1, positions, torch.where(fresh, drawn, tokens.gather(1, positions)))
        exists = (positions < self._end[:, None]) & (~opening | ((distance <= RIGHT) & (last >= 0)))
        return torch.where(exists[..., None], torch.where(fresh[..., None], own, q), 0.0)


def blocks(layout: TokenLayout, rows: int) -> tuple[list[int], list[int]]:
    """Per stream slot, and past the end, the first slot after its block, and how many rows above the slot the last row
    before the block is: 0 in the first row of a grid, which is a block of its own. Others are of `rows` image rows."""
    starts = [
        (row[0], (number - 1) % rows + 1 if number else 0) for grid in layout.rows for number, row in enumerate(grid)
    ]
    starts[0] = (0, 0)
    ends, below, end = [layout.length], [0], layout.length
    for (start, depth), (after, _) in reversed(list(pairwise([*starts, (layout.length, 0)]))):
        ends[:0], below[:0] = [end] * (after - start), [depth] * (after - start)
        end = start if depth <= 1 else end
    return ends, below
