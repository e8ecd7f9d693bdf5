"""The one place where the host asks a device for numbers while a batch decodes.

A look makes a GPU finish everything queued, so a step does without: the host reasons from bounds, reads an
`AsyncHostCopy`, and looks only where it cannot go on otherwise.
"""

from __future__ import annotations

import torch
from torch import Tensor


def to_host(numbers: Tensor) -> list:
    """The numbers of a tensor as nested lists, now: the host waits for the device."""
    return numbers.tolist()


class AsyncHostCopy:
    """What the host last heard of some numbers: at once from a CPU, a little late from a GPU, which it waits for only
    the first time.
    """

    def __init__(self) -> None:
        self._heard: tuple[list[int], int] | None = None
        self._under_way: tuple[Tensor, int, torch.cuda.Event] | None = None

    def hear(self, numbers: Tensor, when: int) -> tuple[list[int], int]:
        """Send for `numbers` [n] unless others are on their way; the latest that came, and their `when`."""
        if not numbers.is_cuda or self._heard is None:
            self._heard = to_host(numbers), when
            return self._heard
        if self._under_way and self._under_way[2].query():
            arrived, sent, _ = self._under_way
            self._heard, self._under_way = (to_host(arrived), sent), None
        if self._under_way is None:
            arrived = torch.empty(numbers.shape, dtype=numbers.dtype, pin_memory=True)
            arrived.copy_(numbers, non_blocking=True)
            event = torch.cuda.Event()
            event.record()
            self._under_way = arrived, when, event
        return self._heard
