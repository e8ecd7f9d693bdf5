"""Refinement: what each slot of the window holds next, had everything before it been final.

Given the past, each rule but `Reuse` puts a draw from p into the slot, so the next step's q is p whether or not the
token changed.
"""

from __future__ import annotations

import torch
from torch import Tensor

from specbench.decoding.context import Context
from specbench.decoding.noise import Noise, Stream
from specbench.decoding.sampling import draw, kept
from specbench.decoding.verification.ratio_tests import DraftTests, ratio
from specbench.decoding.verification.residuals import standard


class Resample:
    """A fresh draw from p for every slot (SJD)."""

    keeps_tail = True
    """Whether the refined slots become the next drafts."""

    def __init__(self, context: Context):
        pass

    def refine(self, tests: DraftTests, noise: Noise, positions: Tensor, step: Tensor) -> Tensor:
        """[B, T] next token of each slot; `positions` [B, T] and `step` [B, 1] address the noise."""
        held = kept(tests.p)
        return held.token(draw(held.mass, noise.uniform(positions, Stream.REDRAW, step)))


class Restart(Resample):
    """Draws as `Resample`, but the tail is thrown away and initialised afresh (SJD's ablation)."""

    keeps_tail = False


class Reuse(Resample):
    """Keep the draft where p/q > tau, else draw afresh (SJD++). Lossy: a kept draft follows q cut off, not p."""

    def __init__(self, context: Context, tau: float):
        super().__init__(context)
        self._tau = tau

    def refine(self, tests: DraftTests, noise: Noise, positions: Tensor, step: Tensor) -> Tensor:
        fresh = super().refine(tests, noise, positions, step)
        confidence = ratio(tests.p, tests.q, tests.draft[..., None]).squeeze(-1)
        return torch.where(tests.drafted & (confidence > self._tau), tests.draft, fresh)


class Couple:
    """Maximal coupling: keep the draft with probability min(1, p/q), else draw from [p - q]+ (SCD; SJD-PAC's AC).

    A slot without a draft has nothing to be coupled to and is drawn from p. The rule tosses
    the same coin as the verifier, whose outcome at this slot only matters when the slot is not refined.
    """

    keeps_tail = True

    def __init__(self, context: Context):
        pass

    def refine(self, tests: DraftTests, noise: Noise, positions: Tensor, step: Tensor) -> Tensor:
        stays = tests.coin < ratio(tests.p, tests.q, tests.draft[..., None]).squeeze(-1)
        held = kept(tests.p)
        residual = standard(held.mass, tests.q.gather(-1, held.ids))
        weights = torch.where(tests.drafted[..., None], residual, held.mass)
        other = held.token(draw(weights, noise.uniform(positions, Stream.REDRAW, step)))
        return torch.where(stays & tests.drafted, tests.draft, other)


class Gumbel:
    """Race p against noise frozen per stream slot: similar p choose the same token (SCD; predictive sampling)."""

    keeps_tail = True

    def __init__(self, context: Context):
        pass

    def refine(self, tests: DraftTests, noise: Noise, positions: Tensor, step: Tensor) -> Tensor:
        return noise.run_race(tests.p, positions, Stream.TOKEN)
