"""Refinement: the next draft of each slot of the window, drawn as if every earlier slot were final.

Given the prefix, every rule but `Reuse` fills the slot with a sample of p, so that q of the next step is p whether or
not the token has changed.
"""

from __future__ import annotations

from typing import Protocol

import torch
from torch import Tensor

from specbench.decoding.context import Context
from specbench.decoding.noise import Noise, Stream
from specbench.decoding.sampling import draw, kept
from specbench.decoding.verification.ratio_tests import DraftTests, ratio
from specbench.decoding.verification.residuals import standard


class Refinement(Protocol):
    keeps_tail: bool
    """Whether the refined slots are the next drafts."""

    def refine(self, p: Tensor, tests: DraftTests, noise: Noise, positions: Tensor, step: Tensor) -> Tensor:
        """Next token [B, T] of each slot.

        Args:
            p: [B, T, V] target distribution of each slot.
            tests: the current drafts of the first K <= T slots; slots after them have none.
            positions, step: [B, T] stream slots and [B, 1] step; they address the noise.
        """
        ...


class Resample:
    """Resample every slot from p (SJD)."""

    keeps_tail = True

    def __init__(self, context: Context):
        pass

    def refine(self, p: Tensor, tests: DraftTests, noise: Noise, positions: Tensor, step: Tensor) -> Tensor:
        held = kept(p)
        return held.token(draw(held.mass, noise.uniform(positions, Stream.REDRAW, step)))


class Restart(Resample):
    """Reinitialise the slots after the last accepted draft (SJD's ablation); `Match` still compares with `Resample`."""

    keeps_tail = False


class Reuse(Resample):
    """Keep the draft where p/q > tau, else resample (SJD++). Lossy: a kept draft follows a truncated q, not p."""

    def __init__(self, context: Context, tau: float):
        super().__init__(context)
        self._tau = tau

    def refine(self, p: Tensor, tests: DraftTests, noise: Noise, positions: Tensor, step: Tensor) -> Tensor:
        fresh = super().refine(p, tests, noise, positions, step)
        confidence = ratio(tests.p, tests.q, tests.draft[..., None]).squeeze(-1)
        return _keep(tests.draft, tests.drafted & (confidence > self._tau), fresh)


class Couple:
    """Maximal coupling: keep the draft with probability min(1, p/q), else draw from [p - q]+ (SCD; SJD-PAC's AC).

    A slot without a draft is drawn from p. The coin is shared with the verifier, whose outcome affects unrefined slots
    only.
    """

    keeps_tail = True

    def __init__(self, context: Context):
        pass

    def refine(self, p: Tensor, tests: DraftTests, noise: Noise, positions: Tensor, step: Tensor) -> Tensor:
        held, drafts = kept(p), tests.draft.shape[1]
        # q is 0 where there is no draft, and [p - 0]+ is p.
        residual = standard(held.mass[:, :drafts], tests.q.gather(-1, held.ids[:, :drafts]))
        weights = torch.cat([residual, held.mass[:, drafts:]], dim=1)
        other = held.token(draw(weights, noise.uniform(positions, Stream.REDRAW, step)))
        keep = tests.coin < ratio(tests.p, tests.q, tests.draft[..., None]).squeeze(-1)
        return _keep(tests.draft, tests.drafted & keep, other)


class Gumbel:
    """Gumbel coupling: exponential race of p with fixed noise per stream slot (SCD; predictive sampling)."""

    keeps_tail = True

    def __init__(self, context: Context):
        pass

    def refine(self, p: Tensor, tests: DraftTests, noise: Noise, positions: Tensor, step: Tensor) -> Tensor:
        return noise.run_race(p, positions, Stream.TOKEN)


def _keep(draft: Tensor, keep: Tensor, other: Tensor) -> Tensor:
    """`draft` [B, K] where `keep` [B, K], else `other` [B, T], whose slots from K on have no draft."""
    drafts = draft.shape[1]
    return torch.cat([torch.where(keep, draft, other[:, :drafts]), other[:, drafts:]], dim=1)
