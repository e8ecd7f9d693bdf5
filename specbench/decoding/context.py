"""What a component is built from: facts of the model and of the decoder."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from specbench.models.interface import ImageModel, TokenLayout

Acceptance = Callable[[Tensor, Tensor, Tensor], Tensor]
"""a(x; p, q) [..., n] of p, q [..., V] and tokens x [..., n]."""
Residual = Callable[[Tensor, Tensor, Acceptance], Tensor]
"""A residual distribution's function, see `specbench.decoding.verification.residuals`."""


@dataclass(frozen=True)
class Context:
    """Facts of the model, and the decoder's residual distribution.

    Attributes:
        layout: grammar of the token stream.
        codebook: [v_image, d] float32 embedding of each image token for distance rules, or None.
        device: of the target.
        residual: residual distribution after a rejection.
        drafts: maximum draft depth of a step; 0 while the drafter is built, which decides it.
        model: the target.
    """

    layout: TokenLayout
    codebook: Tensor | None
    device: torch.device
    residual: Residual
    drafts: int = 0
    model: ImageModel | None = None
