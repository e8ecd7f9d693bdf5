"""The position-addressed KV cache: keys and values live at explicit slots of one static buffer.

A slot is overwritten before any query may attend to it, so forgetting rejected drafts costs nothing, rows may stand at
different positions, and prompts of different length need no padding.
"""

from __future__ import annotations

import torch
from torch import Tensor
from transformers.cache_utils import Cache, CacheLayerMixin


class Placement:
    """Where the next forward writes and how far it reads; one object shared by all layers.

    Attributes:
        slots: [R, T] cache slots of the tokens being fed.
        visible: slots handed to attention; the mask decides among them.
        run: the same slots as one run where all rows agree, else None.
    """

    def __init__(self) -> None:
        self.slots: Tensor
        self.visible: int
        self.run: slice | None = None


class PositionLayer(CacheLayerMixin):
    """Keys and values of one layer, [R, heads, slots, d]."""

    is_compileable = False

    def __init__(self, capacity: int, placement: Placement):
        super().__init__()
        self._capacity = capacity
        self._placement = placement

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        rows, heads, _, width = key_states.shape
        self.keys = key_states.new_zeros(rows, heads, self._capacity, width)
        self.values = value_states.new_zeros(rows, heads, self._capacity, value_states.shape[-1])
        self._rows = torch.arange(rows, device=key_states.device)[:, None]
        self.is_initialized = True

    def update(self, key_states: Tensor, value_states: Tensor, *args, **kwargs) -> tuple[Tensor, Tensor]:
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
        slots, run = self._placement.slots, self._placement.run
        if run is not None:
            self.keys[:, :, run] = key_states
            self.values[:, :, run] = value_states
        else:
            self.keys[self._rows, :, slots] = key_states.transpose(1, 2)
            self.values[self._rows, :, slots] = value_states.transpose(1, 2)
        visible = self._placement.visible
        return self.keys[:, :, :visible], self.values[:, :, :visible]

    def move(self, source: Tensor, target: Tensor) -> None:
        """Copy the entries at slots `source` [R, D] to slots `target` [R, D]."""
        for buffer in (self.keys, self.values):
            buffer[self._rows, :, target] = buffer[self._rows, :, source]

    def put(self, rows: Tensor, other: PositionLayer) -> None:
        """Copy all slots of `other`'s rows to the first slots of `rows`."""
        slots = other.keys.shape[2]
        self.keys[rows, :, :slots] = other.keys
        self.values[rows, :, :slots] = other.values

    def grow(self, slots: int) -> None:
        """Make room for `slots` more, behind the others."""
        self._capacity += slots
        self.keys = torch.nn.functional.pad(self.keys, (0, 0, 0, slots))
        self.values = torch.nn.functional.pad(self.values, (0, 0, 0, slots))

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        return self._placement.visible, 0

    def get_seq_length(self) -> int:
        return 0

    def get_max_length(self) -> int:
        return self._capacity


class PositionCache(Cache):
    """A transformers cache of `PositionLayer`s; set `placement` before every forward."""

    def __init__(self, layers: int, capacity: int):
        self.placement = Placement()
        super().__init__(layers=[PositionLayer(capacity, self.placement) for _ in range(layers)])

    def move(self, source: Tensor, target: Tensor) -> None:
        """Copy entries between slots in every layer; see `PositionLayer.move`."""
        for layer in self.layers:
            layer.move(source, target)

    def put(self, rows: Tensor, other: PositionCache) -> None:
        """Copy what `other` holds to `rows` [R'], one for each of its rows; see `PositionLayer.put`."""
        for layer, source in zip(self.layers, other.layers, strict=True):
            if source.is_initialized:
                layer.put(rows, source)

    def grow(self, slots: int) -> None:
        """Make room for `slots` more per row."""
        for layer in self.layers:
            layer.grow(slots)
