"""The embedded `shapes` model behind the model seam."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence

import torch
from torch import Tensor

from specbench.models.base import TokenLayout
from specbench.models.shapes import network as shapes
from specbench.models.shapes.tokenizer import GRID
from specbench.models.transformer import Prefix, TransformerModel


class ShapesModel(TransformerModel):
    """A 16 x 16-token model of 64 x 64 images, conditioned by caption slots and a pooled caption vector."""

    name = "shapes"

    def __init__(self, network: shapes.ShapesNetwork, tokenizer: shapes.ShapesTokenizer, weights_sha256: str):
        self._network = network
        self._tokenizer = tokenizer
        self.backbone = network.llama
        self.layout = TokenLayout.plain(GRID, GRID, network.codes)
        self.codebook = tokenizer.codebook.float()
        self.weights_sha256 = weights_sha256

    def encode(self, prompts: Sequence[str]) -> Prefix:
        ids = torch.cat([self._network.encode(prompts), self._network.null_ids(len(prompts))])
        return Prefix(self._network.prefix_embeds(ids), (self._network.pooled(ids),))

    def embed(self, tokens: Tensor, positions: Tensor, state: tuple[Tensor, ...]) -> Tensor:
        return self._network.token_embeds(tokens, positions - 1, state[0])

    def head(self, hidden: Tensor) -> Tensor:
        return self._network.head(hidden)

    def render(self, image_tokens: Tensor) -> Tensor:
        return self._tokenizer.decode(image_tokens)


def load(device: str = "cpu", dtype: torch.dtype = torch.float32) -> ShapesModel:
    """The shipped weights; the tokenizer always runs in float32."""
    digest = hashlib.sha256()
    for name in ("network.safetensors", "tokenizer.safetensors"):
        digest.update((shapes.WEIGHTS / name).read_bytes())
    return ShapesModel(shapes.load(device, dtype), shapes.load_tokenizer(device), digest.hexdigest())
