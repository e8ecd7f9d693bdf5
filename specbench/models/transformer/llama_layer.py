"""One decoder layer of a Llama with fewer calls than transformers' layer. Results are the same bit for bit, except for
products with few hidden states on a CPU (`specbench.system.matrix_products`).

A small model's forward takes as long as its calls, and many calls do no arithmetic: keyword arguments, checks and
wrappers of modules, a norm in six operations, a rotary embedding that every layer unpacks again.
"""

import torch
from torch import Tensor, nn
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import sdpa_mask
from transformers.models.llama.modeling_llama import LlamaDecoderLayer, LlamaRMSNorm

from specbench.models.transformer.kv_cache import PositionCache
from specbench.system.matrix_products import linear_output

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
    """Grouped-query attention without repeated keys and values, with the signature of transformers: queries
    [R, H, T, d], keys and values [R, H / G, S, d], mask [R, 1, T, S]; output [R, T, H, d].

    The queries of the G heads of a group become query positions ("columns") of one head. transformers does this for a
    single query position only; otherwise it repeats keys and values.
    """
    rows, heads, columns, width = query.shape
    groups = heads // key.shape[1]
    if columns == 1 and torch.compiler.is_compiling() and query.device.type == "cpu" and not options:
        return _lone_attention(query, key, value, attention_mask, scaling or width**-0.5), None
    if groups == 1 and (attention_mask is not None or columns == 1) and not options:
        output = torch.nn.functional.scaled_dot_product_attention(query, key, value, attention_mask, scale=scaling)
        return output.transpose(1, 2).contiguous(), None
    if groups == 1 or attention_mask is None:
        return sdpa_attention_forward(module, query, key, value, attention_mask, scaling=scaling, **options)
    packed = query.reshape(rows, heads // groups, groups * columns, width)
    mask = attention_mask.repeat(1, 1, groups, 1)
    output = torch.nn.functional.scaled_dot_product_attention(packed, key, value, attn_mask=mask, scale=scaling)
    return output.reshape(rows, heads, columns, -1).transpose(1, 2).contiguous(), None


def _lone_attention(query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, scaling: float) -> Tensor:
    """Compute `grouped_attention` of one query position as sums. Compiled for a CPU they take 0.6 of the time of
    torch's kernel, whose query blocks are then nearly empty."""
    grouped = query.view(query.shape[0], key.shape[1], -1, 1, query.shape[3]).float()
    scores = scaling * (grouped * key[:, :, None].float()).sum(-1)
    scores = scores if mask is None else torch.where(mask, scores, -torch.inf)
    seen = (scores.softmax(-1)[..., None] * value[:, :, None].float()).sum(-2)
    return seen.to(query.dtype).flatten(1, 2)[:, None]


AttentionInterface.register(_NAME, grouped_attention)
AttentionMaskInterface.register(_NAME, sdpa_mask)


def use_grouped_attention(backbone: nn.Module) -> None:
    """Use `grouped_attention` in a network with grouped keys and values."""
    config = backbone.config
    if config._attn_implementation == "sdpa" and config.num_key_value_heads != config.num_attention_heads:
        config._attn_implementation = _NAME


def runs_directly(layer: nn.Module, hidden: Tensor, mask: Tensor | None) -> bool:
    """Return whether `run_layer` can replace the layer's forward: a Llama's layer in inference without causal mask."""
    if type(layer) is not LlamaDecoderLayer or layer.self_attn.config._attn_implementation not in ("sdpa", _NAME):
        return False
    return not layer.training and (mask is not None or hidden.shape[1] == 1)


def run_layer(
    layer: LlamaDecoderLayer, hidden: Tensor, mask: Tensor | None, rotary: tuple[Tensor, Tensor], cache: PositionCache
) -> Tensor:
    """Return the layer's output [R, T, d] for hidden states [R, T, d]. `mask`: [R, 1, T, S] bool; None for one column
    that attends to all S slots. `rotary`: cosine and sine [R, 1, T, d'] of the positions."""
    attention, shape = layer.self_attn, (*hidden.shape[:-1], -1, layer.self_attn.head_dim)
    normed = _norm(layer.input_layernorm, hidden)
    query = _rotated(linear_output(attention.q_proj, normed).view(shape).transpose(1, 2), *rotary)
    key = _rotated(linear_output(attention.k_proj, normed).view(shape).transpose(1, 2), *rotary)
    value = linear_output(attention.v_proj, normed).view(shape).transpose(1, 2)
    key, value = cache.layers[attention.layer_idx].update(key, value)
    seen, _ = grouped_attention(attention, query, key, value, mask, attention.scaling)
    hidden = hidden + linear_output(attention.o_proj, seen.reshape(*hidden.shape[:-1], -1))
    mlp, normed = layer.mlp, _norm(layer.post_attention_layernorm, hidden)
    gated = mlp.act_fn(linear_output(mlp.gate_proj, normed)) * linear_output(mlp.up_proj, normed)
    return hidden + linear_output(mlp.down_proj, gated)


def rotary_of(rotary_embedding: nn.Module, hidden: Tensor, position_ids: Tensor) -> tuple[Tensor, Tensor]:
    """Return cosine and sine [R, 1, T, d'] of positions [R, T], as `run_layer` takes them."""
    cosine, sine = rotary_embedding(hidden, position_ids)
    return cosine[:, None], sine[:, None]


def _rotated(heads: Tensor, cosine: Tensor, sine: Tensor) -> Tensor:
    first, second = heads.chunk(2, -1)
    return heads * cosine + torch.cat((-second, first), dim=-1) * sine


def _norm(norm: nn.Module, hidden: Tensor) -> Tensor:
    # On other devices and dtypes torch uses other kernels for this, which round differently.
    if type(norm) is LlamaRMSNorm and hidden.device.type == "cpu" and hidden.dtype == torch.float32:
        return nn.functional.rms_norm(hidden, norm.weight.shape, norm.weight, norm.variance_epsilon)
    return norm(hidden)
