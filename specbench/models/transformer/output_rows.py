"""A model's image head on a few ids of each row."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

from torch import Tensor

from specbench.models.transformer.forward import guide


class OutputRows(NamedTuple):
    """Rows of the output matrix [B, K, d], and of its bias [B, K] if it has one, copied together once for many uses.

    Attributes:
        before: what the matrix is multiplied with, of features.
    """

    before: Callable[[Tensor], Tensor]
    guidance: float
    weight: Tensor
    bias: Tensor | None

    def logits(self, features: Tensor) -> Tensor:
        """Guided logits [B, T, K] of features [R, T, d], conditional rows first."""
        hidden = self.before(features)
        halves = hidden.unflatten(0, (-1, len(self.weight)))
        # The rows of an image, next to each other, read its part of the matrix once.
        found = halves.transpose(0, 1).flatten(1, 2) @ self.weight.mT
        found = found if self.bias is None else found + self.bias[:, None]
        found = found.unflatten(1, (len(halves), -1)).transpose(0, 1).flatten(0, 1)
        return guide(found.float(), self.guidance)
