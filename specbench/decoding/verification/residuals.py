"""What to draw after a rejection, as unnormalised weights [..., V].

With acceptance a(x) and draft law q, `p - a q` is exactly what rejected drafts leave to be filled. Both rules see the
acceptance as a function, because only `optimal` needs it over the whole vocabulary. Where no draft stood, q is all zero
and both give p.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

Residual = Callable[[Tensor, Tensor, Callable[[Tensor, Tensor, Tensor], Tensor]], Tensor]


def or_target(weights: Tensor, p: Tensor) -> Tensor:
    """p where rounding left no residual mass (p equals q, so a rejection there was rounding too)."""
    return torch.where(weights.sum(-1, keepdim=True) > 0, weights, p)


def standard(p: Tensor, q: Tensor, acceptance: Callable | None = None) -> Tensor:
    """[p - q]+, right for the exact acceptance min(1, p/q) (Leviathan et al. 2023, theorem 1)."""
    return or_target((p - q).clamp_(min=0), p)


def optimal(p: Tensor, q: Tensor, acceptance: Callable[[Tensor, Tensor, Tensor], Tensor]) -> Tensor:
    """[p - a q]+, the residual closest to p in total variation for any acceptance a (Cool-SD, theorem 1)."""
    tokens = torch.arange(p.shape[-1], device=p.device).expand(p.shape)
    accepted = acceptance(p, q, tokens).clamp(max=1) * q
    return or_target((p - accepted).clamp_(min=0), p)
