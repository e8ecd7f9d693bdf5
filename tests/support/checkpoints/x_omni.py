"""Tiny checkpoint of X-Omni's language model under the names of the authors' code, whose computation is written out."""

import json
from pathlib import Path

import torch
from torch import Tensor
from transformers import Qwen2Config, Qwen2ForCausalLM

from checkpoints.parts import Tiny, byte_tokenizer, in_two_shards, randomise, stored, vocabulary

CODES = vocabulary(official=16_384)
WORDS, SPARE, WIDTH = 270, 8, 32
SPECIALS = {"<SOM>": WORDS + CODES, "<EOM>": WORDS + CODES + 1, "<IMAGE>": WORDS + CODES + 2}
NAMES = {f"<MM-Token-{code}>": WORDS + code for code in range(CODES)}
VISION = {
    "dtype": "float32",
    "encoder": {"siglip_path": "siglip.pt", "projector_path": "siglip_vq.pt", "z_channels": 32, "codebook_dim": 16},
    "decoder": {"model_path": "decoder", "upscale_factor": 16, "num_inference_steps": 2, "cfg_scale": 1.5},
}
LAYERS, FIRST, LAST = 5, 2, 1
"""All layers, and those at either end that change codes alone."""


def write(folder: Path) -> Tiny:
    sizes = {"hidden_size": WIDTH, "intermediate_size": 48, "num_hidden_layers": LAYERS, "num_attention_heads": 4}
    sizes |= {"num_key_value_heads": 2, "rope_parameters": {"rope_type": "default", "rope_theta": 1_000_000.0}}
    network = randomise(Qwen2ForCausalLM(Qwen2Config(vocab_size=WORDS, tie_word_embeddings=False, **sizes)))
    network.save_pretrained(folder)
    (folder / "generation_config.json").unlink(missing_ok=True)
    own = {"model.embed_tokens.weight": "model.lm_embed_tokens.weight", "model.norm.weight": "model.lm_norm.weight"}
    tensors = {own.get(name, name): tensor for name, tensor in stored(folder).items()}
    draw = torch.Generator().manual_seed(8)
    for name, rows in (("model.mm_embed_tokens.weight", CODES + SPARE), ("mm_head.weight", CODES + SPARE)):
        tensors[name] = torch.randn(rows, WIDTH, generator=draw) / (1 if "embed" in name else 4)
    tensors["model.mm_norm.weight"] = 1 + 0.2 * torch.randn(WIDTH, generator=draw)
    in_two_shards(folder, tensors)
    torch.save(_projector(), folder / "siglip_vq.pt")
    described = json.loads((folder / "config.json").read_text())
    described |= {"model_type": "x-omni", "architectures": ["XOmniForCausalLM"]}
    described |= {"auto_map": {"AutoModelForCausalLM": "modeling_xomni.XOmniForCausalLM"}}
    described |= {"num_mm_adap_layers": FIRST, "num_mm_head_layers": LAST, "mm_special_tokens": list(SPECIALS)}
    described |= {"mm_vocab_size": CODES + SPARE, "image_vocab_size": CODES, "vision_config": VISION}
    (folder / "config.json").write_text(json.dumps(described))
    tokenizer = byte_tokenizer(folder / "tokenizer.json", SPECIALS | NAMES, 0)

    @torch.no_grad()
    def logits(text: str, stream: list[int], conditional: bool) -> Tensor:
        start = tokenizer.encode((text if conditional else "") + "<SOM>4 4<IMAGE>").ids
        ids = torch.tensor(start + [WORDS + code for code in stream])
        return _official(network, tensors, ids)[len(start) - 1 :]

    return Tiny(folder, logits, range(CODES), None)


def _projector() -> dict[str, Tensor]:
    """The authors' `VQConvProjector`; its first convolution only encodes."""
    shapes = {"quant_conv": (16, 32, 1, 1), "post_quant_conv": (32, 16, 1, 1)}
    shapes |= {f"post_conv.{block}.conv{half}": (32, 32, 3, 3) for block in (0, 1) for half in (1, 2)}
    shapes |= {f"post_conv.{block}.norm{half}": (32,) for block in (0, 1) for half in (1, 2)}
    draw = torch.Generator().manual_seed(9)
    tensors = {f"{name}.weight": torch.randn(shape, generator=draw) / 4 for name, shape in shapes.items()}
    tensors |= {f"{name}.bias": torch.randn(shape[0], generator=draw) for name, shape in shapes.items()}
    return tensors | {"quantize.embedding.weight": torch.randn(CODES, 16, generator=draw)}


def _official(network: Qwen2ForCausalLM, tensors: dict[str, Tensor], ids: Tensor) -> Tensor:
    """Logits [T, CODES + SPARE] of ids [T]: at each end of the layers words keep their hidden states."""
    of_code = (ids >= WORDS)[:, None]
    table = torch.cat([tensors["model.lm_embed_tokens.weight"], tensors["model.mm_embed_tokens.weight"]])
    hidden, places = table[ids][None], torch.arange(len(ids))[None]
    rotary = network.model.rotary_emb(hidden, places)
    mask = torch.full((len(ids), len(ids)), -torch.inf).triu(1)[None, None]
    for number, layer in enumerate(network.model.layers):
        changed = layer(hidden, attention_mask=mask, position_embeddings=rotary)
        hidden = changed if FIRST <= number < LAYERS - LAST else torch.where(of_code, changed, hidden)
    scale = hidden * torch.rsqrt(hidden.pow(2).mean(-1, keepdim=True) + network.config.rms_norm_eps)
    norms = torch.where(of_code, tensors["model.mm_norm.weight"], tensors["model.lm_norm.weight"])
    return (scale * norms @ tensors["mm_head.weight"].T)[0]
