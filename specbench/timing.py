"""Small stop-watches on the host clock, for measurements outside the decode loop."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable


def median_ms(call: Callable[[], object], repeats: int = 5, warmups: int = 1) -> float:
    """Median wall-clock milliseconds of `call`, which must wait for its own device work."""
    for _ in range(warmups):
        call()
    spans = []
    for _ in range(repeats):
        start = time.perf_counter()
        call()
        spans.append(1e3 * (time.perf_counter() - start))
    return statistics.median(spans)
