"""The model seam: what a decoder may know about a text-to-image model, and nothing else.

Coordinates are *stream* coordinates: slot 0 is the first token after the prompt. A column of a forward names the slot
it predicts; the token it consumes is the one at the slot before (for slot 0, the prompt's last element).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple, Protocol

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
        """Per stream slot, the slot `rows` above and `columns` to the left in the image grid, or -1."""
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


@dataclass(frozen=True)
class Tree:
    """Static shape of a window with branches: column 0 consumes the last committed token, the rest are drafts.

    Attributes:
        parents: per column the column whose token comes right before its own; -1 for column 0, earlier columns only.
    """

    parents: tuple[int, ...]

    def __post_init__(self):
        if not self.parents or self.parents[0] != -1:
            raise ValueError("column 0 is the root: its parent must be -1")
        if any(not 0 <= parent < column for column, parent in enumerate(self.parents) if column):
            raise ValueError("a column's parent must stand before it")

    @cached_property
    def depth(self) -> tuple[int, ...]:
        """Per column, its distance from column 0: it predicts the root's position plus this."""
        depth = [0]
        for parent in self.parents[1:]:
            depth.append(depth[parent] + 1)
        return tuple(depth)

    @cached_property
    def in_trunk(self) -> tuple[bool, ...]:
        """Per column, whether it lies on the path of first children: the trunk is cached in place, the rest aside."""
        trunk, taken = [True], set()
        for parent in self.parents[1:]:
            trunk.append(trunk[parent] and parent not in taken)
            taken.add(parent)
        return tuple(trunk)

    @cached_property
    def ancestors(self) -> Tensor:
        """[T, T] bool, True where the second column is the first one or an ancestor of it."""
        sees = torch.eye(len(self.parents), dtype=torch.bool, device="cpu")
        for column, parent in enumerate(self.parents[1:], start=1):
            sees[column] |= sees[parent]
        return sees


class Session(Protocol):
    """One batch of images being decoded: prompt and committed tokens are in a position-addressed cache.

    Rolling back needs no call: a slot is overwritten before anything may attend to it.
    """

    def forward(self, tokens: Tensor, positions: Tensor, tree: Tree | None = None) -> Tensor:
        """Guided logits over the image vocabulary.

        Args:
            tokens: [B, T] stream token each column consumes: the one at slot `positions - 1`.
            positions: [B, T] stream slot each column predicts, per row consecutive (plus the depth, for a tree); slot
                0 consumes the prompt's last element and ignores its entry of `tokens`. Rows near their end may name
                slots past the last one: their logits are never read.
            tree: which columns of this forward a column attends to. None is a chain: column t sees those before it.

        Returns:
            [B, T, v_image] float32.
        """
        ...

    def keep(self, columns: Tensor, positions: Tensor) -> None:
        """After a tree forward, put the cache entries of `columns` [B, D] where trunk columns predicting `positions`
        [B, D] would stand, so that the branch becomes part of the committed prefix.
        """
        ...

    def refill(self, rows: Tensor, prefix: Any) -> None:
        """Give images `rows` [K] to the K other prompts of `prefix`: all but the prompt is forgotten."""
        ...


class DraftPrompt(NamedTuple):
    """The prompts of a batch as a draft head sees them. R rows of P elements each, padded behind.

    Attributes:
        lengths: [R] elements P.
        features: [R, longest P - 1, d] hidden states of all elements but the last; None if there are none.
        ids: [R, longest P] the elements as numbers in the head's token table.
    """

    lengths: Tensor
    features: Tensor | None
    ids: Tensor | None


class FeatureSession(Session, Protocol):
    """A session that a draft head can work beside. R rows: the conditional ones, then any unconditional ones.

    Attributes:
        features: [R, T, d] last hidden states of the latest forward, those that `logits` reads.
    """

    features: Tensor

    def draft_prompt(self) -> DraftPrompt:
        """The prompts of all rows."""
        ...

    def logits(self, features: Tensor) -> Tensor:
        """Guided logits [B, T, v_image] of features [R, T, d], the target's own or a head's."""
        ...


class ScatteredSession(Protocol):
    """A session in which stream slots need not be filled from the left."""

    def forward_scattered(self, tokens: Tensor, positions: Tensor, fed: Tensor, aside: Tensor) -> Tensor:
        """Guided logits over the image vocabulary.

        Args:
            tokens, positions: [B, T] as in `Session.forward`, in any order; position N (past the end) is a column
                that is neither read nor remembered.
            fed: [B, N + 1] bool by position: columns that were fed so far, this forward's included. A column attends
                to the prompt and to those at its own and earlier positions.
            aside: [B, T] bool, columns whose token is a stand-in: seen by themselves alone, then forgotten.

        Returns:
            [B, T, v_image] float32.
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
