"""A transformer small enough to compile in seconds."""

import torch
from transformers import LlamaConfig, LlamaModel

from specbench.models.draft_head import new_head
from specbench.models.interface import TokenLayout
from specbench.models.transformer.model import Prefix, TransformerModel
from specbench.models.vertical_head import new_vertical_head

VOCAB, WIDTH = 5, 16
SIZES = {"hidden_size": WIDTH, "intermediate_size": 24, "num_attention_heads": 2, "num_key_value_heads": 2}


class Tiny(TransformerModel):
    """A small Llama whose prompts have the length of their text; every image row is closed by a forced token."""

    name = "tiny"
    weights_sha256 = "0" * 64

    def __init__(self, layers: int = 1):
        torch.manual_seed(0)
        config = LlamaConfig(vocab_size=VOCAB + 1, num_hidden_layers=layers, pad_token_id=None, **SIZES)
        self.backbone = LlamaModel(config).eval().requires_grad_(False)
        self.layout = TokenLayout.with_row_ends(2, 2, VOCAB)
        self.codebook = 0.4 * torch.randn(VOCAB, 2)
        self.matrix = 0.4 * torch.randn(WIDTH, VOCAB)

    def encode(self, prompts):
        rows = [torch.arange(len(text)) % VOCAB for text in prompts] + [torch.zeros(2).long()] * len(prompts)
        ids = torch.nn.utils.rnn.pad_sequence(rows, batch_first=True)
        return Prefix([self.backbone.embed_tokens(row) for row in rows], ids=ids)

    def embed(self, tokens, positions, state):
        return self.backbone.embed_tokens(tokens)

    def head(self, hidden):
        return hidden @ self.matrix

    def render(self, image_tokens, prompts=(), seeds=()):
        return torch.zeros(len(image_tokens), 3, 2, 2, dtype=torch.uint8)

    def own_head(self):
        config = LlamaConfig(vocab_size=VOCAB + 1, num_hidden_layers=1, pad_token_id=None, **SIZES)
        return new_head(config, self.backbone.embed_tokens.weight, seed=1)

    def own_eagle3_head(self):
        return new_head(self.own_head().config, self.backbone.embed_tokens.weight, seed=1, taps=(0,))

    def own_vertical_head(self):
        return new_vertical_head(WIDTH, 24, seed=1)
