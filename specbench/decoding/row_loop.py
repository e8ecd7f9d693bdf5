"""Common base of the loops that decode several image rows in parallel (`zipar`, `row_jacobi`): steps, window positions,
and the condition for starting the next row.

A column of row r attends to the prompt, to committed tokens of the rows above, and to its own row up to itself. Row r
starts once row r - 1 has enough tokens; the first row of a later grid starts once the previous grid is complete. If the
grammar ends rows with a forced token, that token is fed early, at its true position. Otherwise the first column of row
r consumes a substitute for the last token of row r - 1: the newest token of row r - 2 (of row 0 if r is 1), at the
true position. Only this column attends to the substitute, and it is not kept in the cache.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import chain, pairwise
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor

from specbench.decoding.interfaces import Context
from specbench.decoding.noise import Noise
from specbench.decoding.recorder import StepRecorder
from specbench.decoding.sampling import Target
from specbench.decoding.timing import Spans
from specbench.errors import SpecbenchError
from specbench.models.interface import Call, ScatteredSession
from specbench.models.transformer.host_sync import to_host

if TYPE_CHECKING:
    from specbench.decoding.build import Method


class ImageRowLoop:
    """State and steps of a loop that decodes image rows in parallel. B images, H rows of at most W tokens, N stream
    slots.

    Subclasses choose the columns of each forward (`_columns`) and commit their tokens (`_commit`).

    Attributes:
        tokens: [B, N + 1] by stream slot.
        count: [B, H] committed tokens of each image row.
        recorder: measurements of the batch.
    """

    def __init__(
        self,
        method: Method,
        session: ScatteredSession,
        target: Target,
        noise: Noise,
        rows: int,
        spans: Spans,
        call: Call,
    ):
        """`method.drafter.rows`: the image's rows. `call` is not used: steps run eagerly, because the width of a
        forward depends on drawn tokens."""
        self._plan: Any = method.drafter
        self._session, self._target, self._noise, self._spans = session, target, noise, spans
        device = target.forced.device
        self._length = len(target.forced) - 1
        self._rows: ImageRows = self._plan.rows
        self._width, height = self._rows.widths, len(self._rows.widths)
        self.tokens = target.forced.clamp(min=0).expand(rows, -1).clone()
        self.count = torch.zeros(rows, height, dtype=torch.long, device=device)
        self._fed = torch.zeros(rows, self._length + 1, dtype=torch.bool, device=device)
        """Slots whose tokens were consumed, and that later tokens attend to."""
        self._closed = torch.zeros(rows, height, dtype=torch.bool, device=device)
        """Image rows whose last token has been fed."""
        self.recorder = StepRecorder(rows, self._length, 1, target.forced)

    def run(self, slot: int = 0) -> Iterator[Tensor]:
        """Decode all images, from about the stream slot `slot`; see `DecodeLoop`."""
        if slot:
            self._begin_at(slot)
        step = self.count.new_zeros(len(self.count), 1)
        while True:
            with self._spans("draft"):
                columns = self._columns(step + 1)
            if columns is None:
                return
            step = step + 1
            positions = columns.positions.flatten(1)
            with self._spans("target"):
                tokens, aside = columns.tokens.flatten(1), columns.aside.flatten(1)
                logits = self._session.forward_scattered(tokens, positions, columns.visible, aside)
            with self._spans("verify"):
                self.recorder.count_forward((self.count < self._width).any(1))
                self._commit(self._target(logits, positions), columns, step)
            yield self.count

    def warm_up_slots(self) -> list[int]:
        """Return the first slot, with one active row, and the middle slot, with the most active rows."""
        return [0, self._length // 2]

    def _begin_at(self, slot: int) -> None:
        """Set the state after about `slot` slots, as if every row had started as early as possible."""
        slots, opens = self._rows.slots, self._rows.opens
        waits = torch.where(opens, self._width.roll(1), self._plan.lags)
        late = waits.cumsum(0) - waits[0]
        front = slot * (slots.shape[1] + to_host(late)[-1]) // self._length
        self.count = torch.minimum((front - late).clamp(min=0), self._width).expand_as(self.count).clone()
        self._closed = self.count == self._width
        filled = torch.arange(slots.shape[1], device=slots.device) < self.count[..., None]
        self._fed.scatter_(1, slots.flatten().expand(len(filled), -1), filled.flatten(1))

    def _columns(self, step: Tensor) -> Any:
        """Return the tokens (columns) of the `step`-th [B, 1] forward, or None if all images are complete. `tokens`,
        `positions`, `aside`: as in `ScatteredSession.forward_scattered`, but of shape [B, ...]; `visible` is `fed`."""
        raise NotImplementedError

    def _commit(self, p: Tensor, columns: Any, step: Tensor) -> None:
        """Choose tokens, given p [B, T, V] of all tokens of the forward, flattened; record and commit them."""
        raise NotImplementedError


class ImageRows(NamedTuple):
    """The rows of all grids of an image, in the order of the stream. H rows of at most W tokens."""

    slots: Tensor  # [H, W] stream slot of each image token; shorter rows are padded with N
    widths: Tensor  # [H] tokens of each row
    opens: Tensor  # [H] bool, first rows of a grid


def image_rows(context: Context, decoder: str) -> ImageRows:
    """Return the rows of the context's layout; a SpecbenchError if its grammar does not fit."""
    layout, device = context.layout, context.device
    rows = list(chain(*layout.rows))
    gaps = [below[0] - above[-1] for above, below in pairwise(rows)]
    if rows[0][0] > 0 or any(row[-1] - row[0] >= len(row) for row in rows) or max(gaps, default=1) > 2:
        raise SpecbenchError(
            f"{decoder} does not fit this model's grammar", "use a model whose rows end with at most one forced token"
        )
    widest = max(map(len, rows))
    slots = [row + [layout.length] * (widest - len(row)) for row in rows]
    opens = [not row for grid in layout.rows for row in range(len(grid))]
    return ImageRows(*(torch.tensor(values, device=device) for values in (slots, list(map(len, rows)), opens)))


class RowRoots(NamedTuple):
    """The first column of each image row's window. B images, H rows."""

    above: Tensor  # [B, H] tokens of the row above, see `row_above`
    pending: Tensor  # [B, H] bool, incomplete rows that can get a token
    closing: Tensor  # [B, H] bool, complete rows whose last token has not been fed
    positions: Tensor  # [B, H] stream slot that the column predicts
    tokens: Tensor  # [B, H] token it consumes
    aside: Tensor  # [B, H] bool, whether this token is a substitute


def row_roots(tokens: Tensor, count: Tensor, closed: Tensor, rows: ImageRows, lags: Tensor, target: Target) -> RowRoots:
    """Place the first column of every row's window. `count`: [B, H] tokens of each row so far; `closed`: [B, H] whether
    a row's last token has been fed; `lags`: [H] tokens that the row above must have before a row starts."""
    slots, width, opens = rows
    above = row_above(count, rows)
    starting = (count == 0) & (above >= lags)
    growing = (count > 0) & (count < width)
    closing = (count == width) & ~closed
    closing[:, -1] = False
    first = slots[:, 0].expand_as(count)
    newest = slots.expand(len(count), -1, -1).gather(2, (count - 1).clamp(min=0)[..., None]).squeeze(2)
    positions = torch.where(starting, first, newest + 1)
    free = target.forced_at((positions - 1).clamp(min=0)) < 0
    aside = starting & free & (above < width)
    stand_in = torch.where(opens | opens.roll(1), newest.roll(1, dims=1), newest.roll(2, dims=1))
    fed = tokens.gather(1, torch.where(aside, stand_in, positions - 1).clamp(min=0))
    return RowRoots(above, starting | growing, closing, positions, fed, aside)


def row_above(count: Tensor, rows: ImageRows) -> Tensor:
    """Return the number of tokens [B, H] of the row above each row, given `count` [B, H]. The first row of a grid
    has no row above: the number is its own width, or 0 while the previous grid is incomplete."""
    above = count.roll(1, dims=1)
    complete = (above == rows.widths.roll(1)) | (torch.arange(count.shape[1], device=count.device) == 0)
    return torch.where(rows.opens, torch.where(complete, rows.widths, 0), above)
