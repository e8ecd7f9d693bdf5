"""Tiny checkpoint of GLM-Image's language model and processor, in the folders of its repository."""

import json
from pathlib import Path

import torch
from torch import Tensor
from transformers import GlmImageConfig, GlmImageForConditionalGeneration

from checkpoints.parts import Tiny, byte_tokenizer, in_two_shards, randomise, stored, vocabulary

CODES = vocabulary(official=16_384)
START, END = CODES, CODES + 1
HEAD = CODES + 128 if CODES == 16_384 else CODES + 4
FIRST_BYTE = HEAD + 8
SPECIALS = {"<|image|>": START, "<|endofimage|>": END, "<sop>": HEAD, "<eop>": HEAD + 1, "<|user|>": HEAD + 2}
TEMPLATE = (
    "{%- for message in messages -%}<|user|>\n{%- for part in message.content -%}{{ part.text }}"
    "{%- endfor -%}{%- endfor -%}"
)
GRIDS = torch.tensor([[1, 4, 4], [1, 2, 3]])


def write(folder: Path) -> Tiny:
    """Tiny grids: a preview of 2 x 3 before one of 4 x 4."""
    rotary = {"rope_type": "default", "rope_theta": 10_000.0, "partial_rotary_factor": 0.5, "mrope_section": [2, 1, 1]}
    text = {"vocab_size": FIRST_BYTE + 256, "vision_vocab_size": HEAD, "hidden_size": 64, "intermediate_size": 48}
    text |= {"num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2, "rope_parameters": rotary}
    config = GlmImageConfig(
        text_config=text | {"pad_token_id": 0, "eos_token_id": END},
        vision_config={"hidden_size": 32, "depth": 1, "num_heads": 2, "intermediate_size": 32},
        vq_config={"num_embeddings": CODES, "embed_dim": 8, "latent_channels": 32}, image_start_token_id=START,
        image_end_token_id=END, image_token_id=FIRST_BYTE - 1,
    )  # fmt: skip
    network = randomise(GlmImageForConditionalGeneration(config))
    if CODES == 16_384:
        network.lm_head.weight.data[CODES:] = 0  # of thousands of codes, the 50 likeliest have larger logits
    encoder, processor = folder / "vision_language_encoder", folder / "processor"
    network.save_pretrained(encoder)
    in_two_shards(encoder, stored(encoder))
    settings = {"do_sample": True, "temperature": 0.9, "top_p": 0.75, "eos_token_id": END}
    (encoder / "generation_config.json").write_text(json.dumps(settings))
    processor.mkdir()
    tokenizer = byte_tokenizer(processor / "tokenizer.json", SPECIALS, FIRST_BYTE)
    roles = {"grid_bos_token": "<sop>", "grid_eos_token": "<eop>", "bos_token": {"content": "<|image|>"}}
    (processor / "tokenizer_config.json").write_text(json.dumps(roles))
    (processor / "chat_template.jinja").write_text(TEMPLATE)

    @torch.no_grad()
    def logits(text: str, stream: list[int], conditional: bool) -> Tensor:
        start = tokenizer.encode(f"<|user|>{text}<sop>4 4<eop><sop>2 3<eop><|image|>").ids
        places, _ = network.model.get_rope_index(torch.tensor([start]), GRIDS, torch.tensor([2]))
        drawn = network.model._cached_decode_position_ids[0, :, None, : len(stream)]
        network.model.rope_deltas = None
        output = network(
            torch.tensor([start + stream]), position_ids=torch.cat([places, drawn], dim=-1), attention_mask=None
        )
        return output.logits[0, len(start) - 1 :]

    return Tiny(folder, logits, range(HEAD), None)
