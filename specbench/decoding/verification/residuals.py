"""Residual distributions after a rejection, as unnormalised weights [..., V].

With acceptance a(x) and proposal distribution q, the residual distribution of a lossless decoder is proportional to p -
a q. Acceptance is passed as a function, since only `optimal` evaluates it over the whole vocabulary. Where there is no
draft, q is all zero and both give p.
"""

from __future__ import annotations

import torch
from torch import Tensor

from specbench.decoding.interfaces import Acceptance


def or_target(weights: Tensor, p: Tensor) -> Tensor:
    """`weights`, or p where all are zero: there p equals q, and the rejection is a rounding error."""
    return torch.where(weights.sum(-1, keepdim=True) > 0, weights, p)


def standard(p: Tensor, q: Tensor, acceptance: Acceptance | None = None) -> Tensor:
    """[p - q]+, the residual of the exact acceptance min(1, p/q) (Leviathan et al. 2023, theorem 1)."""
    return or_target((p - q).clamp_(min=0), p)


def optimal(p: Tensor, q: Tensor, acceptance: Acceptance) -> Tensor:
    """[p - a q]+, the residual closest to p in total variation for any acceptance a (Cool-SD, theorem 1)."""
    tokens = torch.arange(p.shape[-1], device=p.device).expand(p.shape)
    accepted = acceptance(p, q, tokens).clamp(max=1) * q
    return or_target((p - accepted).clamp_(min=0), p)
