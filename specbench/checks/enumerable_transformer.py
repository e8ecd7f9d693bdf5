"""A random transformer whose images can be enumerated: the audit's model with a real KV cache, masks and positions."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor
from transformers import LlamaConfig, LlamaModel

from specbench.checks.enumerable_model import NO_SPECIAL_TOKENS, enumerate_images, sharp_vertical_head
from specbench.models.draft_head import EagleHead, new_head
from specbench.models.interface import TokenLayout
from specbench.models.transformer.model import Prefix, TransformerModel
from specbench.models.vertical_head import VerticalHead
from specbench.specs.run_spec import Sampling

WIDTH = 16
_SIZES = {"hidden_size": WIDTH, "intermediate_size": 24, "num_attention_heads": 2, "num_key_value_heads": 2}
_PROMPT_IDS = 8


class EnumerableTransformer(TransformerModel):
    """A two-layer Llama with random weights, behind the same cache and sessions as the real families.

    Prompts have different lengths, and unconditional rows another one, so that rows of a batch stand at different
    slots of the cache.

    Args:
        layout: grammar of the stream.
        prompts: texts the model knows; the n-th one has n + 2 elements.
        seed: of the weights.
    """

    name = "enumerable-transformer"

    def __init__(self, layout: TokenLayout, prompts: Sequence[str] = ("",), seed: int = 0):
        self.layout = layout
        self.prompts = tuple(prompts)
        draw = torch.Generator().manual_seed(seed)
        vocab = layout.vocab + _PROMPT_IDS * len(prompts)
        config = LlamaConfig(vocab_size=vocab, num_hidden_layers=2, **NO_SPECIAL_TOKENS, **_SIZES)
        self.backbone = LlamaModel(config).eval().requires_grad_(False)
        for name, weight in self.backbone.named_parameters():
            if "norm" not in name:
                # Wide enough that attention is sharp and logits depend on every earlier token.
                weight.copy_(torch.randn(weight.shape, generator=draw) * (1.0 if "embed" in name else 0.5))
        self.codebook = 0.5 * torch.randn(layout.v_image, 2, generator=draw)
        self.matrix = 0.4 * torch.randn(WIDTH, layout.v_image, generator=draw)
        self.weights_sha256 = hashlib.sha256(self.matrix.numpy().tobytes()).hexdigest()

    def move(self, device: str) -> None:
        """Move the weights to a device; `joint` is computed on a CPU only."""
        self.backbone.to(device)
        self.codebook, self.matrix = self.codebook.to(device), self.matrix.to(device)

    def encode(self, prompts: Sequence[str]) -> Prefix:
        known = [self._prompt(number).to(self.device) for number in range(len(self.prompts))]
        known.append(torch.tensor([self.layout.vocab], device=self.device))
        embedded = [self.backbone.embed_tokens(ids) for ids in known]
        rows = [self.prompts.index(text) for text in prompts] + [-1] * len(prompts)
        embeds = [embedded[row] for row in rows]
        ids = torch.nn.utils.rnn.pad_sequence(known, batch_first=True)[rows, : max(map(len, embeds))]
        return Prefix(embeds, ids=ids)

    def _prompt(self, number: int) -> Tensor:
        first = self.layout.vocab + _PROMPT_IDS * number
        return first + torch.arange(number + 2) % _PROMPT_IDS

    def embed(self, tokens: Tensor, positions: Tensor, state: tuple[Tensor, ...]) -> Tensor:
        return self.backbone.embed_tokens(tokens)

    def head(self, hidden: Tensor) -> Tensor:
        return hidden @ self.matrix

    def own_head(self) -> EagleHead:
        """An untrained draft head whose drafts depend on its cache."""
        sizes = {"num_hidden_layers": 1, **NO_SPECIAL_TOKENS, **_SIZES}
        vocab = self.backbone.config.vocab_size
        head = new_head(LlamaConfig(vocab_size=vocab, **sizes), self.backbone.embed_tokens.weight, seed=1)
        for name, weight in head.named_parameters():
            if "embed" not in name:
                weight.data.mul_(8)
        return head

    def own_vertical_head(self) -> VerticalHead:
        """An untrained vertical head."""
        return sharp_vertical_head(WIDTH)

    def render(self, image_tokens: Tensor) -> Tensor:
        """One grey pixel per token."""
        grey = image_tokens * 255 // max(self.layout.v_image - 1, 1)
        grid = grey.to(torch.uint8).view(-1, 1, self.layout.height, self.layout.width)
        return grid.expand(-1, 3, -1, -1)

    @torch.inference_mode()
    def joint(self, sampling: Sampling, prompt: str) -> np.ndarray:
        """Exact probability of every image, as `enumerable_model.joint`, from forwards without a cache."""
        encoded = self.encode([prompt])

        def logits(slot: int, prefixes: np.ndarray) -> np.ndarray:
            tokens = self.backbone.embed_tokens(torch.from_numpy(prefixes))
            found = []
            for start in encoded.embeds:
                inputs = torch.cat([start.expand(len(tokens), -1, -1), tokens], 1)
                hidden = self.backbone(inputs_embeds=inputs, use_cache=False).last_hidden_state[:, -1]
                found.append(self.head(hidden).double().numpy())
            conditional, unconditional = found
            return unconditional + sampling.guidance * (conditional - unconditional)

        return enumerate_images(self.layout, sampling, logits)
