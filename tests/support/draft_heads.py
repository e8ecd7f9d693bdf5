"""Draft heads in the layout in which LANTERN's authors publish them: random tensors under the published names."""

import json

import torch
from checkpoints.parts import random_tensors
from safetensors.torch import save_file

from specbench.decoding.drafters.eagle import Eagle

INNER = 40


def noted_proposals(monkeypatch) -> list:
    """From now on, the slots committed before each proposal of EAGLE, and the proposal."""
    seen, honest = [], Eagle.propose

    def watch(self, committed, width, step):
        seen.append((committed.clone(), honest(self, committed, width, step)))
        return seen[-1][1]

    monkeypatch.setattr(Eagle, "propose", watch)
    return seen


def layer_shapes(start, width, inner):
    """Shapes of a layer's tensors, but for the norm of its input."""
    shapes = {f"self_attn.{part}_proj.weight": (width, width) for part in "qkvo"}
    shapes |= {f"mlp.{part}_proj.weight": (inner, width) for part in ("gate", "up")}
    shapes |= {"mlp.down_proj.weight": (width, inner), "post_attention_layernorm.weight": (width,)}
    return {start + name: shape for name, shape in shapes.items()}


def write_janus_head(folder, tensors, layer):
    """A whole Janus-Pro with a single layer, as the authors' strict loading implies: `tensors` of deepseek-ai's layout,
    whose layers are replaced by random ones as wide as `layer` of its configuration."""
    width, inner = layer["hidden_size"], layer["intermediate_size"]
    kept = {name: tensor.float() for name, tensor in tensors.items() if ".layers." not in name or "gen_" in name}
    start = "language_model.model.layers.0."
    shapes = layer_shapes(start, width, inner) | {f"{start}input_layernorm.weight": (width,)}
    kept |= random_tensors(shapes | {"fusion.weight": (width, 2 * width), "fusion.bias": (width,)}, 9)
    folder.mkdir()
    save_file({name: tensor.contiguous() for name, tensor in kept.items()}, folder / "model.safetensors")
    config = {"model_type": "multi_modality", "language_config": layer | {"num_hidden_layers": 1}}
    (folder / "config.json").write_text(json.dumps(config))
    return kept


def write_head(folder, name, words, width):
    """Random tensors under the published names; LlamaGen's as a pickle with its `input_type`."""
    grid = name.startswith("llamagen")
    heads = width // (64 if grid else 8)
    shapes = {"embed_tokens.weight": (words, width), "fc.weight": (width, 2 * width), "fc.bias": (width,)}
    shapes |= layer_shapes("layers.0.", width, INNER)
    if not grid:
        shapes["layers.0.input_layernorm.weight"] = (width,)
        rows = 1 if name == "lumina" else heads
        norms = (f"{which}_norm.{part}" for which in "qk" for part in ("weight", "bias"))
        shapes |= {f"layers.0.self_attn.{norm}": (rows, 8) for norm in norms}
    tensors = random_tensors(shapes, 9)
    config = {"hidden_size": width, "intermediate_size": INNER, "num_attention_heads": heads, "vocab_size": words}
    config |= {"num_key_value_heads": heads, "num_hidden_layers": 1, "rms_norm_eps": 1e-6 if grid else 1e-5}
    config |= {"model_type": "llama" if grid else "chameleon"}
    config |= {"input_type": "t2i2" if name == "llamagen-512" else "t2i"} if grid else {}
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config))
    torch.save(tensors, folder / "pytorch_model.bin") if grid else save_file(tensors, folder / "model.safetensors")
    return tensors
