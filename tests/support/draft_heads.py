"""Draft heads in the layout in which LANTERN's authors publish them: random tensors under the published names."""

import json

import torch
from safetensors.torch import save_file

INNER = 40


def write_head(folder, name, words, width):
    """Random tensors under the published names; LlamaGen's as a pickle with its `input_type`."""
    grid = name.startswith("llamagen")
    heads = width // (64 if grid else 8)
    shapes = {
        "embed_tokens.weight": (words, width),
        "fc.weight": (width, 2 * width),
        "fc.bias": (width,),
        **{f"layers.0.self_attn.{part}_proj.weight": (width, width) for part in "qkvo"},
        **{f"layers.0.mlp.{part}_proj.weight": (INNER, width) for part in ("gate", "up")},
        "layers.0.mlp.down_proj.weight": (width, INNER),
        "layers.0.post_attention_layernorm.weight": (width,),
    }
    if not grid:
        shapes["layers.0.input_layernorm.weight"] = (width,)
        rows = 1 if name == "lumina" else heads
        norms = (f"{which}_norm.{part}" for which in "qk" for part in ("weight", "bias"))
        shapes |= {f"layers.0.self_attn.{norm}": (rows, 8) for norm in norms}
    draw = torch.Generator().manual_seed(9)
    tensors = {}
    for key, shape in shapes.items():
        noise = torch.randn(shape, generator=draw)
        vector = len(shape) == 1 or "norm" in key
        tensors[key] = 0.2 * noise + (not key.endswith("bias")) if vector else 1.5 * noise * shape[1] ** -0.5
    config = {"hidden_size": width, "intermediate_size": INNER, "num_attention_heads": heads, "vocab_size": words}
    config |= {"num_key_value_heads": heads, "num_hidden_layers": 1, "rms_norm_eps": 1e-6 if grid else 1e-5}
    config |= (
        {"input_type": "t2i2" if name == "llamagen-512" else "t2i", "model_type": "llama"}
        if grid
        else {"model_type": "chameleon"}
    )
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config))
    torch.save(tensors, folder / "pytorch_model.bin") if grid else save_file(tensors, folder / "model.safetensors")
    return tensors
