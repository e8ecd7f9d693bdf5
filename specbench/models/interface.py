"""The interface between decoders and text-to-image models: token layout, draft tree, session, model.

Coordinates are *stream* coordinates: slot 0 is the first token after the prompt. A column of a forward is addressed by
the slot that it predicts. It consumes the token of the previous slot (for slot 0, the prompt's last element).
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from functools import cached_property
from itertools import chain, pairwise
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol, runtime_checkable

import numpy as np
import torch
from torch import Tensor, nn

from specbench.specs.run_spec import Sampling

Call = Callable[..., Any]  # `call(fn, *args)` returns fn(*args), computed eagerly or by compiled code


@dataclass(frozen=True)
class TokenLayout:
    """Grammar of one image's token stream."""

    # height, width: the grid of free image tokens; the last of several grids
    height: int
    width: int
    v_image: int  # size of the image vocabulary; free slots hold ids 0 .. v_image - 1
    # per stream slot, -1 if it is free, else the special id (>= v_image) that the grammar forces
    forced: tuple[int, ...]
    # height and width of the grids before the last grid in the stream, such as a preview
    before: tuple[tuple[int, int], ...] = ()
    ranges: tuple[tuple[int, int], ...] = ()  # ids of each grid, as [first, end); all ids if empty

    @classmethod
    def plain(cls, height: int, width: int, v_image: int, before: tuple[tuple[int, int], ...] = ()) -> TokenLayout:
        """Build raster grids without grammar tokens."""
        cells = sum(rows * columns for rows, columns in (*before, (height, width)))
        return cls(height, width, v_image, (-1,) * cells, before)

    @classmethod
    def with_row_ends(cls, height: int, width: int, v_image: int) -> TokenLayout:
        """Build a raster grid in which a forced special token closes every row."""
        return cls(height, width, v_image, ((-1,) * width + (v_image,)) * height)

    def __post_init__(self) -> None:
        if sum(slot < 0 for slot in self.forced) != sum(rows * columns for rows, columns in self.grids):
            named = " and ".join(f"{rows}x{columns}" for rows, columns in self.grids)
            raise ValueError(f"{named} grid needs as many free slots in `forced`")
        if self.ranges and len(self.ranges) != len(self.grids):
            raise ValueError(f"{len(self.grids)} grids need as many `ranges`")

    @property
    def grids(self) -> tuple[tuple[int, int], ...]:
        """Height and width of every grid, in the order of the stream."""
        return (*self.before, (self.height, self.width))

    @cached_property
    def rows(self) -> list[list[list[int]]]:
        """Stream slots of the image tokens, by grid, row and column."""
        free = iter(self.free_slots())
        return [[[next(free) for _ in range(columns)] for _ in range(rows)] for rows, columns in self.grids]

    @property
    def length(self) -> int:
        """Number N of stream slots."""
        return len(self.forced)

    @cached_property
    def vocab(self) -> int:
        """Width of every distribution: image ids, then special ids."""
        return max(self.v_image, max(self.forced) + 1)

    @property
    def bounds(self) -> list[tuple[int, int]]:
        """For each stream slot, and past the end, the ids [first, end) that it may hold."""
        bounds = [(0, self.v_image)] * (self.length + 1)
        for ids, grid in zip(self.ranges, self.rows if self.ranges else (), strict=True):
            for slot in chain(*grid):
                bounds[slot] = ids
        return bounds

    def free_slots(self) -> list[int]:
        """Stream slots of the image tokens, in raster order, grid by grid."""
        return [slot for slot, token in enumerate(self.forced) if token < 0]

    def neighbour(self, rows: int, columns: int) -> list[int]:
        """Return, per stream slot, the slot `rows` above and `columns` to the left in the same grid, or -1."""
        source = [-1] * self.length
        for grid in self.rows:
            for above, row in zip(grid, grid[rows:], strict=False):
                for left, slot in zip(above, row[columns:], strict=False):
                    source[slot] = left
        return source

    def nearest_before(self) -> list[int]:
        """Return, per stream slot, the slot of the previous grid whose cell covers the same place, or -1."""
        source = [-1] * self.length
        for small, large in pairwise(self.rows):
            for row, slots in enumerate(large):
                cells = small[(2 * row + 1) * len(small) // (2 * len(large))]
                for column, slot in enumerate(slots):
                    source[slot] = cells[(2 * column + 1) * len(cells) // (2 * len(slots))]
        return source

    def image_tokens(self, tokens: Tensor) -> Tensor:
        """Convert stream tokens [B, N] to image tokens of all grids [B, free slots]."""
        return tokens[:, self.free_slots()]


@dataclass(frozen=True)
class Tree:
    """Static draft tree. A column is a token of the forward: column 0, the root, is the last committed token."""

    parents: tuple[int, ...]  # parent of each column, an earlier column; -1 for column 0

    def __post_init__(self) -> None:
        if not self.parents or self.parents[0] != -1:
            raise ValueError("column 0 is the root: its parent must be -1")
        if any(not 0 <= parent < column for column, parent in enumerate(self.parents) if column):
            raise ValueError("a column's parent must precede it")

    @cached_property
    def depth(self) -> tuple[int, ...]:
        """Depth of each column, 0 for the root; a column predicts the root's position plus its depth."""
        depth = [0]
        for parent in self.parents[1:]:
            depth.append(depth[parent] + 1)
        return tuple(depth)

    @cached_property
    def is_chain(self) -> bool:
        """True if the only child of each column, except the last column, is the next column."""
        return self.parents == tuple(range(-1, len(self.parents) - 1))

    @cached_property
    def in_trunk(self) -> tuple[bool, ...]:
        """True for columns on the trunk, the path of first children, whose cache entries are written in place."""
        trunk, taken = [True], set()
        for parent in self.parents[1:]:
            trunk.append(trunk[parent] and parent not in taken)
            taken.add(parent)
        return tuple(trunk)

    @cached_property
    def ancestors(self) -> Tensor:
        """[T, T] bool, True if the second column is the first column or its ancestor."""
        sees = torch.eye(len(self.parents), dtype=torch.bool, device="cpu")
        for column, parent in enumerate(self.parents[1:], start=1):
            sees[column] |= sees[parent]
        return sees


class Session(Protocol):
    """One batch of images being decoded, with prompt and committed tokens in a position-addressed KV cache. No call is
    needed for rejected drafts: a slot is overwritten before anything may attend to it."""

    def forward(self, tokens: Tensor, positions: Tensor, tree: Tree | None = None) -> Tensor:
        """Compute guided logits over the image vocabulary.

        Args:
            tokens: [B, T] stream token each column consumes, of slot `positions - 1`.
            positions: [B, T] stream slot each column predicts; consecutive in a row, or for a tree the root's slot plus
                the depth. Slot 0 consumes the prompt's last element and ignores its entry of `tokens`. Rows near their
                end may name slots past the last slot, whose logits are never read.
            tree: defines the columns of this forward that a column attends to. None is a chain: all earlier columns.

        Returns:
            [B, T, v_image] float32.
        """

    def keep(self, columns: Tensor, positions: Tensor) -> None:
        """After a tree forward, copy the cache entries of `columns` [B, D] to the slots of trunk columns that predict
        `positions` [B, D], so that the branch becomes part of the committed prefix."""

    def refill(self, rows: Tensor, prefix: Any) -> None:
        """Start new images in `rows` [K], with the K prompts of `prefix`."""


class DraftPrompt(NamedTuple):
    """Prompts of a batch in the form that a draft head reads: R rows of P elements each, padded at the end."""

    lengths: Tensor  # [R] number of elements P
    features: Any  # [R, longest P - 1, d] tensor: hidden states of all elements but the last; None if there are none
    ids: Tensor | None  # [R, longest P] ids of the elements in the head's token table


class FeatureSession(Session, Protocol):
    """A session that a draft head can draft for. R rows: conditional rows, then unconditional rows, if any."""

    features: Tensor  # [R, T, d] last hidden states of the latest forward, the input of `logits`

    def draft_prompt(self) -> DraftPrompt:
        """Return the prompts of all rows."""

    def logits(self, features: Tensor) -> Tensor:
        """Compute guided logits [B, T, v_image] of features [R, T, d] of the target or of a draft head."""

    def reduced_head(self, ids: Tensor) -> Any:
        """Return the output head for image ids [B, K] only; its `logits` are [B, T, K]."""


@runtime_checkable
class PartedSession(Protocol):
    """A session whose forwards read whole parts of its cache. Each number of parts is another input shape."""

    def part_starts(self) -> list[int]:
        """Stream slots from which a forward reads one more part."""


class ScatteredSession(Protocol):
    """A session in which stream slots need not be filled from the left."""

    def forward_scattered(self, tokens: Tensor, positions: Tensor, fed: Tensor, aside: Tensor) -> Tensor:
        """Compute guided logits over the image vocabulary.

        Args:
            tokens, positions: [B, T] as in `Session.forward`, in any order. Position N (past the end) marks a column
                whose logits are not read and whose keys and values are not kept.
            fed: [B, N + 1] bool, positions fed so far, including the positions of this forward. A column attends to
                the prompt and to fed positions up to its own position. Or [B, T, N + 1]: the positions that each
                column of this forward may attend to.
            aside: [B, T] bool, columns whose token is a placeholder: no other column attends to them, now or later.

        Returns:
            [B, T, v_image] float32.
        """


class ImageModel(Protocol):
    """An autoregressive text-to-image model."""

    name: str
    layout: TokenLayout
    codebook: Tensor | None  # [v_image, d] float32 embedding of each image token for distance rules, or None
    weights_sha256: str  # digest of the weights

    if TYPE_CHECKING:  # fields or properties of subclasses, which could not set properties of this class

        @property
        def device(self) -> torch.device: ...
        @property
        def dtype(self) -> torch.dtype: ...

    def encode(self, prompts: Sequence[str]) -> Any:
        """Encode prompts into the prefix that `begin` takes, with conditional and unconditional rows."""

    def begin(self, prefix: Any, guidance: float, columns: int) -> Session:
        """Prefill the KV cache for a batch; no forward will have more than `columns` tokens per row."""

    def render(self, image_tokens: Tensor, prompts: Sequence[str] = (), seeds: Sequence[int] = ()) -> Tensor:
        """Decode image tokens [B, free slots] into pixels, uint8 [B, 3, H, W]. `prompts` and `seeds` of the images are
        for decoders that draw from noise, such as diffusion."""


@runtime_checkable
class StagedModel(Protocol):
    """A model whose tokens become the prompt of a second model, which draws the pictures."""

    second: ImageModel
    second_sampling: Sampling

    def second_text(self, text: str, tokens: Sequence[int]) -> str:
        """Prompt of the second model, for a prompt and the stream tokens [N] of its image."""


@runtime_checkable
class CuttingModel(Protocol):
    """A model that reads only the beginning of a long caption."""

    def tokens_cut(self, caption: str) -> int:
        """Return the number of tokens of a caption that it does not read."""


@runtime_checkable
class FallibleModel(Protocol):
    """A model that may draw tokens that cannot be decoded into a picture."""

    draws: bool  # whether pictures can be drawn; a model without this field can always draw them

    def problem(self, tokens: np.ndarray) -> str | None:
        """Reason why stream tokens [N] cannot be decoded into a picture; None if they can."""


@runtime_checkable
class CompilableModel(Protocol):
    """A model whose steps can run compiled."""

    compiles: bool  # whether `compile` was called
    compiled: Sequence[Any]  # compiled functions so far, each with `seconds` of compiling and number of `forms`

    def compile(self) -> None:
        """Run the steps of later sessions compiled."""

    def call_for(self, key: Hashable, rows: int) -> Call:
        """Return the `Call` for functions of a decoder and sampling (`key`) on `rows` images; eager unless compiled."""

    def forwards_alone(self) -> AbstractContextManager[None]:
        """Context in which only the target's forwards run compiled; functions of decoders run eagerly."""


@runtime_checkable
class TokenTableModel(Protocol):
    """A model with one embedding per token."""

    def token_table(self) -> Tensor:
        """Return the embeddings [ids, d]."""

    def table_ids(self, tokens: Tensor) -> Tensor:
        """Map stream tokens to ids of the table."""


@runtime_checkable
class DraftHeadModel(Protocol):
    """A model that a draft head can draft for; its sessions are `FeatureSession`s."""

    feature_size: int  # width of the features, the hidden states that the image head reads

    def table_ids(self, tokens: Tensor) -> Tensor:
        """Map stream tokens to ids of a draft head's token table."""

    def own_head(self) -> nn.Module | None:
        """Load the draft head that comes with the model; None if there is none."""

    def adopt_head(self, head: nn.Module) -> nn.Module:
        """Adapt a loaded draft head to this model."""


@runtime_checkable
class TappedModel(DraftHeadModel, Protocol):
    """A model whose inner layers a draft head can read."""

    def tapped(self, taps: tuple[int, ...]) -> Any:
        """Return this model with sessions whose features also hold the hidden states after these numbers of layers."""

    def own_eagle3_head(self) -> nn.Module | None:
        """Load the EAGLE-3 head that comes with the model; None if there is none."""


@runtime_checkable
class VerticalHeadModel(TokenTableModel, Protocol):
    """A model that a vertical draft head can draft for; its sessions are `FeatureSession`s."""

    feature_size: int  # width of the features, the hidden states that the image head reads

    def own_vertical_head(self) -> nn.Module | None:
        """Load the vertical draft head that comes with the model; None if there is none."""
