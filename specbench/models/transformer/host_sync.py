"""Device-to-host synchronisation (host sync): all reads of device numbers by the host while a batch is decoded.

In a sync the host waits for all work queued on a GPU. Decode steps use bounds or the copies below instead.
"""

from typing import Any

import torch
from torch import Tensor

_Copy = tuple[Tensor, Any, torch.cuda.Event]
"""A pending copy, the `when` of its start, and the event that marks its completion."""


def to_host(numbers: Tensor) -> list[Any]:
    """Copy a tensor to nested lists; a host sync."""
    return numbers.tolist()


class AsyncHostCopy:
    """Latest host copy of a changing tensor: current on a CPU, perhaps old on a GPU. Only the first copy waits."""

    def __init__(self, latest: tuple[list[int], Any] | None = None):
        """`latest`: numbers and their `when`, if the host knows them already."""
        self._latest = latest
        self._pending: _Copy | None = None

    def latest(self, numbers: Tensor, when: float) -> tuple[list[int], Any]:
        """Start a copy of `numbers` [n] unless a copy is pending. Return the latest complete copy and its `when`."""
        if not numbers.is_cuda or self._latest is None:
            self._latest = to_host(numbers), when
            return self._latest
        if self._pending and self._pending[2].query():
            copy, sent, _ = self._pending
            self._latest, self._pending = (to_host(copy), sent), None
        if self._pending is None:
            self._pending = _started(numbers, when)
        return self._latest


class LaggingHostCopy:
    """Host copy of a changing tensor. On a CPU it is current. On a GPU it is the copy that the previous call started,
    so the device still has a step to work on while the host waits."""

    def __init__(self) -> None:
        self._pending: _Copy | None = None

    def take(self, numbers: Tensor, when: int) -> tuple[list[int], int] | None:
        """Start a copy of `numbers` [n]; return numbers and `when` of the previous call, if any (CPU: of this call)."""
        if not numbers.is_cuda:
            return to_host(numbers), when
        before, self._pending = self._pending, _started(numbers, when)
        if before is None:
            return None
        copy, sent, event = before
        event.synchronize()
        return to_host(copy), sent


def _started(numbers: Tensor, when: float) -> _Copy:
    copy = torch.empty(numbers.shape, dtype=numbers.dtype, pin_memory=True)
    copy.copy_(numbers, non_blocking=True)
    event = torch.cuda.Event()
    event.record()
    return copy, when, event
