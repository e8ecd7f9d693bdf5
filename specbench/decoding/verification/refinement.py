"""Refinement: the next draft of each slot of the window, drawn as if every earlier slot were final.

Given the prefix, every rule except `Reuse` fills the slot with a sample from its `distribution`. The
distribution is q of the next step, even if the token has not changed. It is p, except for `StaleReuse`.
"""

from typing import Protocol

import torch
from torch import Tensor

from specbench.decoding.interfaces import Context
from specbench.decoding.noise import Noise, Stream
from specbench.decoding.sampling import draw, kept
from specbench.decoding.verification.ratio_tests import DraftTests, standard


class Refinement(Protocol):
    keeps_tail: bool  # Whether the refined slots are the next drafts

    def refine(self, p: Tensor, tests: DraftTests, noise: Noise, positions: Tensor, step: Tensor) -> Tensor:
        """Next token [B, T] of each slot.

        Args:
            p: [B, T, V] target distribution of each slot.
            tests: the current drafts of the first K <= T slots; later slots have no draft.
            positions, step: [B, T] stream slots and [B, 1] step, which address the noise.
        """
        ...


def refined_from(refinement: Refinement, p: Tensor, tests: DraftTests) -> Tensor | None:
    """Distributions [B, T, V] that the refined tokens are drawn from; None means p.

    A refinement that draws from another distribution, such as `StaleReuse`, has a method `distribution`.
    """
    distribution = getattr(refinement, "distribution", None)
    return distribution(p, tests) if distribution else None


class KeptTail:
    """Base of refinements that keep the tail and do not use the context."""

    keeps_tail = True

    def __init__(self, context: Context):
        pass


class Resample(KeptTail):
    """Resample every slot from p (SJD)."""

    def refine(self, p: Tensor, tests: DraftTests, noise: Noise, positions: Tensor, step: Tensor) -> Tensor:
        sparse = kept(p)
        return sparse.token(draw(sparse.mass, noise.uniform(positions, Stream.REDRAW, step)))


class Restart(Resample):
    """Reinitialise the slots after the last accepted draft (SJD's ablation). Only `Match` uses the samples."""

    keeps_tail = False


class Reuse(Resample):
    """Keep the draft if p/q > tau, else resample (SJD++). Lossy: a kept draft follows a truncated q, not p."""

    def __init__(self, context: Context, tau: float):
        super().__init__(context)
        self._tau = tau

    def refine(self, p: Tensor, tests: DraftTests, noise: Noise, positions: Tensor, step: Tensor) -> Tensor:
        return _keep(tests.draft, self._kept(tests), super().refine(p, tests, noise, positions, step))

    def _kept(self, tests: DraftTests) -> Tensor:
        return tests.drafted & (tests.ratio > self._tau)


class StaleReuse(Reuse):
    """`Reuse` that records the q that a kept draft had before, as the released code of PJD does."""

    def distribution(self, p: Tensor, tests: DraftTests) -> Tensor:
        drafts = tests.draft.shape[1]
        return torch.cat([torch.where(self._kept(tests)[..., None], tests.q, p[:, :drafts]), p[:, drafts:]], dim=1)


class Couple(KeptTail):
    """Maximal coupling: keep the draft with probability min(1, p/q), else draw from [p - q]+ (SCD; SJD-PAC's AC).

    A slot without a draft is drawn from p. The coin is shared with the verifier: its outcome affects only slots that
    are not refined.
    """

    def refine(self, p: Tensor, tests: DraftTests, noise: Noise, positions: Tensor, step: Tensor) -> Tensor:
        sparse, drafts = kept(p), tests.draft.shape[1]
        # q is 0 for slots without a draft, and [p - 0]+ is p.
        residual = standard(sparse.mass[:, :drafts], sparse.weights(tests.q, slice(drafts)))
        weights = torch.cat([residual, sparse.mass[:, drafts:]], dim=1)
        other = sparse.token(draw(weights, noise.uniform(positions, Stream.REDRAW, step)))
        keep = tests.coin < tests.ratio
        return _keep(tests.draft, tests.drafted & keep, other)


class Gumbel(KeptTail):
    """Gumbel coupling: exponential race of p with fixed noise per stream slot (SCD; predictive sampling)."""

    def refine(self, p: Tensor, tests: DraftTests, noise: Noise, positions: Tensor, step: Tensor) -> Tensor:
        return noise.run_race(p, positions, Stream.TOKEN)


def _keep(draft: Tensor, keep: Tensor, other: Tensor) -> Tensor:
    """Select `draft` [B, K] if `keep` [B, K], else `other` [B, T]. Slots from K on have no draft."""
    drafts = draft.shape[1]
    return torch.cat([torch.where(keep, draft, other[:, :drafts]), other[:, drafts:]], dim=1)
