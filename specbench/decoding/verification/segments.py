"""Verification of runs of drafts by one test: SJD-SV (arXiv 2609.13245) and a relative of phrase verification.

The drafts are cut into segments. In a segment b .. e the shortest end g .. e with at least `alpha` of the segment's sum
of p_i(x_i) is tested, all at once:

    accept the segment if u < prod_{i=g}^{e} p_i(x_i)/q_i(x_i); otherwise try g .. e - 1, g .. e - 2 and so on

The drafts before g are never tested. After the first segment that is not accepted whole, the next token is drawn from
[p - q]+ of its own slot alone. This is lossy: the product accepts drafts for the sake of their neighbours, and the
residual distribution does not make up for it. `block` is the exact rule.

Cuts: `rising` starts a segment wherever p_i(x_i) falls (SJD-SV); `pairs` joins two drafts that stand in a table of
pairs of tokens, and tests segments whole.
"""

from __future__ import annotations

from pathlib import Path

import torch
from torch import Tensor

from specbench.decoding.interfaces import Context
from specbench.decoding.sampling import at
from specbench.decoding.verification.ratio_tests import DraftTests, Exact, Verdict
from specbench.errors import SpecbenchError

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


class PairSegments(Segments):
    """Accept or reject whole chains of drafts whose neighbours stand in a table of pairs."""

    def __init__(self, context: Context, pairs: str, any_tail: bool = False):
        super().__init__(context, alpha=1.0)
        self._vocab = context.layout.vocab
        found = read_pairs(pairs, context.layout.v_image) if pairs else [(t, t) for t in range(context.layout.v_image)]
        codes = sorted({first * self._vocab + second for first, second in found})
        self._codes = torch.tensor(codes, device=context.device)

    def starts(self, tests: DraftTests, px: Tensor) -> Tensor:
        codes = tests.draft[:, :-1] * self._vocab + tests.draft[:, 1:]
        place = torch.searchsorted(self._codes, codes).clamp(max=len(self._codes) - 1)
        return self._codes[place] != codes


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


def read_pairs(path: str, v_image: int) -> list[tuple[int, int]]:
    """Pairs of image token ids from a text file with two ids on each line.

    Raises:
        SpecbenchError: no such file, or a line that is no pair of ids below `v_image`.
    """
    try:
        lines = Path(path).read_text().splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise SpecbenchError(f"--pairs {path}: cannot be read as text", "name a file of token pairs") from error
    pairs = []
    for number, line in enumerate(lines, start=1):
        words = line.split()
        if len(words) != 2 or not all(word.isdecimal() and int(word) < v_image for word in words):
            raise SpecbenchError(f"--pairs {path}, line {number}: expected two token ids below {v_image}")
        pairs.append((int(words[0]), int(words[1])))
    if not pairs:
        raise SpecbenchError(f"--pairs {path}: no pairs", "write two token ids on each line")
    return pairs
