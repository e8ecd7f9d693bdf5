"""Tiny checkpoint of SimpleAR with the Cosmos decoder."""

import warnings
from pathlib import Path

import torch
from cosmos_program import program
from torch import nn
from transformers import Qwen2Config, Qwen2ForCausalLM

from checkpoints.parts import Tiny, byte_tokenizer, in_two_shards, randomise, stored
from checkpoints.slow import full_forward

WORDS, CODES = 270, 64_000
SPECIALS = {"<|endoftext|>": 256, "<|t2i|>": 257, "<|soi|>": 258, "<|eoi|>": 259, "<|vtokens|>": 260}
FILLERS = {f"word{number}": 261 + number for number in range(WORDS - 261)}
NEGATIVE = (
    "<|t2i|>An image of aerial view, overexposed, low quality, deformation, a poor composition, bad hands, bad teeth, "
    "bad eyes, bad limbs, distortion<|soi|>"
)


def write_sharded(folder: Path) -> Tiny:
    """The larger size, in two shards."""
    tiny = write(folder)
    in_two_shards(folder, stored(folder))
    return tiny


def write_decoder(path: Path) -> nn.Module:
    """A decoder with random weights, and its program in the archive format that NVIDIA publishes."""
    cosmos = randomise(program(), seed=3)
    for parameter in cosmos.decoder.conv_out[1].parameters():
        parameter.data *= 0.05  # colours within [-1, 1]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        torch.jit.save(torch.jit.trace(cosmos, torch.zeros(1, 1, 4, 4, dtype=torch.int32)), path)
    return cosmos


def write(folder: Path) -> Tiny:
    config = Qwen2Config(
        vocab_size=WORDS + CODES, hidden_size=16, intermediate_size=24, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, tie_word_embeddings=True,
        rope_parameters={"rope_type": "default", "rope_theta": 1_000_000.0},
    )  # fmt: skip
    network = randomise(Qwen2ForCausalLM(config))
    network.save_pretrained(folder)
    tokenizer = byte_tokenizer(folder / "tokenizer.json", SPECIALS, 0, FILLERS)
    cosmos = write_decoder(folder / "decoder.jit")

    def prompt(text: str, conditional: bool) -> list[int]:
        return tokenizer.encode(f"<|t2i|>A highly realistic image of {text}<|soi|>" if conditional else NEGATIVE).ids

    ids = range(WORDS, WORDS + CODES)
    logits = full_forward(network, prompt, ids)
    return Tiny(folder, logits, ids, lambda codes: cosmos(codes.view(1, 1, 4, 4)).squeeze(2))
