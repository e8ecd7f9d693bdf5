"""Tiny checkpoint of Emu3-Gen."""

from collections.abc import Mapping
from pathlib import Path

import torch
from torch import Tensor
from transformers import Emu3Config, Emu3ForConditionalGeneration

from checkpoints.parts import MOVQ_SIZES, Tiny, byte_tokenizer, randomise, vocabulary
from checkpoints.slow import SIZES, full_forward

CODES = vocabulary(official=32_768)
NAMES = ("<|endoftext|>", "<|extra_200|>", "<|extra_201|>", "<|extra_203|>", "<|extra_204|>", "<|image token|>")
SPECIALS = {name: 256 + index for index, name in enumerate((*NAMES, "<|image start|>", "<|image end|>"))}
FIRST = 256 + len(SPECIALS)
VISUAL = {f"<|visual token {code:06d}|>": FIRST + code for code in range(CODES)}
NEGATIVE = (
    "lowres, bad anatomy, bad hands, text, error, missing fingers, extra digit, fewer digits, cropped, worst quality, "
    "low quality, normal quality, jpeg artifacts, signature, watermark, username, blurry."
)


def text_sizes(words: int, specials: Mapping[str, int]) -> dict[str, object]:
    """Of the language model's configuration."""
    roles = {"pad": "<|endoftext|>", "bos": "<|extra_203|>", "eos": "<|extra_204|>"}
    ids = {f"{role}_token_id": specials[name] for role, name in roles.items()}
    return SIZES | {"vocab_size": words, "num_key_value_heads": 2} | ids


def network_of(text: dict[str, object], words: Mapping[str, int]) -> Emu3ForConditionalGeneration:
    config = Emu3Config(text_config=text, vq_config={"codebook_size": CODES} | MOVQ_SIZES, vocabulary_map=words)
    return randomise(Emu3ForConditionalGeneration(config))


def write(folder: Path) -> Tiny:
    words = SPECIALS | VISUAL | {"<image>": SPECIALS["<|image token|>"]}
    network = network_of(text_sizes(FIRST + CODES, SPECIALS), words)
    network.save_pretrained(folder)
    tokenizer = byte_tokenizer(folder / "tokenizer.json", SPECIALS | VISUAL, 0)
    ids = [*VISUAL.values(), SPECIALS["<|extra_200|>"]]

    def prompt(text: str, conditional: bool) -> list[int]:
        asked = f"{text} masterpiece, film grained, best quality." if conditional else NEGATIVE
        return tokenizer.encode(f"<|extra_203|>{asked}<|image start|>4*4<|image token|>").ids

    def pixels(codes: Tensor) -> Tensor:
        rows = torch.cat([codes.view(1, 4, 4) + FIRST, torch.full((1, 4, 1), SPECIALS["<|extra_200|>"])], dim=-1)
        stream = torch.cat([rows.flatten(1), torch.zeros(1, 3, dtype=torch.long)], dim=1)
        return network.decode_image_tokens(image_tokens=stream, height=4, width=4)

    return Tiny(folder, full_forward(network, prompt, ids), range(FIRST, FIRST + CODES), pixels)
