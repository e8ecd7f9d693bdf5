"""A two-layer Llama with grouped keys, small enough to compare with its full forward."""

import torch
from transformers import LlamaConfig, LlamaModel

from specbench.models.interface import TokenLayout
from specbench.models.transformer.model import TransformerModel

VOCAB, WIDTH = 11, 16


class TinyModel(TransformerModel):
    """A random two-layer Llama with grouped keys, and a linear head."""

    name = "tiny"
    codebook = None

    def __init__(self):
        torch.manual_seed(0)
        sizes = {"hidden_size": WIDTH, "intermediate_size": 24, "num_hidden_layers": 2, "num_attention_heads": 4}
        self.backbone = LlamaModel(LlamaConfig(vocab_size=VOCAB, num_key_value_heads=2, **sizes)).eval()
        self.layout = TokenLayout.plain(4, 5, VOCAB)
        self.matrix = torch.randn(WIDTH, VOCAB)
        for weights in self.backbone.parameters():
            weights.data.mul_(4)

    def embed(self, tokens, positions, state):
        return self.backbone.embed_tokens(tokens) + state[0][:, None]

    def head(self, hidden):
        return hidden @ self.matrix
