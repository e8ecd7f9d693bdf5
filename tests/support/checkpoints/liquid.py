"""Tiny checkpoint of Liquid with Chameleon's image decoder."""

import json
from pathlib import Path

import torch
from transformers import GemmaConfig, GemmaForCausalLM

from checkpoints.chameleon import CODES, meta_decode, meta_vq
from checkpoints.parts import Tiny, byte_tokenizer, in_two_shards, randomise, stored
from checkpoints.slow import SIZES, full_forward

SPECIALS = {"<pad>": 256, "<eos>": 257, "<bos>": 258, "<boi>": 259, "<eoi>": 260, "<unconditional>": 261}
WORDS = 262


def write(folder: Path) -> Tiny:
    """Heads are wider than the hidden states have room for, and the activation has its legacy name, as in Gemma-7B."""
    config = GemmaConfig(vocab_size=WORDS + CODES, num_key_value_heads=4, head_dim=12, hidden_act="gelu", **SIZES)
    network = randomise(GemmaForCausalLM(config))
    network.save_pretrained(folder)
    stored_config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(stored_config | {"hidden_act": "gelu"}))
    in_two_shards(folder, stored(folder))
    tokenizer = byte_tokenizer(folder / "tokenizer.json", SPECIALS, 0)
    decoder = meta_vq()
    (folder / "chameleon").mkdir()
    torch.save({"state_dict": decoder}, folder / "chameleon" / "vqgan.ckpt")

    def prompt(text: str, conditional: bool) -> list[int]:
        asked = f"{text} Generate an image based on this description." if conditional else "<unconditional>"
        return tokenizer.encode(f"<bos>{asked}<boi>").ids

    ids = range(WORDS, WORDS + CODES)
    logits = full_forward(network, prompt, ids)
    return Tiny(folder, logits, ids, lambda codes: meta_decode(decoder, codes.view(1, 4, 4)))
