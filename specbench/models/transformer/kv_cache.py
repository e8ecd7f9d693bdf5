"""Position-addressed KV cache: keys and values at explicit slots of one static buffer.

A slot is overwritten before any query may attend to it. Rejected drafts therefore need no rollback, rows may be at
different positions, and prompts of different length need no padding.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from transformers.cache_utils import Cache, CacheLayerMixin

from specbench.models.transformer.host_sync import AsyncHostCopy

PARTS = 4  # Number of equal parts of a cache; attention reads the first parts, up to the last filled slot


def whole_parts(end: int, capacity: int) -> int:
    """Round the slots 0 to `end` up to whole parts of a cache, at most `capacity`."""
    part = capacity // PARTS
    return min(-(-end // part) * part, capacity)


class Placement:
    """Cache slots that the next forward writes, `slots` [R, T], and number `visible` of slots that attention may read.
    `run`: `slots` as a slice if all rows have the same consecutive slots, else None. Shared by all layers."""

    def __init__(self) -> None:
        self.slots: Tensor
        self.visible: int
        self.run: slice | None = None


class PositionLayer(CacheLayerMixin):
    """Keys and values of one layer, [R, heads, slots, d]."""

    is_compileable = False
    keys: Tensor
    values: Tensor

    def __init__(self, capacity: int, placement: Placement, keys: Tensor | None = None, values: Tensor | None = None):
        """`keys` and `values`: existing buffers, if any."""
        super().__init__()
        self._capacity = capacity
        self._placement = placement
        if keys is not None and values is not None:
            self.keys, self.values = keys, values
            self._rows = torch.arange(len(keys), device=keys.device)[:, None]
            self.is_initialized = True

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        rows, heads, _, width = key_states.shape
        self._hold(
            key_states.new_zeros(rows, heads, self._capacity, width),
            value_states.new_zeros(rows, heads, self._capacity, value_states.shape[-1]),
        )
        self._rows = torch.arange(rows, device=key_states.device)[:, None]
        self.is_initialized = True

    def _hold(self, keys: Tensor, values: Tensor) -> None:
        self.keys, self.values = keys, values
        for buffer in (keys, values):
            # CUDA graphs write to a fixed address.
            torch._dynamo.mark_static_address(buffer, guard=False)

    def update(self, key_states: Tensor, value_states: Tensor, *_: Any, **__: Any) -> tuple[Tensor, Tensor]:
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
        slots, run = self._placement.slots.to(key_states.device), self._placement.run
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
        source, target = source.to(self.keys.device), target.to(self.keys.device)
        for buffer in (self.keys, self.values):
            buffer[self._rows, :, target] = buffer[self._rows, :, source]

    def put(self, rows: Tensor, other: PositionLayer) -> None:
        """Copy all slots of `other`'s rows to the first slots of `rows`."""
        slots = other.keys.shape[2]
        self.keys[rows, :, :slots] = other.keys
        self.values[rows, :, :slots] = other.values

    def grow(self, slots: int) -> None:
        self._capacity += slots
        self._hold(*(torch.nn.functional.pad(buffer, (0, 0, 0, slots)) for buffer in (self.keys, self.values)))

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        return self._placement.visible, 0

    def get_seq_length(self) -> int:
        return 0

    def get_max_length(self) -> int:
        return self._capacity

    get_max_cache_shape = get_max_length  # transformers before 5.13 requires the method under this name


class CacheExtent:
    """Upper bound on the cache slots that a forward uses, known on the host without a sync. A forward moves a row
    by at most the number of its columns, so an earlier host copy gives an upper bound."""

    def __init__(self) -> None:
        self._copy = AsyncHostCopy()
        self._columns = 0

    def of(self, starts: Tensor, columns: int) -> tuple[int, int | None]:
        """Return an upper bound on the next forward's last cache slot + 1, and the slot at which all rows start if they
        are known to start at the same slot, else None. `starts` [R]: each row's first slot."""
        slots, when = self._copy.latest(starts, self._columns)
        first, last = min(slots), max(slots)
        since = self._columns - when
        self._columns += columns
        return last + since + columns, first if first == last and not since else None


class PositionCache(Cache):
    """A cache of `PositionLayer`s; call `place` before every forward. `buffers`: existing keys and values."""

    def __init__(self, layers: int, capacity: int, buffers: Sequence[tuple[Tensor, Tensor]] = ()):
        self.placement = Placement()
        self._held: dict[str, Tensor] = {}
        pairs = buffers or [(None, None)] * layers
        super().__init__(layers=[PositionLayer(capacity, self.placement, *pair) for pair in pairs])

    def place(self, slots: Tensor, visible: int, run: slice | None = None) -> None:
        """Set the slots that the next forward writes and reads; see `Placement`."""
        self.placement.slots, self.placement.visible, self.placement.run = slots, visible, run

    @property
    def is_ready(self) -> bool:
        """True if the cache's buffers exist; the prefill or the first forward creates them."""
        return self.layers[0].is_initialized

    def fits(self, rows: int, slots: int, device: torch.device, dtype: torch.dtype) -> bool:
        """Return whether the cache's buffers exist and have these sizes."""
        if not self.is_ready:
            return False
        keys = self.layers[0].keys
        return (keys.shape[0], keys.shape[2], keys.device, keys.dtype) == (rows, slots, device, dtype)

    def clear(self) -> None:
        """Set every entry to zero: a NaN that an earlier image left would spread even from a masked slot."""
        for keys, values in self.buffers():
            keys.zero_()
            values.zero_()

    def buffers(self) -> list[tuple[Tensor, Tensor]]:
        """Return keys and values of every layer, which exist after the first forward."""
        return [(layer.keys, layer.values) for layer in self.layers]

    def hold(self, name: str, value: Tensor) -> Tensor:
        """Copy a tensor of the session to the address of an earlier tensor `name` of equal shape, if any. A tensor at a
        new address would be copied for each replay of a graph."""
        buffer = self._held.get(name)
        if buffer is None or (buffer.shape, buffer.dtype, buffer.device) != (value.shape, value.dtype, value.device):
            buffer = self._held[name] = value.clone()
            torch._dynamo.mark_static_address(buffer, guard=False)
        return buffer.copy_(value)

    def move(self, source: Tensor, target: Tensor) -> None:
        for layer in self.layers:
            layer.move(source, target)

    def put(self, rows: Tensor, other: PositionCache) -> None:
        for layer, source in zip(self.layers, other.layers, strict=True):
            if source.is_initialized:
                layer.put(rows, source)

    def grow(self, slots: int) -> None:
        for layer in self.layers:
            layer.grow(slots)
