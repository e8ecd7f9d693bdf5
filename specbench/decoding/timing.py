"""Named time spans inside one decode, measured without host syncs."""

from __future__ import annotations

import time
from collections import defaultdict
from contextlib import contextmanager

import torch


class Spans:
    """Sums of milliseconds by name. On CUDA, events are recorded and read once, at the end."""

    def __init__(self, device: torch.device):
        self._cuda = device.type == "cuda"
        self._totals: dict[str, float] = defaultdict(float)
        self._events: list[tuple[str, torch.cuda.Event, torch.cuda.Event]] = []

    @contextmanager
    def __call__(self, name: str):
        if self._cuda:
            first, last = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
            first.record()
            yield
            last.record()
            self._events.append((name, first, last))
        else:
            start = time.perf_counter()
            yield
            self._totals[name] += (time.perf_counter() - start) * 1e3

    def totals_ms(self) -> dict[str, float]:
        """Milliseconds by span name; synchronises with the device."""
        if self._events:
            torch.cuda.synchronize()
            for name, first, last in self._events:
                self._totals[name] += first.elapsed_time(last)
            self._events.clear()
        return dict(self._totals)
