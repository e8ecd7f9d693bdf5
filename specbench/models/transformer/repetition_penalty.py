"""Repetition penalty (Keskar et al., CTRL, arXiv 1909.05858) as part of the target distribution.

Conditional logits of image tokens that the image already holds are divided by the penalty where they are positive, and
multiplied by it where they are negative, before guidance: the order in which `generate` of transformers applies the
penalty of a `generation_config.json` and a guidance processor. Every column of a window is penalised for the drafts to
its left too, so that lossless decoders stay lossless.
"""

from __future__ import annotations

import torch
from torch import Tensor

from specbench.errors import SpecbenchError
from specbench.models.interface import Tree
from specbench.models.transformer.model import Prefix, TransformerModel, TransformerSession


class PenalisedSession(TransformerSession):
    """A session whose logits are penalised; it takes chains of drafts, not draft trees."""

    def __init__(self, model: TransformerModel, prefix: Prefix, guidance: float, columns: int, penalty: float):
        super().__init__(model, prefix, guidance, columns)
        self._penalty = penalty
        images = len(self._last) // (1 if guidance == 1.0 else 2)
        # One more slot for columns without a token of the image: those before its start and past its end.
        self._stream = torch.zeros(images, model.layout.length + 1, dtype=torch.long, device=model.device)

    def forward(self, tokens: Tensor, positions: Tensor, tree: Tree | None = None) -> Tensor:
        if tree is not None:
            raise self._refusal("draft trees")
        guided = super().forward(tokens, positions)
        conditional = self._model.head(self.features[: len(tokens)]).float()
        used = self._used(tokens, positions)
        return guided + self._guidance * torch.where(used, penalised(conditional, self._penalty) - conditional, 0.0)

    def forward_scattered(self, tokens: Tensor, positions: Tensor, fed: Tensor, aside: Tensor) -> Tensor:
        raise self._refusal("rows decoded in parallel")

    def draft_prompt(self):
        raise self._refusal("draft heads")

    def _refusal(self, what: str) -> SpecbenchError:
        return SpecbenchError(
            f"{what} are not supported with the repetition penalty {self._penalty:g} of '{self._model.name}'",
            "use a decoder that drafts a chain, such as sjd, or set repetition_penalty to 1 in generation_config.json",
        )

    def _used(self, tokens: Tensor, positions: Tensor) -> Tensor:
        """[B, T, v_image] whether a column's prefix holds a token. Column j consumes the token of slot position - 1."""
        last, words = self._stream.shape[1] - 1, self._model.layout.v_image
        slots = positions - 1
        within = (slots >= 0) & (slots < last)
        self._stream.scatter_(1, torch.where(within, slots, last), tokens)
        committed = torch.arange(last, device=tokens.device) < slots[:, :1]
        held = torch.where(committed, self._stream[:, :last].clamp(max=words), words)
        before = torch.zeros(len(tokens), words + 1, dtype=torch.bool, device=tokens.device).scatter_(1, held, True)
        fed = torch.zeros(*tokens.shape, words + 1, dtype=torch.int16, device=tokens.device)
        fed.scatter_(2, torch.where(within, tokens.clamp(max=words), words)[..., None], 1)
        return (before[:, None] | (fed.cumsum(1, dtype=torch.int16) > 0))[..., :words]


def penalised(logits: Tensor, penalty: float) -> Tensor:
    """Logits of tokens that were used before."""
    return torch.where(logits > 0, logits / penalty, logits * penalty)
