"""Image rows decoded side by side: where a row's window stands, and when the row below may start.

A column of row r attends to the prompt, to committed tokens of the rows above, and to its own row up to itself. Row r
starts once row r - 1 has enough tokens. Where the grammar ends rows with a forced token, that token is fed early, at
its true position. Elsewhere the first token of a row needs the last token of the row above: the newest token of the row
above that one (of row 0 for row 1) stands in for it, at the true position; only that one column attends to it, and it
is not kept in the cache.
"""

from __future__ import annotations

from itertools import pairwise
from typing import NamedTuple

import torch
from torch import Tensor

from specbench.decoding.sampling import Target
from specbench.errors import SpecbenchError
from specbench.models.interface import TokenLayout


class RowRoots(NamedTuple):
    """The first column of each image row's window. B images, H rows.

    Attributes:
        above: [B, H] tokens of the row above; a whole row for row 0.
        starting: [B, H] bool, rows without a token that may start.
        wanted: [B, H] bool, rows that can get a token: starting or incomplete ones.
        closing: [B, H] bool, complete rows whose last token has not been fed.
        positions: [B, H] stream slot that the column predicts.
        tokens: [B, H] token it consumes.
        aside: [B, H] bool, whether that is a stand-in.
    """

    above: Tensor
    starting: Tensor
    wanted: Tensor
    closing: Tensor
    positions: Tensor
    tokens: Tensor
    aside: Tensor


def row_slots(layout: TokenLayout, decoder: str) -> list[list[int]]:
    """Stream slot of each image token, by row and column.

    Raises:
        SpecbenchError: rows that are not closed by at most one forced token.
    """
    free, width = layout.free_slots(), layout.width
    grid = [free[row * width : (row + 1) * width] for row in range(layout.height)]
    gaps = [below[0] - above[-1] for above, below in pairwise(grid)]
    if free[0] > 0 or any(row[-1] - row[0] >= width for row in grid) or max(gaps, default=1) > 2:
        raise SpecbenchError(
            f"{decoder} does not fit this model's grammar", "it needs rows closed by at most one forced token"
        )
    return grid


def row_above(count: Tensor, width: int) -> Tensor:
    """[B, H] number of tokens of the row above each row, of `count` [B, H]; a whole row for row 0."""
    return torch.nn.functional.pad(count[:, :-1], (1, 0), value=width)


def row_roots(tokens: Tensor, count: Tensor, closed: Tensor, slots: Tensor, lags: Tensor, target: Target) -> RowRoots:
    """Place the first column of every row's window.

    Args:
        tokens: [B, N + 1] by stream slot.
        count: [B, H] tokens of each row so far.
        closed: [B, H] bool, whether a row's last token has been fed.
        slots: [H, W] stream slot of each image token.
        lags: [H] tokens that the row above must have before a row starts.
    """
    width = slots.shape[1]
    above = row_above(count, width)
    starting = (count == 0) & (above >= lags)
    growing = (count > 0) & (count < width)
    closing = (count == width) & ~closed
    closing[:, -1] = False
    first = slots[:, 0].expand_as(count)
    newest = slots.expand(len(count), -1, -1).gather(2, (count - 1).clamp(min=0)[..., None]).squeeze(2)
    positions = torch.where(starting, first, newest + 1)
    free = target.forced_at((positions - 1).clamp(min=0)) < 0
    aside = starting & free & (above < width)
    stand_in = newest.roll(2, dims=1)
    stand_in[:, :2] = newest[:, :1]
    consumed = torch.where(aside, stand_in, positions - 1)
    fed = tokens.gather(1, consumed.clamp(min=0))
    return RowRoots(above, starting, starting | growing, closing, positions, fed, aside)
