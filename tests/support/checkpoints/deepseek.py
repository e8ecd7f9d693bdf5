"""Janus-Pro as deepseek-ai publishes it: one pickle, or two with an index, in bfloat16 under the authors' names."""

import json
import re
from pathlib import Path

import torch

from checkpoints import janus
from checkpoints.llamagen import official_vq_name
from checkpoints.parts import Tiny, in_two_shards

HEADS = {
    "model.language_model.": "language_model.model.", "lm_head.": "language_model.lm_head.",
    "model.generation_embeddings.": "gen_embed.", "model.generation_aligner.fc1.": "gen_aligner.layers.0.",
    "model.generation_aligner.hidden_layers.0.": "gen_aligner.layers.2.",
    "model.generation_head.proj_out.": "gen_head.output_mlp_projector.",
    "model.generation_head.vision_head.": "gen_head.vision_head.", "model.aligner.fc1.": "aligner.layers.0.",
    "model.aligner.hidden_layers.0.": "aligner.layers.2.",
}  # fmt: skip


def write(folder: Path, sharded: bool = False) -> Tiny:
    """`sharded`: as the 7B model is published; its configuration leaves out what a Llama has by default."""
    tiny, network = janus.write_network(folder, bfloat16=True)
    for path in folder.glob("*.safetensors"):
        path.unlink()
    tensors = {_name(name): tensor.bfloat16() for name, tensor in network.state_dict().items()}
    tensors = {name: tensor for name, tensor in tensors.items() if not name.startswith("vision_model.")}
    tensors["gen_vision_model.quantize.codebook_used"] = torch.zeros(65_536)
    for block in range(2):
        tower = f"vision_model.vision_tower.blocks.{block}."
        tensors |= {f"{tower}attn.qkv.weight": torch.zeros(96, 32), f"{tower}mlp.fc1.bias": torch.zeros(48)}
    config = json.loads((folder / "config.json").read_text())
    kept = "vocab_size hidden_size intermediate_size num_hidden_layers num_attention_heads num_key_value_heads"
    text = {name: config["text_config"][name] for name in kept.split()}
    width, codes = text["hidden_size"], config["vq_config"]["num_embeddings"]
    parts = {
        "aligner_config": {"depth": 2, "input_dim": 1024, "n_embed": width, "projector_type": "mlp_gelu"},
        "gen_aligner_config": {"depth": 2, "input_dim": 8, "n_embed": width, "projector_type": "mlp_gelu"},
        "gen_head_config": {"image_token_embed": width, "image_token_size": codes, "n_embed": width},
        "gen_vision_config": {"image_token_size": codes, "n_embed": 8},
    }
    published = {name: {"cls": "-", "model_type": name, "params": params} for name, params in parts.items()}
    published |= {
        "language_config": {"model_type": "llama", "torch_dtype": "bfloat16", "max_position_embeddings": 16_384} | text,
        "model_type": "multi_modality", "architectures": ["MultiModalityCausalLM"],
    }  # fmt: skip
    (folder / "config.json").write_text(json.dumps(published))
    in_two_shards(folder, tensors, pickled=True) if sharded else torch.save(tensors, folder / "pytorch_model.bin")
    return tiny


def _name(name: str) -> str:
    for ours, theirs in HEADS.items():
        if name.startswith(ours):
            return theirs + name.removeprefix(ours)
    if name.startswith("model.vqmodel."):
        return "gen_vision_model." + official_vq_name(name.removeprefix("model.vqmodel."))
    assert re.match(r"model\.vision_model\.", name), name
    return name.removeprefix("model.")
