"""Block verification (Sun et al., ICLR 2025, arXiv 2403.10444, algorithm 2): drafts of a chain are accepted together.

With r_i = p_i(x_i)/q_i(x_i) of draft i = 1 .. L:

    P_0 = 1,  P_i = min(1, P_{i-1} r_i)
    S_i = sum_v [P_i p_{i+1}(v) - q_{i+1}(v)]+,  h_i = S_i / (S_i + 1 - P_i) for i < L,  h_L = P_L
    accept the first n drafts, n the largest i whose own coin falls below h_i, or 0
    n < L:  draw the next token from [P_n p_{n+1} - q_{n+1}]+
    n = L:  draw it from p_{L+1}

Where all P_i are 1 this is the usual test of one draft after another; it never accepts fewer drafts on average. The
number of accepted drafts depends on drafts after them, so those must be thrown away: the rule is lossless only where
every draft of the next step is drawn anew.
"""

from __future__ import annotations

import torch
from torch import Tensor

from specbench.decoding.interfaces import Context
from specbench.decoding.verification.ratio_tests import DraftTests, Exact, Verdict


class Block(Exact):
    """Accept the drafts up to the last one whose coin falls below its h."""

    def __init__(self, context: Context, any_tail: bool = False):
        """`any_tail` is read where decoders are planned: it lifts the restriction to redrawn drafts."""
        super().__init__(context)
        self._length = context.layout.length

    def verify(self, tests: DraftTests, refined: Tensor) -> Verdict:
        # Slots past the end hold no drafts: an image must not depend on how far other rows of its batch are.
        exists = tests.drafted & (tests.position < self._length)
        reach = joint_ratio(torch.where(exists, tests.ratio, 0.0))
        following = torch.nn.functional.pad(exists[:, 1:], (0, 1))
        scaled = reach[:, :-1, None].to(tests.p.dtype) * tests.p[:, 1:]
        excess = (scaled - tests.q[:, 1:]).clamp_(min=0).sum(-1, dtype=torch.float64)
        excess = torch.nn.functional.pad(excess, (0, 1))
        bound = excess + 1 - reach
        h = torch.where(following, torch.where(bound > 0, excess / bound, 1.0), reach)
        passed = exists & (tests.coin < h)
        accepted = passed.flip(1).cummax(1).values.flip(1)
        return Verdict(accepted, {}, torch.nn.functional.pad(reach[:, :-1], (1, 0), value=1.0))


def joint_ratio(r: Tensor) -> Tensor:
    """P_i = min(1, P_{i-1} r_i) [B, K] of ratios r [B, K], P_0 being 1; float64."""
    # log P_i is the sum of all logarithms less the largest sum so far, where that is positive.
    total = r.double().log().cumsum(1)
    return (total - total.cummax(1).values.clamp(min=0)).exp()
