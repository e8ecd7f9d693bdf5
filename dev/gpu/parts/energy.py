"""Joules per image, if the driver reports the energy."""

import time

from timing import CAPTION

from parts.claims import Outcome, claim
from parts.scales import Scale
from specbench.decoding.loop import decode
from specbench.models.catalog import find_model, load_model
from specbench.prompts import Request
from specbench.specs.presets import resolve
from specbench.system.monitor import gpu_of


def joules(device: str) -> float | None:
    """Energy that a GPU has used since its driver was loaded; None if the driver does not report it."""
    handle = gpu_of(device)
    if handle is None:
        return None
    import pynvml as nvml  # an extra

    try:
        return nvml.nvmlDeviceGetTotalEnergyConsumption(handle) / 1e3
    except nvml.NVMLError:
        return None


def energy(device: str, scale: Scale) -> Outcome:
    """Joules per image of AR and SJD on `shapes`, from the driver's counter."""
    if joules(device) is None:
        return [claim("joules per image", "the driver does not report energy")], []
    model, sampling, rows = load_model("shapes", device), find_model("shapes").sampling(), []
    for name in ("ar", "sjd"):
        decode(model, [Request(CAPTION, "gpu", 99)], resolve(name), sampling, 0)
        start, before, images = time.perf_counter(), joules(device), 0
        while time.perf_counter() < start + 10:
            decode(model, [Request(CAPTION, "gpu", images)], resolve(name), sampling, 0)
            images += 1
        rows.append({"decoder": name, "joules": (joules(device) - before) / images, "images": images})
    return [claim(f"{row['decoder']}: joules per image of shapes", f"{row['joules']:.1f}") for row in rows], rows
