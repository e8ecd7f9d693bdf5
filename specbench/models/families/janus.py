"""Janus-Pro 1B (384 px): transformers' `JanusModel`, with image tokens embedded and predicted by their own layers.

The vision tower, the text head and the encoding half of the image tokenizer serve image understanding only and are not
loaded.
"""

from __future__ import annotations

import torch
from tokenizers import Tokenizer
from torch import Tensor, nn
from transformers import JanusConfig
from transformers.models.janus.modeling_janus import JanusModel

from specbench.models.checkpoint_files import CheckpointFiles, read_json
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

BEGIN_IMAGE = "<begin_of_image>"
UNUSED = ("lm_head.", "vision_model.", "aligner.", "vqmodel.encoder.", "vqmodel.quant_conv.")

_SPECIALS = {"<｜begin▁of▁sentence｜>": 100_000, "<｜▁pad▁｜>": 100_002, BEGIN_IMAGE: 100_016}
_TEXT = {
    "model_type": "llama",
    "vocab_size": 102_400,
    "hidden_size": 2048,
    "intermediate_size": 5632,
    "num_hidden_layers": 24,
    "num_attention_heads": 16,
    "num_key_value_heads": 16,
    "rms_norm_eps": 1e-6,
    "max_position_embeddings": 16_384,
}
_TINY = {"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2}
_TINY_TEXT = _TINY | {"num_attention_heads": 4, "num_key_value_heads": 4}
_TINY_VQ = {"latent_channels": 32, "base_channels": 32, "channel_multiplier": [1, 1, 1, 1, 1]}


class Janus(FamilyModel):
    """Args: start, pad: names of the tokenizer's first and padding token."""

    def __init__(self, request: LoadRequest, tokenizer: Tokenizer, network: nn.Module, start: str, pad: str):
        codes = network.generation_embeddings.num_embeddings
        decoder = vq_decoder.TamingDecoder(network.vqmodel, normalise=True)
        head = network.generation_head.vision_head.weight
        super().__init__(request, tokenizer, network.language_model, head, range(codes), decoder)
        self._network = network
        self._start = start
        self._kept = {token_id(tokenizer, start), token_id(tokenizer, BEGIN_IMAGE)}
        self._pad = token_id(tokenizer, pad)

    def prompt_ids(self, text: str) -> tuple[list[int], list[int]]:
        """The unconditional prompt has the same length: padding everywhere else, and attended to."""
        ids = self.words(f"{self._start}<|User|>: {text}\n\n<|Assistant|>:{BEGIN_IMAGE}")
        return ids, [one if one in self._kept else self._pad for one in ids]

    def token_table(self) -> Tensor:
        """Words, then image tokens, which Janus embeds by a network of their own."""
        codes = torch.arange(self.layout.v_image, device=self.device)
        return torch.cat([self.backbone.embed_tokens.weight, self.embed(codes, codes, ())])

    def table_ids(self, tokens: Tensor) -> Tensor:
        return tokens + self.backbone.embed_tokens.num_embeddings

    def embed(self, tokens: Tensor, positions: Tensor, state: tuple[Tensor, ...]) -> Tensor:
        return self._network.generation_aligner(self._network.generation_embeddings(tokens))

    def head(self, hidden: Tensor) -> Tensor:
        return self._network.generation_head(hidden)


def load(request: LoadRequest) -> Janus:
    if not request.found:
        network = randomise(_network(_random_config(request)), request.device, request.dtype)
        start, pad, _ = _SPECIALS
        return Janus(request, stand_in_tokenizer(_SPECIALS, first_byte=0), network, start, pad)
    files = request.found[0]
    tensors = {name.removeprefix("model."): tensor for name, tensor in read_tensors(files).items()}
    network = _network(read_config(files, JanusConfig), files)
    fill(network, drop(tensors, UNUSED), files, request.device, request.dtype)
    return Janus(request, read_tokenizer(files), network, _named(files, "bos_token"), _named(files, "pad_token"))


def _network(config: JanusConfig, found: CheckpointFiles | None = None) -> nn.Module:
    network = build(JanusModel, config, found=found)
    del network.vision_model, network.aligner, network.vqmodel.encoder, network.vqmodel.quant_conv
    return network


def _named(files: CheckpointFiles, role: str) -> str:
    path = files.named("tokenizer_config.json")
    held = read_json(files.source, path).get(role)
    name = held.get("content") if isinstance(held, dict) else held
    if not isinstance(name, str):
        raise files.refusal(f" names no {role}", path)
    return name


def _random_config(request: LoadRequest) -> JanusConfig:
    text = request.sized(_TEXT, _TINY_TEXT)
    width = {"projection_dim": text["hidden_size"], "image_token_embed_dim": text["hidden_size"]}
    vision = {"projection_dim": text["hidden_size"]}
    return JanusConfig(
        text_config=text, vq_config=request.sized(vq_decoder.LLAMAGEN_VQ, _TINY_VQ) | width, vision_config=vision
    )
