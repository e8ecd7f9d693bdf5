"""What a component of a decoder may know when it is built."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from specbench.decoding.verification.residuals import Residual
from specbench.models.interface import ImageModel, TokenLayout


@dataclass(frozen=True)
class Context:
    """Facts of the model, and the residual the decoder uses.

    Attributes:
        layout: the grammar of the token stream.
        codebook: [v_image, d] float32 embedding of each image token for distance rules, or None.
        device: where decoding happens.
        residual: what is drawn after a rejection.
        drafts: the most drafts in a row that one step can test; 0 while that is not known.
        model: the target itself.
    """

    layout: TokenLayout
    codebook: Tensor | None
    device: torch.device
    residual: Residual
    drafts: int = 0
    model: ImageModel | None = None
