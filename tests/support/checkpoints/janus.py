"""Tiny checkpoint of Janus-Pro."""

import json
from pathlib import Path

import torch
from torch import Tensor
from transformers import GenerationConfig, JanusConfig, JanusForConditionalGeneration

from checkpoints.parts import VQ_SIZES, Tiny, byte_tokenizer, in_bfloat16, randomise, vocabulary

CODES = vocabulary(official=16_384)
START, END, PAD = "<｜begin▁of▁sentence｜>", "<｜end▁of▁sentence｜>", "<｜▁pad▁｜>"
NAMES = (START, END, PAD, "<|User|>", "<|Assistant|>", "<begin_of_image>", "<end_of_image>", "<image_placeholder>")
SPECIALS = {name: 256 + index for index, name in enumerate(NAMES)}


def write(folder: Path) -> Tiny:
    return write_network(folder)[0]


def write_network(folder: Path, bfloat16: bool = False) -> tuple[Tiny, JanusForConditionalGeneration]:
    network = network_of(JanusConfig)
    if bfloat16:
        in_bfloat16(network)
    network.save_pretrained(folder)
    byte_tokenizer(folder / "tokenizer.json", SPECIALS, 0)
    names = {"bos_token": START, "eos_token": END, "pad_token": PAD}
    (folder / "tokenizer_config.json").write_text(json.dumps(names))

    @torch.no_grad()
    def logits(text: str, stream: list[int], conditional: bool) -> Tensor:
        prompt = torch.tensor([prompt_ids(text)])
        if not conditional:
            kept = (prompt == SPECIALS[START]) | (prompt == SPECIALS["<begin_of_image>"])
            prompt = torch.where(kept, prompt, SPECIALS[PAD])
        embeds = network.get_input_embeddings()(prompt)
        if stream:
            image = network.prepare_embeddings_for_image_generation(torch.tensor([stream]))
            embeds = torch.cat([embeds, image], dim=1)
        hidden = network.model.language_model(inputs_embeds=embeds).last_hidden_state[0, prompt.shape[1] - 1 :]
        return network.model.generation_head(hidden)

    return Tiny(folder, logits, range(CODES), lambda codes: network.model.vqmodel.decode(codes)), network


def prompt_ids(text: str) -> list[int]:
    tokenizer = byte_tokenizer(None, SPECIALS, 0)
    return tokenizer.encode(f"{START}<|User|>: {text}\n\n<|Assistant|>:<begin_of_image>").ids


def network_of(kind: type) -> JanusForConditionalGeneration:
    """The same random network every time."""
    width = {"projection_dim": 32}
    config = kind(
        text_config={
            "model_type": "llama", "vocab_size": 256 + len(SPECIALS), "hidden_size": 32, "intermediate_size": 48,
            "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 4, "pad_token_id": SPECIALS[PAD],
        },
        vision_config={
            "hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2, "image_size": 64, "patch_size": 16,
            "num_image_tokens": 16, **width,
        },
        vq_config={"num_embeddings": CODES, "embed_dim": 8, "image_token_embed_dim": 32, **width, **VQ_SIZES},
        tie_word_embeddings=False,
    )  # fmt: skip
    network = randomise(JanusForConditionalGeneration(config))
    network.generation_config = GenerationConfig(
        bos_token_id=SPECIALS[START], eos_token_id=SPECIALS[END], pad_token_id=SPECIALS[PAD], guidance_scale=5
    )
    network.generation_config.generation_kwargs = {"boi_token_id": SPECIALS["<begin_of_image>"]}
    return network
