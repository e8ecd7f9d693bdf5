"""ZipAR (He et al., ICML 2025, arXiv 2412.04062): decode an image row before the row above is complete.

Row r starts once row r - 1 has a window of tokens; from then on every incomplete row gets one token per forward, and
each column attends to all generated tokens earlier in raster order. Lossy: a token is conditioned on a part of the rows
above. With a window as wide as the row, the decoder is AR. For the input of a row's first token, see `row_loop`.

The adaptive window draws the first token x of a row from p. Each time the row above has grown, x is kept with
probability min(1, p'(x)/p(x)) under the new p'; otherwise it is redrawn from [p' - p]+ and tested again. The paper's
code does not contain this window; the rule follows the paper's text.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Literal, NamedTuple

import torch
from torch import Tensor

from specbench.decoding.drafters.token_init import Init
from specbench.decoding.interfaces import Context
from specbench.decoding.noise import Stream
from specbench.decoding.row_loop import ImageRowLoop, image_rows, row_above, row_roots
from specbench.decoding.sampling import at
from specbench.decoding.verification.ratio_tests import standard
from specbench.models.transformer.host_sync import to_host

if TYPE_CHECKING:
    from specbench.decoding.build import Method


class Lanes(NamedTuple):
    """Tokens of a forward (columns), one per active image row. B images, C active rows."""

    rows: Tensor  # [C] image rows
    # tokens, positions: [B, C] for `ScatteredSession.forward_scattered`; the position of an idle column is past the
    # image's end
    tokens: Tensor
    positions: Tensor
    aside: Tensor  # [B, C] bool, columns that consume a substitute token; no other column attends to them
    pending: Tensor  # [B, C] bool, columns whose prediction is needed
    visible: Tensor  # [B, N + 1] bool, slots that the columns attend to


class ZipAR:
    """Settings of `ZipARLoop`, registered as a drafter although nothing is drafted.

    Attributes:
        lags: [H] tokens that the row above must have before a row starts.
        keeps_stand_ins: whether substitute tokens stay in the cache until the true token replaces them.
    """

    def __init__(
        self,
        context: Context,
        init: Init | None,
        rows_window: int,
        adaptive: bool,
        rows_count: Literal["tokens", "released"] = "tokens",
        stand_ins: Literal["dropped", "kept"] = "dropped",
    ):
        self.window = 1
        self.rows = image_rows(context, "zipar")
        self.columns, forced = len(self.rows.widths), any(token >= 0 for token in context.layout.forced)
        if rows_count == "released" and forced:
            rows_window = max(rows_window - 1, 1)
        self.lags = self.rows.widths.clamp(max=rows_window)
        if rows_count == "released" and not forced:
            self.lags = torch.where(self.rows.opens.roll(1), self.rows.widths, self.lags)
        self.adaptive = adaptive
        self.keeps_stand_ins = stand_ins == "kept"


class ZipARLoop(ImageRowLoop):
    """Decode loop that processes several image rows of each image in parallel: one token per active row and forward."""

    def __init__(self, method: Method, *arguments: Any):
        super().__init__(method, *arguments)
        vocab = self._target.vocab if self._plan.adaptive else 0
        self._guess = torch.full_like(self.count, -1)
        self._guess_p = torch.zeros(*self.count.shape, vocab, device=self.count.device)

    def _columns(self, step: Tensor) -> Lanes | None:
        roots = row_roots(self.tokens, self.count, self._closed, self._rows, self._plan.lags, self._target)
        pending, closing, positions, aside = roots.pending, roots.closing, roots.positions, roots.aside
        if self._plan.keeps_stand_ins:
            aside = torch.zeros_like(aside)
        # Host sync: with an adaptive window, the active rows, and so the width of the forward, depend on drawn tokens.
        working = [row for row, works in enumerate(to_host((pending | closing).any(0))) if works]
        if not working:
            return None
        rows = torch.tensor(working, device=pending.device)
        work = pending | closing
        positions = torch.where(work, positions, self._length)
        fed = work & ~aside
        self._closed |= closing
        tokens, positions, fed, aside, pending = (x[:, rows] for x in (roots.tokens, positions, fed, aside, pending))
        self._fed.scatter_(1, positions, self._fed.gather(1, positions) | fed)
        return Lanes(rows, tokens, positions, aside, pending, self._fed)

    def _commit(self, p: Tensor, lanes: Lanes, step: Tensor) -> None:
        drawn, stays = self._noise.run_race(p, lanes.positions, Stream.TOKEN), lanes.pending
        if self._plan.adaptive:
            drawn, stays = self._reconsider(p, drawn, lanes, step)
        positions = torch.where(stays, lanes.positions, self._length)
        self.tokens.scatter_(1, positions, drawn)
        self.recorder.slots(p, drawn, positions, step)
        self.count[:, lanes.rows] += stays

    def _reconsider(self, p: Tensor, drawn: Tensor, lanes: Lanes, step: Tensor) -> tuple[Tensor, Tensor]:
        """Resample the first tokens of rows [B, C] (adaptive window). Also return which tokens stay."""
        count = self.count[:, lanes.rows]
        above = row_above(self.count, self._rows)[:, lanes.rows]
        starting = lanes.pending & (count == 0)
        guess, guess_p = self._guess[:, lanes.rows], self._guess_p[:, lanes.rows]
        guessed = starting & (guess >= 0)
        x = guess.clamp(min=0)
        coin = self._noise.uniform(lanes.positions, Stream.COIN, step)
        kept = guessed & (coin * at(guess_p, x) < at(p, x))
        redrawn = self._noise.run_race(standard(p, guess_p), lanes.positions, Stream.RESIDUAL, step)
        first = torch.where(kept, guess, torch.where(guessed, redrawn, drawn))
        self._guess[:, lanes.rows] = torch.where(starting, first, guess)
        self._guess_p[:, lanes.rows] = torch.where(starting[..., None], p, guess_p)
        settled = kept | (above == self._width[lanes.rows])
        return torch.where(starting, first, drawn), lanes.pending & (~starting | settled)
