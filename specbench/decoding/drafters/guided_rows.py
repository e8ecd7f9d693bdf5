"""Rows of a target under guidance, conditional and unconditional ones, as draft heads feed and read them."""

from __future__ import annotations

import torch
from torch import Tensor


def for_rows(columns: Tensor, rows: int) -> Tensor:
    """[B, ...] to [R, ...] for R = `rows`: unconditional rows have the slots and tokens of the conditional ones."""
    # `repeat` takes several times as long for a few numbers.
    return torch.cat([columns] * (rows // len(columns)))


def features_at(features: Tensor, columns: Tensor) -> Tensor:
    """[R, T, d] features [R, C, d] of a forward at `columns` [B, T]."""
    columns = for_rows(columns, len(features))
    return features.gather(1, columns[..., None].expand(-1, -1, features.shape[-1]))
