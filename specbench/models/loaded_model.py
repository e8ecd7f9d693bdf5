"""A network of transformers that somebody has loaded already, as a model to decode with."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from specbench.errors import SpecbenchError
from specbench.models.families.base import FamilyModel
from specbench.models.interface import TokenLayout
from specbench.models.transformer.model import Prefix, TransformerSession

PromptIds = Callable[[str], tuple[Sequence[int], Sequence[int]]]
"""Vocabulary ids of a text's prompt up to the first image token, and those of the unconditional prompt."""


class LoadedModel(FamilyModel):
    """A causal language model of transformers whose image tokens are words of its vocabulary.

    Args:
        network: with `get_output_embeddings()` and a backbone that takes `inputs_embeds`; it is not changed.
        layout: of the image tokens, or height and width of a plain grid.
        image_ids: vocabulary id of each image token, of which there are `layout.v_image`.
        forced_ids: vocabulary ids of the tokens that the layout forces, in the order of their stream ids.
        prompt_ids: see `PromptIds`.
        codebook: [v_image, d] embedding of each image token, for decoders that need distances between tokens.
        render: draws image tokens [B, free slots] as uint8 [B, 3, H, W]; without it there are no pictures.
    """

    weights_sha256 = ""

    def __init__(
        self,
        network: nn.Module,
        layout: TokenLayout | tuple[int, int],
        image_ids: Sequence[int],
        prompt_ids: PromptIds,
        forced_ids: Sequence[int] = (),
        codebook: Tensor | None = None,
        render: Callable[[Tensor], Tensor] | None = None,
    ):
        network_: Any = network
        self.layout = layout if isinstance(layout, TokenLayout) else TokenLayout.plain(*layout, len(image_ids))
        if self.layout.vocab != len(image_ids) + len(forced_ids):
            what = f"{len(image_ids)} image ids and {len(forced_ids)} forced ids for a layout of {self.layout.vocab}"
            raise SpecbenchError(what, "one vocabulary id for each id of the layout")
        self.name = type(network).__name__
        self.backbone = network_.model if hasattr(network, "model") else network_.base_model
        head = network_.get_output_embeddings().weight
        if len(image_ids) == 0 or not all(0 <= one < len(head) for one in (*image_ids, *forced_ids)):
            raise SpecbenchError(f"image_ids and forced_ids must be of the {len(head)} words of {self.name}")
        self._head = head[list(image_ids)]
        self._stream_ids = torch.tensor([*image_ids, *forced_ids], device=self._head.device)
        self.codebook = None if codebook is None else codebook.detach().float().to(self._head.device)
        self._ids_of, self._draw = prompt_ids, render

    @property
    def draws(self) -> bool:
        return self._draw is not None

    def problem(self, tokens: object) -> None:
        """Any tokens can be drawn."""

    def begin(self, prefix: Prefix, guidance: float, columns: int) -> TransformerSession:
        return TransformerSession(self, prefix, guidance, columns)  # with the attention that the network has

    def prompt_ids(self, text: str) -> tuple[list[int], list[int]]:
        conditional, unconditional = self._ids_of(text)
        return list(conditional), list(unconditional)

    def render(self, image_tokens: Tensor, prompts: Sequence[str] = (), seeds: Sequence[int] = ()) -> Tensor:
        return self._draw(image_tokens)
