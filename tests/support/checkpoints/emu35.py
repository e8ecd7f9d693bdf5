"""Tiny checkpoint of Emu3.5-Image, with its tokenizer and image decoder in separate folders."""

import json
from pathlib import Path

import torch
from transformers import Qwen3Config, Qwen3ForCausalLM

from checkpoints.baai import RANKS, TEXT_SPECIALS, slow_ids, write_words
from checkpoints.chameleon import meta_decode, published_taming
from checkpoints.parts import Tiny, in_bfloat16, in_two_shards, randomise, vocabulary, vq_network
from checkpoints.slow import SIZES, full_forward

CODES = vocabulary(official=131_072)
VISION = ("<|image token|>", "<|image start|>", "<|image end|>")
NAMES = (*TEXT_SPECIALS, *VISION, *(f"<|visual token {code:06d}|>" for code in range(CODES)))
SPECIALS = {name: len(RANKS) + index for index, name in enumerate(NAMES)}
FIRST = SPECIALS["<|visual token 000000|>"]


def write(folder: Path, head_dim: int = 12) -> Tiny:
    """Heads are wider than the hidden states have room for, as in the published model."""
    sizes = SIZES | {"vocab_size": len(RANKS) + len(SPECIALS), "num_key_value_heads": 2, "head_dim": head_dim}
    sizes |= {"rms_norm_eps": 1e-5}
    rotary = {"rope_type": "default", "rope_theta": 1_000_000.0}
    network = in_bfloat16(randomise(Qwen3ForCausalLM(Qwen3Config(**sizes, rope_parameters=rotary))))
    in_two_shards(folder, {name: tensor.bfloat16() for name, tensor in network.state_dict().items()})
    config = {"architectures": ["Emu3ForCausalLM"], "model_type": "Emu3", "rope_theta": 1000000.0, "rope_scaling": None}
    del sizes["rms_norm_eps"]
    (folder / "config.json").write_text(json.dumps(config | sizes))
    words, image = folder / "tokenizer_emu3_ibq", folder / "Emu3.5-VisionTokenizer"
    words.mkdir()
    write_words(words, NAMES)
    image.mkdir()
    decoder = published_taming(vq_network(CODES, 32))
    torch.save({"state_dict": decoder}, image / "model.ckpt")
    ids = [*range(FIRST, FIRST + CODES), SPECIALS["<|extra_200|>"], SPECIALS["<|image end|>"]]

    def prompt(text: str, conditional: bool) -> list[int]:
        asked = f" for t2i task. USER: {text}" if conditional else ". USER: "
        start = [SPECIALS["<|extra_203|>"], *slow_ids(f"You are a helpful assistant{asked} ASSISTANT: ")]
        size = [SPECIALS["<|image start|>"], *b"4*4", SPECIALS["<|image token|>"]]
        return [*start, SPECIALS["<|extra_100|>"], *size]

    logits = full_forward(network, prompt, ids)
    return Tiny(folder, logits, range(FIRST, FIRST + CODES), lambda codes: meta_decode(decoder, codes.view(1, 4, 4)))
