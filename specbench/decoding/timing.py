"""Named time spans inside one decode, measured without host syncs."""

import time
from collections import deque
from contextlib import AbstractContextManager

import torch


class Spans:
    """Sums of milliseconds by name. On CUDA, events are recorded, and read when the device has passed them."""

    def __init__(self, device: torch.device):
        self._device = device
        self._spans: dict[str, _Events | _Clock] = {}

    def __call__(self, name: str) -> AbstractContextManager[None]:
        """Time the block; blocks of different names may be nested."""
        if name not in self._spans:
            self._spans[name] = _Events(self._device) if self._device.type == "cuda" else _Clock()
        return self._spans[name]

    def totals_ms(self) -> dict[str, float]:
        """Return milliseconds by span name. Synchronises with the device."""
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
        self._pairs: deque[tuple[torch.cuda.Event, torch.cuda.Event]] = deque()
        self._spare: list[torch.cuda.Event] = []

    def __enter__(self) -> None:
        self._first = self._recorded()

    def __exit__(self, *raised: object) -> None:
        self._pairs.append((self._first, self._recorded()))
        self._read()

    def _recorded(self) -> torch.cuda.Event:
        """Record an event now. Events are reused, because an image has thousands of them."""
        event = self._spare.pop() if self._spare else torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def _read(self) -> None:
        """Add the spans that the device has passed."""
        while self._pairs and self._pairs[0][1].query():
            pair = self._pairs.popleft()
            self._total_ms += pair[0].elapsed_time(pair[1])
            self._spare += pair

    def total_ms(self) -> float:
        if self._pairs:
            torch.cuda.synchronize(self._device)
            self._read()
        return self._total_ms
