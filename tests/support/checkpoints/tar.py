"""Tiny checkpoints of Tar's language model and of its de-tokenizer, whose official computation is written out."""

import os
import re
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.nn.functional import normalize
from transformers import Qwen2Config, Qwen2ForCausalLM, Siglip2VisionConfig, Siglip2VisionModel

from checkpoints import llamagen
from checkpoints.parts import Tiny, byte_tokenizer, in_two_shards, randomise, stored, vocabulary
from checkpoints.slow import full_forward

CODES, IMAGE_TOKENS = vocabulary(official=65_536), llamagen.CODES
ROLES = {"<|im_start|>": 256, "<|im_end|>": 257, "<im_start>": 258, "<im_end>": 259, "<S0>": 260, "<S1>": 261}
FIRST = 262
SPECIALS = ROLES | {f"<I{code}>": FIRST + code for code in range(CODES)}
FEATURES, TABLE = 24, 12


def write(folder: Path, side: int = 64, tied: bool = True, heads: int = 4) -> Tiny:
    """The language model, with the de-tokenizer of `side` x `side` tokens in the folder of its repository."""
    sizes = {"hidden_size": 64, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": heads}
    rotary = {"rope_parameters": {"rope_type": "default", "rope_theta": 1_000_000.0}}
    words = FIRST + CODES
    sizes |= {"num_key_value_heads": (heads + 1) // 2}
    config = Qwen2Config(vocab_size=words, tie_word_embeddings=tied, **rotary, **sizes)
    config.num_scale_tokens = 3
    network = randomise(Qwen2ForCausalLM(config))
    network.save_pretrained(folder)
    (folder / "generation_config.json").unlink()
    if not tied:
        in_two_shards(folder, stored(folder) | {"model.vision_tower.vision_tower.unused": torch.zeros(2)})
    tokenizer = byte_tokenizer(folder / "tokenizer.json", SPECIALS, 0)
    (folder / "TA-Tok").mkdir()
    write_detokenizer(folder / "TA-Tok", side)
    (folder / "TA-Tok" / "vq_ds16_t2i.pt").rename(folder / "vq_ds16_t2i.pt")

    def prompt(text: str, conditional: bool) -> list[int]:
        system, user = "system\nYou are a helpful assistant.", f"user\n{text}"
        turns = "".join(f"<|im_start|>{said}<|im_end|>\n" for said in (system, user))
        return tokenizer.encode(f"{turns}<|im_start|>assistant\n<im_start><S0>").ids

    return Tiny(folder, full_forward(network, prompt, range(FIRST, words)), range(FIRST, words), None)


def write_detokenizer(folder: Path, side: int) -> Tiny:
    count, tokens = (27 * 27, side**2) if os.environ.get("OFFICIAL_VOCABULARIES") else (16, 16)
    added = {"abs_pe": (1, count + tokens - 1), "clip_proj.bias": ()}
    draw = torch.Generator().manual_seed(6)
    tensors = {name: torch.randn(*shape, llamagen.WIDTH, generator=draw) / 9 for name, shape in added.items()}
    tensors["clip_proj.weight"] = torch.randn(llamagen.WIDTH, FEATURES, generator=draw) / 3
    tensors |= llamagen.language_tensors()
    arguments = {"vocab_size": IMAGE_TOKENS, "cond_dim": FEATURES, "cls_token_num": count, "max_seq_len": tokens}
    arguments |= {"model_type": "clip_cond", "norm_eps": 1e-5}
    content = {"name": "llama-abs-LP", "args": arguments, "sd": tensors}
    torch.save({"model": content}, folder / f"ar_dtok_lp_{16 * side}px.pth")
    features = _write_ta_tok(folder / "ta_tok.pth")
    image = llamagen.write_vq(folder / "vq_ds16_t2i.pt")

    @torch.no_grad()
    def logits(text: str, stream: list[int], conditional: bool) -> Tensor:
        codes = [int(code) for code in re.findall(r"<I(\d+)>", text)][:count]
        seen = features(torch.tensor([codes + [0] * (count - len(codes))]))[0] * conditional
        x = seen @ tensors["clip_proj.weight"].T + tensors["clip_proj.bias"]
        x = torch.cat([x, llamagen.embedded(tensors, stream)])
        x = llamagen.official_layers(tensors, x + tensors["abs_pe"][0, : len(x)], 0, None)
        return x[count - 1 :] @ tensors["output.weight"].T

    return Tiny(folder, logits, range(IMAGE_TOKENS), lambda codes: image.decode(codes))


class _TaTok(nn.Module):
    """TA-Tok under its authors' names, with a little of what only encodes."""

    def __init__(self) -> None:
        super().__init__()
        vision = {"hidden_size": FEATURES, "intermediate_size": 32, "num_hidden_layers": 2, "num_channels": TABLE + 1}
        self.encoder = nn.Linear(2, 2)
        self.encode_task_layer = nn.Sequential(nn.Linear(FEATURES, FEATURES), nn.Tanh())
        self.bottleneck = nn.Module()
        self.bottleneck.in_linear = nn.Linear(FEATURES, TABLE)
        self.bottleneck.out_linear = nn.Linear(TABLE, TABLE + 1)
        self.bottleneck.regularizer = nn.Module()
        self.bottleneck.regularizer.embedding = nn.Embedding(CODES, TABLE)
        self.bottleneck.regularizer.embedding_proj = nn.Linear(TABLE, TABLE)
        self.decoder = Siglip2VisionModel(Siglip2VisionConfig(**vision, patch_size=1, num_patches=4))
        self.decode_task_layer = nn.Sequential(nn.Linear(FEATURES, FEATURES), nn.Tanh(), nn.Linear(FEATURES, FEATURES))

    def forward(self, codes: Tensor) -> Tensor:
        codebook = self.bottleneck.regularizer.embedding_proj(self.bottleneck.regularizer.embedding.weight)
        latents = self.bottleneck.out_linear(normalize(codebook, dim=-1)[codes])
        side = round(codes.shape[1] ** 0.5)
        seen = self.decoder(latents, torch.ones_like(codes), torch.tensor([[side, side]])).last_hidden_state
        return self.decode_task_layer(seen)


def _write_ta_tok(path: Path) -> _TaTok:
    network = randomise(_TaTok(), seed=5)
    named = {
        re.sub(r"^decoder\.(vision_model\.)?", "decoder.vision_model.", name): tensor
        for name, tensor in network.state_dict().items()
    }
    named |= {"scale_layer.shift": torch.zeros(1, 3, 1, 1), "scale_layer.scale": torch.ones(1, 3, 1, 1)}
    quantiser = {"name": "simvq", "args": {"codebook_size": CODES, "l2_normalized": True}}
    bottleneck = {"name": "bottleneck", "args": {"bottleneck_dim": TABLE, "regularizer": quantiser}}
    torch.save({"model": {"name": "ta_tok", "args": {"bottleneck": bottleneck}, "sd": named}}, path)
    return network
