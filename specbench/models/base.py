"""The model seam: what a decoder may know about a text-to-image model, and nothing else.

Coordinates are *stream* coordinates: slot 0 is the first token after the prompt. A column of a forward names the slot
it predicts; the token it consumes is the one at the slot before (for slot 0, the prompt's last element).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor


@dataclass(frozen=True)
class TokenLayout:
    """The grammar of one image's token stream.

    Attributes:
        height, width: the grid of free image tokens.
        v_image: image vocabulary; free slots hold ids 0 .. v_image-1.
        forced: per stream slot, -1 where the model chooses, else the special id (>= v_image) the grammar demands.
    """

    height: int
    width: int
    v_image: int
    forced: tuple[int, ...]

    @classmethod
    def plain(cls, height: int, width: int, v_image: int) -> TokenLayout:
        """A raster grid without grammar tokens."""
        return cls(height, width, v_image, (-1,) * (height * width))

    @classmethod
    def with_row_ends(cls, height: int, width: int, v_image: int) -> TokenLayout:
        """A raster grid whose every row is closed by one forced special token."""
        row = (-1,) * width + (v_image,)
        return cls(height, width, v_image, row * height)

    def __post_init__(self):
        if sum(slot < 0 for slot in self.forced) != self.height * self.width:
            raise ValueError(f"{self.height}x{self.width} grid needs as many free slots in `forced`")

    @property
    def length(self) -> int:
        """Stream slots N."""
        return len(self.forced)

    @property
    def vocab(self) -> int:
        """Width of every distribution: image ids, then special ids."""
        return max(self.v_image, max(self.forced) + 1)

    def free_slots(self) -> list[int]:
        """Stream slots of the image tokens, in raster order."""
        return [slot for slot, token in enumerate(self.forced) if token < 0]

    def neighbour(self, rows: int, columns: int) -> list[int]:
        """Per stream slot, the slot `rows` above and `columns` to the left in the image grid; -1 where there is none."""
        free = self.free_slots()
        source = [-1] * self.length
        for index, slot in enumerate(free):
            row, column = divmod(index, self.width)
            if row >= rows and column >= columns:
                source[slot] = free[(row - rows) * self.width + column - columns]
        return source

    def image_tokens(self, tokens: Tensor) -> Tensor:
        """Stream tokens [B, N] to image tokens [B, height * width]."""
        return tokens[:, self.free_slots()]


class Session(Protocol):
    """One batch of images being decoded: prompt and committed tokens are in a position-addressed cache.

    Rolling back needs no call: a slot is overwritten before anything may attend to it.
    """

    def forward(self, tokens: Tensor, positions: Tensor, tree: Tensor | None = None) -> Tensor:
        """Guided logits over the image vocabulary.

        Args:
            tokens: [B, T] stream token each column consumes: the one at slot `positions - 1`.
            positions: [B, T] stream slot each column predicts; slot 0 consumes the prompt's last element and ignores
                its entry of `tokens`.
            tree: [T, T] bool, True where a column attends to another column of this forward (its ancestors and
                itself). None means a chain: column t sees columns before it.

        Returns:
            [B, T, v_image] float32.
        """
        ...

    def keep(self, columns: Tensor, positions: Tensor) -> None:
        """After a tree forward, move the cache entries of `columns` [B, D] to the true places of `positions` [B, D].

        Entry d of a row is skipped where `columns` is negative.
        """
        ...


class ImageModel(Protocol):
    """A text-to-image AR model as the decode loop, the runner and the reports see it."""

    name: str
    layout: TokenLayout
    codebook: Tensor | None
    device: torch.device
    dtype: torch.dtype
    weights_sha256: str

    def encode(self, prompts: Sequence[str]) -> Any:
        """Prompts to whatever `begin` needs: conditional and unconditional rows."""
        ...

    def begin(self, prefix: Any, guidance: float, columns: int) -> Session:
        """Prefill the cache for a batch; no forward will have more than `columns` columns."""
        ...

    def render(self, image_tokens: Tensor) -> Tensor:
        """[B, height * width] image tokens to uint8 [B, 3, H, W] pixels."""
        ...
