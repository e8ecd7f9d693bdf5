"""BLIP networks of transformers with the authors' weights (Li et al. 2022), for ImageReward and BLIP-VQA. Sizes are
derived from the weights. Layer norms of the vision network use 1e-6; transformers' default of 1e-5 shifts scores."""

import re
from collections.abc import Mapping, Sequence
from pathlib import Path

import torch
from torch import Tensor, nn
from transformers import BertTokenizer, BlipTextConfig, BlipTextModel, BlipVisionConfig, BlipVisionModel
from transformers.models.blip.modeling_blip_text import BlipTextLMHeadModel

Weights = Mapping[str, Tensor]
HEAD_WIDTH = 64
_TOKENS = 35
DECODE_TOKEN, ENCODE_TOKEN = 30522, 30523  # [DEC] and [ENC], which the authors appended to BERT's vocabulary

_VISION_NAMES = (
    (r"^cls_token$", "embeddings.class_embedding"),
    (r"^pos_embed$", "embeddings.position_embedding"),
    (r"^patch_embed\.proj\.", "embeddings.patch_embedding."),
    (r"^blocks\.(\d+)\.attn\.qkv\.", r"encoder.layers.\1.self_attn.qkv."),
    (r"^blocks\.(\d+)\.attn\.proj\.", r"encoder.layers.\1.self_attn.projection."),
    (r"^blocks\.(\d+)\.norm([12])\.", r"encoder.layers.\1.layer_norm\2."),
    (r"^blocks\.(\d+)\.", r"encoder.layers.\1."),
    (r"^norm\.", "post_layernorm."),
)


def part_of(weights: Weights, prefix: str) -> dict[str, Tensor]:
    """Select the weights whose names begin with a prefix, and strip the prefix."""
    return {name.removeprefix(prefix): value for name, value in weights.items() if name.startswith(prefix)}


def vision_network(weights: Weights) -> BlipVisionModel:
    """Build the ViT image encoder from the weights of `visual_encoder`, named without this prefix."""
    hidden = weights["pos_embed"].shape[2]
    patch = weights["patch_embed.proj.weight"].shape[2]
    network = BlipVisionModel(
        BlipVisionConfig(
            hidden_size=hidden,
            intermediate_size=weights["blocks.0.mlp.fc1.weight"].shape[0],
            num_hidden_layers=_count(weights, r"blocks\.(\d+)\."),
            num_attention_heads=hidden // HEAD_WIDTH,
            image_size=patch * round((weights["pos_embed"].shape[1] - 1) ** 0.5),
            patch_size=patch,
            layer_norm_eps=1e-6,
        )
    )
    network.load_state_dict({_vision_name(name): value for name, value in weights.items()})
    return network


def text_network(weights: Weights, image_width: int, head: bool = False) -> BlipTextModel | BlipTextLMHeadModel:
    """Build BERT with cross-attention to image features, from the weights of an encoder, or if `head`, of a decoder."""
    body = part_of(weights, "bert.") if head else weights
    hidden = body["embeddings.word_embeddings.weight"].shape[1]
    config = BlipTextConfig(
        vocab_size=body["embeddings.word_embeddings.weight"].shape[0],
        hidden_size=hidden,
        encoder_hidden_size=image_width,
        intermediate_size=body["encoder.layer.0.intermediate.dense.weight"].shape[0],
        num_hidden_layers=_count(body, r"encoder\.layer\.(\d+)\."),
        num_attention_heads=hidden // HEAD_WIDTH,
        max_position_embeddings=body["embeddings.position_embeddings.weight"].shape[0],
        layer_norm_eps=1e-12,
        is_decoder=True,  # required for cross-attention; each call sets the direction of attention
    )
    network = BlipTextLMHeadModel(config) if head else BlipTextModel(config, add_pooling_layer=False)
    state = network.state_dict()
    stored = {name: value for name, value in weights.items() if not name.endswith("position_ids")}
    spare = {"cls.predictions.decoder.bias": stored.get("cls.predictions.bias")} if head else {}
    stored |= {name: value for name, value in spare.items() if name in state and name not in stored}
    network.load_state_dict(stored | {name: state[name] for name in state if name.endswith("position_ids")})
    return network


def load_weights(path: Path) -> dict[str, Tensor]:
    """Load the tensors of the authors' checkpoint without running pickled code. The caller has checked the digest."""
    content = torch.load(path, map_location="cpu", weights_only=True)
    return content.get("model", content)


def linear_layers(weights: Weights) -> nn.Sequential:
    """Build a chain of linear layers from numbered weights, without the layers between, which only act in training."""
    layers = []
    for number in sorted(int(name.removesuffix(".weight")) for name in weights if name.endswith(".weight")):
        weight = weights[f"{number}.weight"]
        layers.append(nn.Linear(weight.shape[1], weight.shape[0]))
        layers[-1].load_state_dict({"weight": weight, "bias": weights[f"{number}.bias"]})
    return nn.Sequential(*layers)


class Tokenizer:
    """BERT's tokenizer, truncated to 35 tokens."""

    def __init__(self, vocabulary: Path):
        self._tokenizer = BertTokenizer(vocab=str(vocabulary))

    def padded(self, texts: Sequence[str]) -> tuple[Tensor, Tensor]:
        """Tokenize texts to ids and mask, int64 [n, 35] each."""
        tokens = self._tokenizer(
            list(texts), padding="max_length", truncation=True, max_length=_TOKENS, return_tensors="pt"
        )
        return tokens.input_ids, tokens.attention_mask

    def cut(self, texts: Sequence[str]) -> tuple[int, int]:
        """Return the number of texts that are truncated, and the limit in tokens."""
        return sum(len(self._tokenizer(text).input_ids) > _TOKENS for text in texts), _TOKENS

    def ids(self, text: str) -> list[int]:
        return self._tokenizer(text, truncation=True, max_length=_TOKENS).input_ids


def _vision_name(name: str) -> str:
    for pattern, replacement in _VISION_NAMES:
        name, replaced = re.subn(pattern, replacement, name)
        if replaced:
            return name
    return name


def _count(weights: Weights, pattern: str) -> int:
    return 1 + max(int(match[1]) for name in weights if (match := re.match(pattern, name)))
