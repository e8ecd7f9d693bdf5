"""Relaxed acceptance min(1, w p/q), with a weight per draft depth (UniformRSD and Cool-SD, arXiv 2601.09212).

Weights above 1 accept more and are lossy; weights below 1 reject more, and are unbiased under the `optimal` residual
only. Cool-SD's claim: weights that decrease with depth cost less quality than weights that increase.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from specbench.decoding.interfaces import Context
from specbench.decoding.verification.ratio_tests import RatioTest, ratio


def uniform(drafts: int, delta: float) -> list[float]:
    """delta at every depth (eq. 13)."""
    return [delta] * drafts


def exponential(drafts: int, delta: float, nu: float) -> list[float]:
    """delta exp(-nu d - mu) at depth d = 1 .. L, mu such that their mean is delta (eq. 16)."""
    shape = [math.exp(-nu * depth) for depth in range(1, drafts + 1)]
    return [delta * value * drafts / sum(shape) for value in shape]


def linear(drafts: int, delta: float, slope: float) -> list[float]:
    """delta (1 + slope (L + 1 - 2 d) / (L - 1)), linear with mean delta (the idea of eq. 17; its exact form is not
    public)."""
    if drafts == 1:
        return [delta]
    return [delta * (1 + slope * (drafts + 1 - 2 * depth) / (drafts - 1)) for depth in range(1, drafts + 1)]


class DepthWeighted(RatioTest):
    """min(1, w_d p/q) at draft depth d; no weight is below `floor`."""

    def __init__(self, context: Context, schedule: str, delta: float, nu: float, slope: float, floor: float):
        super().__init__(context)
        drafts = max(context.drafts, 1)
        weights: Sequence[float] = {
            "uniform": lambda: uniform(drafts, delta),
            "exponential": lambda: exponential(drafts, delta, nu),
            "linear": lambda: linear(drafts, delta, slope),
        }[schedule]()
        self.weights = torch.tensor([max(floor, weight) for weight in weights], device=context.device)

    def acceptance(self, p: Tensor, q: Tensor, x: Tensor, depth: int | Tensor = 1) -> Tensor:
        place = torch.as_tensor(depth, device=self.weights.device).clamp(max=len(self.weights)) - 1
        return self.weights[place][..., None] * ratio(p, q, x)
