"""Grouped-query attention without repeated keys and values.

Transformers packs the queries of a group only for one column and repeats keys and values for several, which would
slow down windows but not AR.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from transformers import AttentionInterface, AttentionMaskInterface, PretrainedConfig
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import sdpa_mask

_NAME = "specbench_grouped"


def grouped_attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    **options: object,
) -> tuple[Tensor, None]:
    """Attention with the signature of transformers: queries [R, H, T, d], keys and values [R, H / G, S, d], mask
    [R, 1, T, S]; output [R, T, H, d]. The G heads of a group become columns of one head.
    """
    rows, heads, columns, width = query.shape
    groups = heads // key.shape[1]
    if groups == 1 and (attention_mask is not None or columns == 1) and not options:
        output = torch.nn.functional.scaled_dot_product_attention(query, key, value, attention_mask, scale=scaling)
        return output.transpose(1, 2).contiguous(), None
    if groups == 1 or attention_mask is None:
        return sdpa_attention_forward(module, query, key, value, attention_mask, scaling=scaling, **options)
    packed = query.reshape(rows, heads // groups, groups * columns, width)
    mask = attention_mask.repeat(1, 1, groups, 1)
    output = torch.nn.functional.scaled_dot_product_attention(packed, key, value, attn_mask=mask, scale=scaling)
    return output.reshape(rows, heads, columns, -1).transpose(1, 2).contiguous(), None


AttentionInterface.register(_NAME, grouped_attention)
AttentionMaskInterface.register(_NAME, sdpa_mask)


def uses_sdpa(config: PretrainedConfig) -> bool:
    """Whether a network's attention is torch's, or that of this module."""
    return config._attn_implementation in ("sdpa", _NAME)


def use_grouped_attention(backbone: nn.Module) -> None:
    """Use `grouped_attention` in a network with grouped keys and values."""
    config = backbone.config
    if config._attn_implementation == "sdpa" and config.num_key_value_heads != config.num_attention_heads:
        config._attn_implementation = _NAME
