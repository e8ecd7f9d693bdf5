"""Host syncs: the one place where the host reads numbers from the device while a batch is decoded.

A sync makes the host wait for everything that is queued on a GPU. Steps avoid it: the host works with bounds, or with
an `AsyncHostCopy`, and syncs only where neither suffices.
"""

from __future__ import annotations

import torch
from torch import Tensor


def to_host(numbers: Tensor) -> list:
    """The numbers of a tensor as nested lists. A host sync."""
    return numbers.tolist()


class AsyncHostCopy:
    """The latest host copy of a tensor that changes: current on a CPU; some steps old on a GPU, where only the first
    one is a sync.
    """

    def __init__(self) -> None:
        self._latest: tuple[list[int], int] | None = None
        self._pending: tuple[Tensor, int, torch.cuda.Event] | None = None

    def latest(self, numbers: Tensor, when: int) -> tuple[list[int], int]:
        """Start a copy of `numbers` [n] unless one is pending; returns the latest complete copy and its `when`."""
        if not numbers.is_cuda or self._latest is None:
            self._latest = to_host(numbers), when
            return self._latest
        if self._pending and self._pending[2].query():
            copy, sent, _ = self._pending
            self._latest, self._pending = (to_host(copy), sent), None
        if self._pending is None:
            copy = torch.empty(numbers.shape, dtype=numbers.dtype, pin_memory=True)
            copy.copy_(numbers, non_blocking=True)
            event = torch.cuda.Event()
            event.record()
            self._pending = copy, when, event
        return self._latest
