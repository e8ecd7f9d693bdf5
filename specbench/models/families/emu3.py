"""Emu3-Gen 8B (720 px): transformers' `Emu3ForCausalLM` and `Emu3VQVAE`; every row, the last one too, is closed by an
end-of-line token.
"""

from __future__ import annotations

import torch
from tokenizers import Tokenizer
from torch import nn
from transformers import Emu3Config, Emu3ForCausalLM, Emu3TextConfig, Emu3VQVAE
from transformers.models.emu3.configuration_emu3 import Emu3VQVAEConfig

from specbench.models.checkpoint_files import CheckpointFiles
from specbench.models.checkpoint_loading import (
    build,
    drop,
    fill,
    randomise,
    read_config,
    read_tensors,
    read_tokenizer,
    token_id,
)
from specbench.models.families import vq_decoder
from specbench.models.families.base import FamilyModel, LoadRequest, stand_in_tokenizer

START, LINE_END = "<|extra_203|>", "<|extra_200|>"
BEGIN_IMAGE, IMAGE_TOKENS = "<|image start|>", "<|image token|>"
POSITIVE = " masterpiece, film grained, best quality."
NEGATIVE = (
    "lowres, bad anatomy, bad hands, text, error, missing fingers, extra digit, fewer digits, cropped, worst quality, "
    "low quality, normal quality, jpeg artifacts, signature, watermark, username, blurry."
)

_FIRST_CODE = 151_854
_SPECIALS = {LINE_END: 151_846, START: 151_849, IMAGE_TOKENS: 151_851, BEGIN_IMAGE: 151_852}
_TINY = {"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 4}
_TINY_VQ = {"base_channels": 32, "channel_multiplier": [1, 1, 1, 1], "hidden_size": 32}


class Emu3(FamilyModel):
    """The unconditional prompt is the official negative one, with the same beginning of the image."""

    def prompt_ids(self, text: str) -> tuple[list[int], list[int]]:
        image = f"{BEGIN_IMAGE}{self.layout.height}*{self.layout.width}{IMAGE_TOKENS}"
        return self.words(START + text + POSITIVE + image), self.words(START + NEGATIVE + image)


def load(request: LoadRequest) -> Emu3:
    if not request.found:
        return _random(request)
    files = request.found[0]
    config, tensors = read_config(files, Emu3Config), read_tensors(files)
    language = build(Emu3ForCausalLM, config.text_config, found=files)
    image = _image_network(config.vq_config, files)
    codes = config.vq_config.codebook_size
    parts = {"text_model.": {}, "vqmodel.": {}}
    for name, tensor in tensors.items():
        prefix = next((prefix for prefix in parts if name.startswith(prefix)), None)
        if prefix is None:
            raise files.refusal(f" holds unknown '{name}'")
        parts[prefix][name.removeprefix(prefix)] = tensor
    fill(language, parts["text_model."], files, request.device, request.dtype)
    fill(image, drop(parts["vqmodel."], vq_decoder.ENCODER_SIDE), files, request.device, torch.float32)
    tokenizer = read_tokenizer(files)
    first, last = (token_id(tokenizer, f"<|visual token {code:06d}|>") for code in (0, codes - 1))
    if last != first + codes - 1:
        raise files.refusal(": visual tokens are not in the order of their codes", files.named("tokenizer.json"))
    return _model(request, tokenizer, language, range(first, last + 1), image)


def _random(request: LoadRequest) -> Emu3:
    tiny_text = _TINY | {"num_key_value_heads": 2}
    language = build(Emu3ForCausalLM, Emu3TextConfig(**request.sized({}, tiny_text)))
    image = _image_network(Emu3VQVAEConfig(**request.sized({}, _TINY_VQ)))
    randomise(language, request.device, request.dtype)
    randomise(image, request.device, torch.float32)
    ids = range(_FIRST_CODE, _FIRST_CODE + request.info.v_image)
    return _model(request, stand_in_tokenizer(_SPECIALS, first_byte=0), language, ids, image)


def _image_network(config: Emu3VQVAEConfig, found: CheckpointFiles | None = None) -> nn.Module:
    network = build(Emu3VQVAE, config, found=found)
    del network.encoder, network.quant_conv
    return network


def _model(request: LoadRequest, tokenizer: Tokenizer, language: nn.Module, ids: range, image: nn.Module) -> Emu3:
    head = language.lm_head.weight[ids.start : ids.stop].clone()
    stream_ids = [*ids, token_id(tokenizer, LINE_END)]
    return Emu3(request, tokenizer, language.model, head, stream_ids, vq_decoder.Emu3Decoder(image))
