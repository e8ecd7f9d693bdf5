"""Peak memory bandwidth and FLOP/s of devices, from data sheets or measured here (roofline inputs).

The cache folder stores one measurement per device, number format and thread count.
"""

from __future__ import annotations

import re
import time
import tomllib
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from functools import cache, partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from specbench.errors import SpecbenchError, unknown_name
from specbench.names import folded
from specbench.system.digests import remember, remembered
from specbench.system.environment import hardware, now
from specbench.system.monitor import MachineMonitor, others_at_work

if TYPE_CHECKING:
    from torch import Tensor

# Imports inside functions: torch takes seconds, and known peaks do not need it.

_SHEETS = tomllib.loads(Path(__file__).with_suffix(".toml").read_text(encoding="utf-8"))
KNOWN: dict[str, tuple[float, float, float, str]] = {
    name: (sheet["gb_per_s"], sheet["half"], sheet["single"], sheet["source"]) for name, sheet in _SHEETS.items()
}
"""{name that the driver reports: (GB/s, TFLOP/s in half precision, TFLOP/s in float32, source)}."""
SHORT_NAMES = {short: name for name, sheet in _SHEETS.items() for short in sheet.get("short", ())}
"""{name without a variant: name of the fastest variant in `KNOWN`}."""
_GIVEN = re.compile(r"\s*([\d.]+)\s*([GT])B/s\s*,\s*([\d.]+)\s*([TP])FLOP/s\s*", re.IGNORECASE)
_RATES_FORM = "write bandwidth and operations per second, for example 2039GB/s,312TFLOP/s"
COPIES_MIB = (1, 4, 16, 64, 256)
COLUMNS, SIDE = (1, 2, 4, 8, 16, 32, 64, 128), 1024
"""Measured matrix products: numbers of columns, and side of the square weight matrix."""
_MEASURED = "devices.json"
_SECONDS, _CALLS, _GLIMPSE_S = 0.4, 8, 0.08  # Minimum duration and number of calls of each measurement


@dataclass(frozen=True)
class Peak:
    """Peak rates of a device in one number format."""

    name: str
    bytes_per_s: dict[int, float]  # {buffer size in bytes: bandwidth}; small buffers may be in a cache
    flops: float  # floating-point operations per second of a matrix product
    source: str  # data sheet, or date of the measurement
    # {number of columns: FLOP/s of products with weights larger than the caches}; empty if only the two peaks are known
    products: dict[int, float] = field(default_factory=dict)

    def bandwidth(self, size: float) -> float:
        """Return the bytes per second of repeated reads of `size` bytes: the rate of the largest copy up to `size`."""
        fitting = [copied for copied in self.bytes_per_s if copied <= size]
        return self.bytes_per_s[max(fitting, default=min(self.bytes_per_s))]


def find_peak(device: str, dtype: str, threads: int) -> Peak | None:
    """Look up the peak of a device such as "cpu" or "cuda:0"; None if it is neither in `KNOWN` nor measured."""
    name = device_name(device)
    if name in KNOWN:
        return known_peak(name, dtype)
    if not (kept := remembered(_MEASURED).get(_key(device, dtype, threads))):
        return None
    parts = (kept.get(part, {}) for part in ("bytes_per_s", "products"))
    copies, products = ({int(number): rate for number, rate in part.items()} for part in parts)
    return Peak(name, copies, kept["flops"], kept["source"], products)


def known_peak(name: str, dtype: str) -> Peak:
    """Return the peak of a device in `KNOWN`, from its data sheet."""
    bandwidth, half, single, source = KNOWN[name]
    return Peak(name, {0: bandwidth * 1e9}, (single if dtype == "float32" else half) * 1e12, source)


def peak_of(text: str, dtype: str, threads: int = 0) -> Peak:
    """Return the peak of the device that `text` describes: a name in `KNOWN` or `SHORT_NAMES`, "2039GB/s,312TFLOP/s",
    or a device of this machine such as "cpu" or "cuda:0"."""
    text = text.strip()
    if match := _GIVEN.fullmatch(text):
        try:
            bandwidth = float(match[1]) * (1000 if match[2] in "tT" else 1)
            flops = float(match[3]) * (1000 if match[4] in "pP" else 1)
        except ValueError:
            bandwidth = flops = 0.0
        if not (bandwidth and flops):
            raise SpecbenchError(f"--on {text}: two rates above 0 are needed", _RATES_FORM)
        return Peak(f"{bandwidth:g} GB/s, {flops:g} TFLOP/s", {0: bandwidth * 1e9}, flops * 1e12, "given")
    if text == "cpu" or re.fullmatch(r"cuda(:\d+)?", text):
        if (peak := find_peak(text, dtype, threads)) is None:
            what = f"--on {text}: bandwidth and FLOP/s in {dtype} are unknown"
            raise SpecbenchError(what, "measure them: specbench doctor --measure")
        return peak
    names = {_folded(name): name for name in KNOWN} | {_folded(name): full for name, full in SHORT_NAMES.items()}
    if _folded(text) not in names:
        if re.match(r"[\d.]+\s*[GTP](B|FLOP)", text, re.IGNORECASE):
            raise SpecbenchError(f"--on {text}: not a known device, and not two rates", _RATES_FORM)
        raise unknown_name("device", text, [*SHORT_NAMES, *KNOWN, "cpu", "2039GB/s,312TFLOP/s"])
    return known_peak(names[_folded(text)], dtype)


def _folded(name: str) -> str:
    """Normalise a device's name: remove maker, series, case, and separators between words."""
    return re.sub("nvidia|geforce|rtx", "", folded(name))


def measure_peak(device: str, dtype: str, threads: int) -> Peak:
    """Time copies of several sizes and matrix products. Store the fastest of each, unless other processes used the
    machine during the measurement. `threads`: number of threads on a CPU."""
    import torch

    before, monitor = torch.get_num_threads(), MachineMonitor(device)
    if device == "cpu":
        torch.set_num_threads(threads)
    try:
        bytes_per_s, flops = _measure(device, getattr(torch, dtype))
        products = measure_products(device, getattr(torch, dtype))
    finally:
        torch.set_num_threads(before)
    if company := others_at_work(monitor.read()):
        raise SpecbenchError(f"the measurement was discarded, because {company}", "measure again on an idle machine")
    peak = Peak(device_name(device), bytes_per_s, flops, f"measured {now()[:10]}", products)
    remember(_MEASURED, {_key(device, dtype, threads): asdict(peak)})
    return peak


@cache
def glimpse_peak(device: str, dtype: str, threads: int) -> tuple[Peak, bool]:
    """Measure the peak of a device for half a second, once per process. Return the peak and whether the machine was
    idle; nothing is stored. `threads`: threads of a CPU; 0: torch's number."""
    import torch

    before, monitor = torch.get_num_threads(), MachineMonitor(device)
    torch.set_num_threads(threads or before)
    bytes_per_s, flops = _measure(device, getattr(torch, dtype), _GLIMPSE_S)
    torch.set_num_threads(before)
    peak = Peak(device_name(device), bytes_per_s, flops, f"measured briefly {now()[:10]}")
    return peak, not others_at_work(monitor.read())


def device_name(device: str) -> str:
    """Name of the device as reported by its driver."""
    if device == "cpu":
        return str(hardware()["cpu"])
    import torch

    return torch.cuda.get_device_name(device) if torch.cuda.is_available() else device


def _measure(device: str, dtype: Any, seconds: float = _SECONDS) -> tuple[dict[int, float], float]:
    """Measure bytes/s of copies of several sizes and FLOP/s of a matrix product, each for `seconds`."""
    import torch

    speeds = {}
    for mib in COPIES_MIB:
        source = torch.ones(mib * 2**20, dtype=torch.uint8, device=device)
        target = torch.empty_like(source)
        speeds[mib * 2**20] = 2 * len(source) / _best(partial(target.copy_, source), device, seconds)
    side = 8192 if device.startswith("cuda") else 1024
    matrix = torch.ones(side, side, dtype=dtype, device=device)
    product = torch.empty_like(matrix)
    return speeds, 2 * side**3 / _best(lambda: torch.mm(matrix, matrix, out=product), device, seconds)


def measure_products(device: str, dtype: Any) -> dict[int, float]:
    """Measure the FLOP/s of square matrices times each number of `COLUMNS`. Like a model's weights, the matrices are
    read in sequence; together they are as large as the largest copy."""
    import torch

    from specbench.system.matrix_products import product  # imports torch

    count = max(1, COPIES_MIB[-1] * 2**20 // (SIDE * SIDE * dtype.itemsize))
    weights = [torch.ones(SIDE, SIDE, dtype=dtype, device=device) for _ in range(count)]

    def read_all(hidden: Tensor) -> None:
        for matrix in weights:
            product(hidden, matrix)

    inputs = {wide: torch.ones(wide, 1, SIDE, dtype=dtype, device=device) for wide in COLUMNS}
    products = 2 * SIDE**2 * count
    return {wide: wide * products / _best(partial(read_all, hidden), device) for wide, hidden in inputs.items()}


def _best(call: Callable[[], object], device: str, seconds: float = _SECONDS) -> float:
    """Time `call` repeatedly. Return the seconds of the fastest call."""
    import torch

    best, calls, end = float("inf"), 0, time.perf_counter() + seconds
    while (calls < _CALLS and seconds == _SECONDS) or time.perf_counter() < end:
        start = time.perf_counter()
        call()
        if device.startswith("cuda"):
            torch.cuda.synchronize(device)
        best, calls = min(best, time.perf_counter() - start), calls + 1
    return best


def _key(device: str, dtype: str, threads: int) -> str:
    """Key of a device's measurements in the cache."""
    name = f"{device_name(device)}, {dtype}"
    return f"{name}, {threads} threads" if device == "cpu" and threads else name
