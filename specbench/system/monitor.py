"""Machine state while an image was decoded, and warnings on disturbed latencies.

A latency is valid only on an otherwise idle machine with steady clocks. Both are measured for every image and stored in
its row, so that outliers can be explained.
"""

from __future__ import annotations

import functools
import os
import platform
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np

SLOW = 1.25
"""Minimum ratio of an outlier to the median step."""
DEVIATIONS = 10.0
"""Scaled median absolute deviations above the median for an outlier; timings are heavier-tailed than a normal."""
BUSY_CORES = 0.25
"""Cores used by other processes on average above which latencies count as disturbed."""
STEADY_CLOCK = 0.9
"""Lowest GPU clock over highest that still counts as steady."""


class MachineMonitor:
    """Monitor from construction until `read`."""

    def __init__(self, device: object = "cpu"):
        """`device`: a torch device or its name; NVIDIA GPUs are queried through NVML."""
        self._gpu = _gpu(str(device))
        self._started, self._busy, self._own = time.perf_counter(), _busy_s(), time.process_time()

    def read(self) -> dict[str, object]:
        """Return the available measurements.

        Keys: `host`; `other_cores`, cores used by other processes on average; `cpu_mhz`, mean over cores now; and of
        an NVIDIA GPU `gpu_mhz, gpu_w, gpu_limit_w, gpu_c, gpu_slowed` (why the driver holds its clock back, a list) and
        `gpu_others`, other processes computing on it.
        """
        seconds = max(time.perf_counter() - self._started, 1e-9)
        busy, own = _busy_s(), time.process_time() - self._own
        found: dict[str, object] = {"host": platform.node()}
        if busy is not None and self._busy is not None:
            found["other_cores"] = round(max(0.0, busy - self._busy - own) / seconds, 2)
        found["cpu_mhz"] = _cpu_mhz()
        if self._gpu is not None:
            found |= _gpu_facts(self._gpu)
        return found


def joules(device: object) -> float | None:
    """Energy that a GPU has used since its driver was loaded; None where the driver does not tell."""
    handle = _gpu(str(device))
    if handle is None:
        return None
    import pynvml as nvml  # an extra

    try:
        return nvml.nvmlDeviceGetTotalEnergyConsumption(handle) / 1e3
    except nvml.NVMLError:
        return None


def timing_warnings(ms_per_step: Sequence[float], machines: Sequence[dict]) -> list[str]:
    """List problems of latencies measured in these machine states, one sentence each.

    Args:
        ms_per_step: of each image, milliseconds per target forward.
        machines: of each image, what `MachineMonitor.read` found.
    """
    said = []
    steps = np.asarray(ms_per_step, dtype=float)
    slow = outliers(steps)
    if slow.any():
        times = steps[slow].max() / np.median(steps)
        worst = max((float(machines[index].get("other_cores") or 0) for index in np.flatnonzero(slow)), default=0.0)
        company = f", while other processes used up to {worst:.1f} cores" if worst > BUSY_CORES else ""
        said.append(
            f"{slow.sum()} of {len(steps)} images took up to {times:.1f} times the usual time per step{company}"
        )
    others = [float(one["other_cores"]) for one in machines if one.get("other_cores") is not None]
    if others and np.mean(others) > BUSY_CORES:
        said.append(f"other processes used {np.mean(others):.1f} cores on average")
    if sharing := max((int(one.get("gpu_others") or 0) for one in machines), default=0):
        said.append(f"{sharing} other processes computed on the GPU")
    clocks = [float(one["gpu_mhz"]) for one in machines if one.get("gpu_mhz")]
    if clocks and min(clocks) < STEADY_CLOCK * max(clocks):
        said.append(
            f"the GPU's clock moved between {min(clocks):.0f} and {max(clocks):.0f} MHz (nvidia-smi -lgc locks it)"
        )
    return said


def others_at_work(machine: Mapping[str, object]) -> str | None:
    """Other users of the machine in one reading of `MachineMonitor`, in words; None if it was idle otherwise."""
    if (cores := float(machine.get("other_cores") or 0)) > BUSY_CORES:
        return f"other processes used {cores:.1f} cores"
    if sharing := int(machine.get("gpu_others") or 0):
        return f"{sharing} other processes computed on the GPU"
    return None


def outliers(steps: np.ndarray) -> np.ndarray:
    """Upper outliers among at least 8 timings: beyond `SLOW` medians and `DEVIATIONS` deviations."""
    if len(steps) < 8:
        return np.zeros(len(steps), dtype=bool)
    median = np.median(steps)
    deviation = 1.4826 * np.median(np.abs(steps - median))
    return (steps > SLOW * median) & (steps > median + DEVIATIONS * deviation)


def _busy_s() -> float | None:
    """Core-seconds of the machine spent neither idle nor waiting for disks."""
    try:
        fields = Path("/proc/stat").read_text().split("\n", 1)[0].split()[1:]
        user, nice, system, _idle, _wait, *interrupts = map(int, fields[:8])
        return (user + nice + system + sum(interrupts)) / os.sysconf("SC_CLK_TCK")
    except (OSError, ValueError):
        return None


def _cpu_mhz() -> int | None:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
        found = [float(line.split(":")[1]) for line in lines if line.startswith("cpu MHz")]
        return round(sum(found) / len(found)) if found else None
    except (OSError, ValueError):
        return None


@functools.cache
def _gpu(device: str):
    """NVML handle of a CUDA device; None otherwise or without nvidia-ml-py."""
    if not device.startswith("cuda"):
        return None
    try:
        import pynvml  # an extra
        import torch

        pynvml.nvmlInit()
        return pynvml.nvmlDeviceGetHandleByUUID(f"GPU-{torch.cuda.get_device_properties(device).uuid}")
    except Exception:  # no library, no permission, a GPU that is not NVIDIA's: values stay unknown
        return None


_SLOWED = {
    "nvmlClocksEventReasonSwPowerCap": "power cap",
    "nvmlClocksThrottleReasonHwSlowdown": "hardware slowdown",
    "nvmlClocksEventReasonSwThermalSlowdown": "heat",
}


def _gpu_facts(handle) -> dict[str, object]:
    import pynvml as nvml  # an extra

    def ask(call, *arguments):
        try:
            return call(handle, *arguments)
        except nvml.NVMLError:
            return None

    watts, limit = ask(nvml.nvmlDeviceGetPowerUsage), ask(nvml.nvmlDeviceGetEnforcedPowerLimit)
    processes = ask(nvml.nvmlDeviceGetComputeRunningProcesses)
    reasons = ask(nvml.nvmlDeviceGetCurrentClocksThrottleReasons) or 0
    return {
        "gpu_mhz": ask(nvml.nvmlDeviceGetClockInfo, nvml.NVML_CLOCK_SM),
        "gpu_w": None if watts is None else round(watts / 1000),
        "gpu_limit_w": None if limit is None else round(limit / 1000),
        "gpu_c": ask(nvml.nvmlDeviceGetTemperature, nvml.NVML_TEMPERATURE_GPU),
        "gpu_slowed": [name for flag, name in _SLOWED.items() if reasons & getattr(nvml, flag, 0)],
        "gpu_others": None if processes is None else sum(process.pid != os.getpid() for process in processes),
    }
