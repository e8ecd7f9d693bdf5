"""Jacobi decoding of several image rows in parallel (Parallel Jacobi Decoding, CVPR 2026, arXiv 2606.05703).

Every image row has a separate window, which ends where the committed tokens of the row above end. Row r starts once row
r - 1 has `rows-window` tokens. A column attends to committed tokens of the rows above and to its own row, never to
drafts of another row (`specbench.decoding.row_loop`). The first incomplete row, and with `lower-rows` commit every row,
commits its accepted drafts and one more token. With `lower-rows` draft, as in the paper, the rows below commit only
their accepted drafts, and a sample from p becomes the draft of the next slot.

Lossy: a token is conditioned on only a part of the rows above, and with `lower-rows` draft a rejected draft is redrawn
from p. If every row waits for the complete row above, the decoder is exact.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Literal, NamedTuple

import torch
from torch import Tensor

from specbench.decoding.draft_tree import chain
from specbench.decoding.drafters.token_init import FreshQ, Init
from specbench.decoding.interfaces import Context, Proposal
from specbench.decoding.noise import Stream
from specbench.decoding.row_loop import ImageRowLoop, image_rows, row_roots
from specbench.decoding.sampling import one_hot
from specbench.decoding.verification.chain_verification import verify_chain
from specbench.models.transformer.host_sync import to_host

if TYPE_CHECKING:
    from specbench.decoding.build import Method


class RowJacobi:
    """Settings of `RowJacobiLoop`."""

    def __init__(
        self,
        context: Context,
        init: Init | None,
        window: int,
        rows_window: int,
        lower_rows: Literal["draft", "commit"],
        fresh_q: FreshQ,
    ):
        self.rows = image_rows(context, "row-jacobi")
        height, widest = self.rows.slots.shape
        self.window = min(window, widest)
        self.columns = height * self.window
        self.lags = self.rows.widths.clamp(max=rows_window)
        self.commits_below = lower_rows == "commit"
        self.v_image = context.layout.v_image
        self.one_hot = fresh_q == "onehot"


class RowWindows(NamedTuple):
    """Tokens of one forward (columns): the windows of R image rows. B images, W columns per row."""

    rows: Tensor  # [R] image rows
    positions: Tensor  # [B, R, W] stream slot that a column predicts; past the end for unused columns
    tokens: Tensor  # [B, R, W] token it consumes
    exists: Tensor  # [B, R, W] bool, columns that predict a token
    top: Tensor  # [B, R] bool, the first incomplete row
    visible: Tensor  # [B, R * W, N + 1] bool, as `ScatteredSession.forward_scattered` takes it
    aside: Tensor  # [B, R, W] bool, columns that consume a substitute token


class RowJacobiLoop(ImageRowLoop):
    """Decode loop of all rows of each image; `tokens` also holds drafts."""

    def __init__(self, method: Method, *arguments: Any):
        super().__init__(method, *arguments)
        self._verifier, self._refinement = method.verifier, method.refinement
        images, device = len(self.tokens), self.tokens.device
        self._has_draft = torch.zeros_like(self._fed)
        self._q = torch.zeros(images, self._length + 1, self._target.vocab, device=device)
        """Distribution of the draft of each slot."""
        self._images = torch.arange(images, device=device)[:, None, None]
        self._column = torch.arange(self._plan.window, device=device)

    def _columns(self, step: Tensor) -> RowWindows | None:
        plan = self._plan
        roots = row_roots(self.tokens, self.count, self._closed, self._rows, plan.lags, self._target)
        room = torch.where(roots.pending, roots.above - self.count, 0).clamp(max=plan.window)
        working = (room > 0) | roots.closing
        # Host sync: the active rows, and so the width of the forward, depend on drawn tokens.
        rows = torch.tensor(
            [row for row, works in enumerate(to_host(working.any(0))) if works], dtype=torch.long, device=room.device
        )
        if not len(rows):
            return None
        self._closed |= roots.closing
        room, closing, aside = (x[:, rows, None] for x in (room, roots.closing, roots.aside))
        exists = self._column < room
        fed = exists | (closing & (self._column == 0))
        positions = torch.where(fed, roots.positions[:, rows, None] + self._column, self._length)
        drafts = self._drafts(torch.where(exists[..., 1:], positions[..., :-1], self._length), step)
        tokens = torch.cat([roots.tokens[:, rows, None], drafts], 2)
        aside = aside & fed & (self._column == 0)
        self._feed(positions, fed & ~aside & (self._column == 0))
        in_row = self._fed.new_zeros(*positions.shape[:2], self._length + 1)
        in_row.scatter_(2, torch.where(aside, self._length, positions), True)
        in_row[..., self._length] = False
        visible = (self._fed[:, None] | in_row)[:, :, None].expand(-1, -1, len(self._column), -1).flatten(1, 2)
        top = (roots.above == self._width)[:, rows]
        return RowWindows(rows, positions, tokens, exists, top, visible, aside)

    def _drafts(self, slots: Tensor, step: Tensor) -> Tensor:
        """Drafts [B, R, W - 1] of `slots`, from the previous step or uniformly drawn."""
        flat = slots.flatten(1)
        fresh = (~self._has_draft.gather(1, flat) & (flat < self._length)).view_as(slots)
        drawn = (self._noise.uniform(flat, Stream.FRESH, step) * self._plan.v_image).long().view_as(slots)
        q = one_hot(drawn, self._q.shape[-1])
        if not self._plan.one_hot:
            q = torch.zeros_like(q)
            q[..., : self._plan.v_image] = 1 / self._plan.v_image
        place = torch.where(fresh, slots, self._length)
        self._q[self._images, place] = q
        self.tokens[self._images, place] = drawn
        return self.tokens[self._images, slots]

    def _feed(self, positions: Tensor, kept: Tensor) -> None:
        """Let later columns attend to the columns `kept` [B, R, W] at `positions` [B, R, W]."""
        self._fed.scatter_(1, torch.where(kept, positions, self._length).flatten(1), True)
        self._fed[:, self._length] = False

    def _commit(self, p: Tensor, windows: RowWindows, step: Tensor) -> None:
        images, rows, width = windows.positions.shape
        positions = windows.positions.flatten(0, 1)
        p = p.view(images * rows, width, -1)
        # A column has a draft if the next column, which consumes the draft, exists.
        q = torch.where(windows.exists[..., 1:, None], self._q[self._images, windows.positions[..., :-1]], 0.0)
        proposal = Proposal(windows.tokens.flatten(0, 1), positions, q.flatten(0, 1), chain(width), width)
        noise, steps = self._noise.repeated(rows), step.repeat_interleave(rows, 0)
        verified = verify_chain(p, proposal, self._verifier, self._refinement, noise, steps)
        first, top = verified.first.view(images, rows), windows.top
        commits = top | self._plan.commits_below
        redrawn = noise.run_race(p, positions, Stream.REDRAW, steps)
        after = self._column == first[..., None]
        plain = after & ~commits[..., None]
        tokens = torch.where(plain, redrawn.view_as(plain), verified.tokens.view_as(plain))
        drawn_from = p if verified.refined_from is None else verified.refined_from
        drawn_from = torch.where(
            plain[..., None], p.view(images, rows, width, -1), drawn_from.view(images, rows, width, -1)
        )
        place = torch.where(windows.exists, windows.positions, self._length)
        self.tokens[self._images, place] = tokens
        self._q[self._images, place] = drawn_from
        kept = plain | (self._column > first[..., None]) if self._refinement.keeps_tail else plain
        self._has_draft[self._images, place] = kept
        self._has_draft[:, self._length] = False
        self._feed(windows.positions, windows.exists & ~windows.aside & (self._column <= first[..., None]))
        committed = windows.exists & (self._column < (first + commits)[..., None])
        slots = torch.where(committed, windows.positions, self._length).flatten(1)
        self.recorder.slots(p.view(images, rows * width, -1), tokens.flatten(1), slots, step)
        self.count[:, windows.rows] += committed.sum(-1)
