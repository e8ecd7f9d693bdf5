"""Named time spans inside one decode, measured without host syncs."""

from __future__ import annotations

import time
from contextlib import AbstractContextManager

import torch


class Spans:
    """Sums of milliseconds by name. On CUDA, events are recorded and read once, at the end."""

    def __init__(self, device: torch.device):
        self._device = device
        self._spans: dict[str, _Events | _Clock] = {}

    def __call__(self, name: str) -> AbstractContextManager[None]:
        """Time the block; blocks of different names may be nested."""
        if name not in self._spans:
            self._spans[name] = _Events(self._device) if self._device.type == "cuda" else _Clock()
        return self._spans[name]

    def totals_ms(self) -> dict[str, float]:
        """Milliseconds by span name; synchronises with the device."""
        return {name: span.total_ms() for name, span in self._spans.items()}


class _Clock(AbstractContextManager[None]):
    """Time of the host. A class, because a generator as context manager costs a microsecond more in each step."""

    def __init__(self) -> None:
        self._seconds = 0.0

    def __enter__(self) -> None:
        self._start = time.perf_counter()

    def __exit__(self, *raised: object) -> None:
        self._seconds += time.perf_counter() - self._start

    def total_ms(self) -> float:
        return self._seconds * 1e3


class _Events(AbstractContextManager[None]):
    """Time of a CUDA device."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._total_ms = 0.0
        self._pairs: list[tuple[torch.cuda.Event, torch.cuda.Event]] = []

    def __enter__(self) -> None:
        self._first = torch.cuda.Event(enable_timing=True)
        self._first.record()

    def __exit__(self, *raised: object) -> None:
        last = torch.cuda.Event(enable_timing=True)
        last.record()
        self._pairs.append((self._first, last))

    def total_ms(self) -> float:
        if self._pairs:
            torch.cuda.synchronize(self._device)
            self._total_ms += sum(first.elapsed_time(last) for first, last in self._pairs)
            self._pairs.clear()
        return self._total_ms
