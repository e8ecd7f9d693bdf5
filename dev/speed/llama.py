"""A Llama with random parameters behind the model interface, for timings independent of the weights."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor, nn
from transformers import LlamaConfig, LlamaModel

from specbench.models.interface import TokenLayout
from specbench.models.network_sizes import NetworkSize, Size
from specbench.models.transformer.model import Prefix, TransformerModel
from specbench.system.matrix_products import linear_output

PROMPT = 16
"""Tokens of every prompt."""


class RandomLlama(TransformerModel):
    """By default 12 layers of width 768: 85 million parameters, plus the embedding tables of its `vocabulary`."""

    name, codebook, weights_sha256 = "random-llama", None, ""

    def __init__(
        self,
        vocabulary: int = 8192,
        side: int = 8,
        width: int = 768,
        inner: int = 2048,
        layers: int = 12,
        heads: int = 12,
        device: str = "cpu",
        dtype: torch.dtype = torch.float32,
    ):
        torch.manual_seed(0)
        config = LlamaConfig(
            vocab_size=vocabulary,
            hidden_size=width,
            intermediate_size=inner,
            num_hidden_layers=layers,
            num_attention_heads=heads,
            pad_token_id=None,
            bos_token_id=None,
            eos_token_id=None,
        )
        with torch.device(device), _default_dtype(dtype):
            self.backbone = LlamaModel(config).eval().requires_grad_(False)
            self.output = nn.Linear(config.hidden_size, vocabulary, bias=False).requires_grad_(False)
        self.layout = TokenLayout.plain(side, side, vocabulary)

    @property
    def network(self) -> NetworkSize:
        config = self.backbone.config
        layers, heads = config.num_hidden_layers, config.num_attention_heads
        return NetworkSize(0, config.hidden_size, config.intermediate_size, layers, heads, heads)

    @property
    def size(self) -> Size:
        """Bytes and operations of its forward."""
        return self.network.size(self.output.out_features)

    def encode(self, prompts: Sequence[str]) -> Prefix:
        rows = torch.arange(PROMPT, device=self.device).repeat(2 * len(prompts), 1)
        return Prefix(list(self.backbone.embed_tokens(rows)), ids=rows)

    def embed(self, tokens: Tensor, positions: Tensor, state: tuple[Tensor, ...]) -> Tensor:
        return self.backbone.embed_tokens(tokens)

    def head(self, hidden: Tensor) -> Tensor:
        return linear_output(self.output, hidden)

    def output_matrix(self) -> tuple[Tensor, None]:
        return self.output.weight, None

    def render(self, image_tokens: Tensor, prompts: Sequence[str] = (), seeds: Sequence[int] = ()) -> Tensor:
        return image_tokens.new_zeros(len(image_tokens), 3, 1, 1, dtype=torch.uint8)


@contextmanager
def _default_dtype(dtype: torch.dtype) -> Iterator[None]:
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(before)
