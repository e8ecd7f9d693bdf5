"""Seconds that scoring an image took on this machine by metric and device, kept in the cache folder for estimates."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Mapping
from contextlib import suppress

from specbench.errors import SpecbenchError
from specbench.system.device_peaks import device_name
from specbench.system.digests import remember, remembered

_TIMES = "score-times.json"


class Stopwatch:
    """Time of scoring, shared out to the metrics by what each of them took for its features.

    It is started once the first images are read, which is when networks have been loaded.
    """

    def __init__(self, device: str):
        self._device, self._start = device, time.perf_counter()
        self._took: Counter[str] = Counter()
        self._images: Counter[str] = Counter()

    def add(self, metric: str, images: int, since: float) -> None:
        """Count images whose features a metric computed since a time of `time.perf_counter`."""
        self._took[metric] += time.perf_counter() - since
        self._images[metric] += images

    def keep(self) -> None:
        """Keep the seconds per image of every metric."""
        share = (time.perf_counter() - self._start) / max(sum(self._took.values()), 1e-9)
        here = {name: share * took / self._images[name] for name, took in self._took.items()}
        with suppress(SpecbenchError):  # a cache that cannot be written stops nobody
            remember(_TIMES, {device_name(self._device): _paces(self._device) | here})


def expected_seconds(images: Mapping[str, int], device: str) -> float | None:
    """How long scoring takes by what an image took before; None where a metric with images was never timed here.

    Args:
        images: to be scored, by metric.
    """
    paces = _paces(device)
    missing = [name for name, number in images.items() if number and name not in paces]
    return None if missing else sum(paces[name] * number for name, number in images.items() if number)


def _paces(device: str) -> dict[str, float]:
    found = remembered(_TIMES).get(device_name(device))
    return {name: pace for name, pace in found.items() if isinstance(pace, float)} if isinstance(found, dict) else {}
