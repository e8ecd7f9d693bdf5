"""Tiny checkpoint of Emu3-Gen."""

from pathlib import Path

import torch
from torch import Tensor
from transformers import Emu3Config, Emu3ForConditionalGeneration

from checkpoints.parts import Tiny, byte_tokenizer, randomise, vocabulary
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


def write(folder: Path) -> Tiny:
    text = SIZES | {
        "vocab_size": FIRST + CODES, "num_key_value_heads": 2, "pad_token_id": 256,
        "bos_token_id": SPECIALS["<|extra_203|>"], "eos_token_id": SPECIALS["<|extra_204|>"],
    }  # fmt: skip
    vq = {"codebook_size": CODES, "base_channels": 32, "channel_multiplier": [1, 1, 1, 2], "hidden_size": 64}
    vq["num_res_blocks"] = 1
    vocabulary = {**SPECIALS, **VISUAL, "<image>": SPECIALS["<|image token|>"]}
    network = randomise(
        Emu3ForConditionalGeneration(Emu3Config(text_config=text, vq_config=vq, vocabulary_map=vocabulary))
    )
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
