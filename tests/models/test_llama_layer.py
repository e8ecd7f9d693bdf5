"""A Llama's layers run directly, against transformers' own forward of them."""

import pytest
import torch
from transformers import LlamaConfig, LlamaModel

from specbench.models.transformer.forward import last_hidden_state
from specbench.models.transformer.kv_cache import PositionCache
from specbench.models.transformer.llama_layer import runs_directly, use_grouped_attention

SLOTS, START = 24, 9


def network(kv_heads: int, dtype: torch.dtype, bias: bool) -> LlamaModel:
    sizes = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "vocab_size": 8}
    heads = {"num_attention_heads": 4, "num_key_value_heads": kv_heads, "attention_bias": bias, "mlp_bias": bias}
    torch.manual_seed(0)
    model = LlamaModel(LlamaConfig(**sizes, **heads, attn_implementation="sdpa")).to(dtype).eval()
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, std=0.3)
    use_grouped_attention(model)
    return model


@pytest.mark.parametrize(("rows", "columns"), [(1, 1), (6, 1), (2, 5)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("kv_heads", "bias"), [(4, False), (2, True)])
@torch.inference_mode()
def test_the_layers_give_the_bits_of_transformers(kv_heads, bias, dtype, rows, columns):
    model = network(kv_heads, dtype, bias)
    embeds = torch.randn(rows, columns, 32).to(dtype)
    positions = torch.arange(START, START + columns).expand(rows, -1)
    mask = (torch.arange(SLOTS) <= positions[..., None])[:, None]
    buffers = [tuple(torch.randn(rows, kv_heads, SLOTS, 8).to(dtype) for _ in range(2)) for _ in range(2)]
    caches = [PositionCache(2, SLOTS, [(k.clone(), v.clone()) for k, v in buffers]) for _ in range(2)]
    for cache in caches:
        cache.place(positions, SLOTS)
    assert runs_directly(model.layers[0], embeds, mask)
    hidden = last_hidden_state(model, embeds, positions, mask, caches[0])
    inputs = {"inputs_embeds": embeds, "position_ids": positions, "attention_mask": mask}
    expected = model(**inputs, past_key_values=caches[1], use_cache=True).last_hidden_state
    assert torch.equal(hidden, expected)
    for buffer, other in zip(caches[0].buffers(), caches[1].buffers(), strict=True):
        assert torch.equal(buffer[0], other[0]) and torch.equal(buffer[1], other[1])


def test_other_attention_and_training_take_the_librarys_way():
    model, embeds, mask = network(4, torch.float32, False), torch.zeros(1, 3, 32), torch.ones(1, 1, 3, SLOTS).bool()
    assert not runs_directly(model.layers[0], embeds, None)
    assert not runs_directly(model.train().layers[0], embeds, mask)
    model.eval().config._attn_implementation = "eager"
    assert not runs_directly(model.layers[0], embeds, mask)
