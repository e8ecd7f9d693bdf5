"""Roofline inputs (model size, memory bandwidth, peak FLOP/s), stored in `run.json` under "floor"."""

from __future__ import annotations

from dataclasses import asdict

from specbench.models.facts import BYTES, ModelFacts
from specbench.system.device_peaks import find_peak


def roofline_facts(
    model: ModelFacts, guidance: float, dtype: str, device: str, threads: int
) -> dict[str, object] | None:
    """Roofline inputs of a model on a device; None if the model's size or the device's peaks are unknown.

    Returns:
        `size` (fields of `specbench.models.transformer.size.Size`), `itemsize` (bytes per number), `rows_per_image`,
        `device`, `bytes_per_s`, `flops` (per second) and the `source` of the last two.
    """
    size, peak = model.size, find_peak(device, dtype, threads)
    if size is None or peak is None:
        return None
    return {
        "size": asdict(size),
        "itemsize": BYTES[dtype],
        "rows_per_image": 1 if guidance == 1 else 2,
        "device": peak.name,
        "bytes_per_s": peak.bandwidth(size.weights * BYTES[dtype]),
        "flops": peak.flops,
        "source": peak.source,
    }
