"""A Llama with 100 million random parameters behind the model interface, for timings independent of the weights."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn
from transformers import LlamaConfig, LlamaModel

from specbench.models.interface import TokenLayout
from specbench.models.transformer.model import Prefix, TransformerModel

PROMPT = 16
"""Tokens of every prompt."""


class RandomLlama(TransformerModel):
    """Build 12 layers of width 768: 85 million parameters besides the embedding tables of its `vocabulary`."""

    name, codebook, weights_sha256 = "random-llama", None, ""

    def __init__(self, vocabulary: int = 8192, side: int = 8):
        torch.manual_seed(0)
        config = LlamaConfig(
            vocab_size=vocabulary,
            hidden_size=768,
            intermediate_size=2048,
            num_hidden_layers=12,
            num_attention_heads=12,
            pad_token_id=None,
            bos_token_id=None,
            eos_token_id=None,
        )
        self.backbone = LlamaModel(config).eval().requires_grad_(False)
        self.output = nn.Linear(config.hidden_size, vocabulary, bias=False).requires_grad_(False)
        self.layout = TokenLayout.plain(side, side, vocabulary)

    def encode(self, prompts: Sequence[str]) -> Prefix:
        rows = torch.arange(PROMPT).repeat(2 * len(prompts), 1)
        return Prefix(list(self.backbone.embed_tokens(rows)), ids=rows)

    def embed(self, tokens: Tensor, positions: Tensor, state: tuple[Tensor, ...]) -> Tensor:
        return self.backbone.embed_tokens(tokens)

    def head(self, hidden: Tensor) -> Tensor:
        return self.output(hidden)
