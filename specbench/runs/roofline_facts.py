"""What a report needs to say how far a run is from its device's floor, noted in `run.json` when the run is made."""

from __future__ import annotations

from dataclasses import asdict

from specbench.models.catalog import Model
from specbench.models.hub_model import BYTES
from specbench.system.device_peaks import find_peak


def floor_facts(model: Model, guidance: float, dtype: str, device: str, threads: int) -> dict[str, object] | None:
    """`size` (see `specbench.models.transformer.size.Size`), `itemsize`, `rows_per_image`, `device`, `bytes_per_s`, `flops` and
    their `source`; None where the model has not been counted or the device is neither known nor measured."""
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
