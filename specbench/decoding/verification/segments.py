"""Verification of runs of drafts by one test: SJD-SV (arXiv 2609.13245).

The drafts are cut into segments. In a segment b .. e the shortest end g .. e with at least `alpha` of the segment's sum
of p_i(x_i) is tested, all at once:

    accept the segment if u < prod_{i=g}^{e} p_i(x_i)/q_i(x_i); otherwise try g .. e - 1, g .. e - 2 and so on

The drafts before g are never tested. After the first segment that is not accepted whole, the next token is drawn from
[p - q]+ of its own slot alone. This is lossy: the product accepts drafts for the sake of their neighbours, and the
residual distribution does not make up for it. `block` is the exact rule.

A segment starts wherever p_i(x_i) falls.
"""

from __future__ import annotations

import torch
from torch import Tensor

from specbench.decoding.interfaces import Context
from specbench.decoding.sampling import at
from specbench.decoding.verification.ratio_tests import DraftTests, Exact, Verdict

_IMPOSSIBLE = -1e6
"""Stands for the logarithm of 0, so that differences of sums stay defined."""


class Segments(Exact):
    """Accept or reject segments of rising p_i(x_i)."""

    def __init__(self, context: Context, alpha: float, any_tail: bool = False):
        super().__init__(context)
        self._alpha = alpha
        self._length = context.layout.length

    def starts(self, tests: DraftTests, px: Tensor) -> Tensor:
        """[B, K - 1] bool, whether drafts 1 .. K - 1 start a segment; `px` [B, K] is p_i(x_i)."""
        return px[:, 1:] < px[:, :-1]

    def verify(self, tests: DraftTests, refined: Tensor) -> Verdict:
        exists = tests.drafted & (tests.position < self._length)
        px = at(tests.p, tests.draft)
        r = torch.where(exists, tests.ratio, 0.0)
        # Slots past the end hold no drafts: an image must not depend on how far other rows of its batch are.
        starts = torch.nn.functional.pad(self.starts(tests, px), (1, 0), value=True) | ~exists
        return Verdict(accept_segments(px.double(), r.double(), starts, tests.coin, self._alpha) & exists, {})


def accept_segments(px: Tensor, r: Tensor, starts: Tensor, coin: Tensor, alpha: float) -> Tensor:
    """Accepted drafts [B, K] by segment, as if all segments before were accepted.

    Args:
        px, r: [B, K] p_i(x_i) and p_i(x_i)/q_i(x_i), float64.
        starts: [B, K] bool, drafts that start a segment.
        coin: [B, K] uniforms; a segment has that of its first draft.
    """
    number = starts.long().cumsum(1)
    slot = torch.arange(px.shape[1], device=px.device)
    same = number[:, :, None] == number[:, None, :]
    after = same & (slot > slot[:, None])
    total = (px[:, None] * same).sum(-1)
    # The last draft of a segment is always tested, whatever p gives it.
    tested = ((px[:, None] * after).sum(-1) < alpha * total) | ~after.any(-1) | (alpha >= 1)
    steps = torch.where(tested, r.log().clamp(min=_IMPOSSIBLE), 0.0)
    before = same & (slot <= slot[:, None])
    product = (steps[:, None] * before).sum(-1).exp()
    first = (number[:, :, None] > number[:, None, :]).sum(-1)
    passed = ~tested | (coin.gather(1, first) < product)
    return (passed[:, None] & (same & (slot >= slot[:, None]))).any(-1)
