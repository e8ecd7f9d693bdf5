"""Machine state during a measurement: cores used by other processes; clocks, power and temperature of an NVIDIA GPU."""

import functools
import os
import platform
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

BUSY_CORES = 0.25  # If the average of `taken_cores` is larger, latencies count as disturbed


class MachineMonitor:
    """Monitors the machine from construction until `read`."""

    def __init__(self, device: object = "cpu"):
        """`device`: a torch device or its name; NVIDIA GPUs are queried through NVML."""
        torch = sys.modules.get("torch")
        self._gpu = gpu_of(str(device))
        self._needed = torch.get_num_threads() if torch and str(device) == "cpu" else 1
        self._started, self._busy, self._own = time.perf_counter(), _busy_s(), time.process_time()

    def read(self) -> dict[str, Any]:
        """Return the available measurements.

        Keys: `host`; `other_cores`, average number of this process's available cores that other processes used;
        `taken_cores`, the part of `other_cores` that this process needed for its threads (one thread on a GPU). For an
        NVIDIA GPU also `gpu_mhz, gpu_w, gpu_limit_w, gpu_c, gpu_slowed` (reasons why the driver limits the clock) and
        `gpu_others`, the number of other processes that compute on the GPU.
        """
        seconds = max(time.perf_counter() - self._started, 1e-9)
        busy, ours = _busy_s(), time.process_time() - self._own
        facts: dict[str, Any] = {"host": platform.node()}
        if busy is not None and self._busy is not None:
            facts["other_cores"] = others = round(max(0.0, busy - self._busy - ours) / seconds, 2)
            facts["taken_cores"] = round(max(0.0, others - max(0, len(_cores()) - self._needed)), 2)
        if self._gpu is not None:
            facts |= _gpu_facts(self._gpu)
        return facts


@functools.cache
def cores_in_use() -> float:
    """Number of this process's available cores that other processes use now; 0 if the system does not report it."""
    monitor = MachineMonitor()
    time.sleep(0.2)
    return float(monitor.read().get("other_cores", 0.0))


def others_at_work(machine: Mapping[str, Any]) -> str | None:
    """Describe the other processes in a reading of `MachineMonitor`; None if there were none."""
    if (cores := taken_cores(machine) or 0) > BUSY_CORES:
        return f"other processes used {cores:.1f} of the needed cores"
    return next(iter(gpu_disturbances([machine])), None)


def taken_cores(machine: Mapping[str, Any]) -> float | None:
    """Return `taken_cores` of a reading of `MachineMonitor`. Older readings lack it; then return `other_cores`."""
    cores = machine.get("taken_cores", machine.get("other_cores"))
    return None if cores is None else float(cores)


def gpu_disturbances(machines: Sequence[Mapping[str, Any]]) -> list[str]:
    """Describe disturbances of a GPU in readings of `MachineMonitor`, one sentence each."""
    lines = []
    if sharing := max((int(machine.get("gpu_others") or 0) for machine in machines), default=0):
        lines.append(f"{sharing} other process{'es' * (sharing > 1)} computed on the GPU")
    if slowed := [machine["gpu_slowed"] for machine in machines if machine.get("gpu_slowed")]:
        reasons = ", ".join(sorted({str(reason) for reasons in slowed for reason in reasons}))
        lines.append(f"the driver lowered the GPU's clock ({reasons}) in {len(slowed)} of {len(machines)} readings")
    return lines


def _cores() -> set[int]:
    return os.sched_getaffinity(0) if hasattr(os, "sched_getaffinity") else set(range(os.cpu_count() or 1))


def gpu_users(device: str) -> str:
    """Describe other processes on a CUDA device and their memory; empty without such processes or without NVML."""
    if (handle := gpu_of(device)) is None:
        return ""
    import pynvml as nvml  # an extra

    try:
        others = _other_processes(nvml.nvmlDeviceGetComputeRunningProcesses(handle))
    except nvml.NVMLError:
        return ""
    return ", ".join(f"process {other.pid} has {(other.usedGpuMemory or 0) / 2**30:.1f} GiB" for other in others)


def _other_processes(processes: Sequence[Any]) -> list[Any]:
    """Remove this process from NVML's processes of a GPU. In a container the process ids are hidden; then remove the
    process with the most memory instead."""
    others = [process for process in processes if process.pid != os.getpid()]
    torch = sys.modules.get("torch")
    if len(others) == len(processes) and torch is not None and torch.cuda.is_initialized():
        return sorted(others, key=lambda process: process.usedGpuMemory or 0)[:-1]
    return others


def _busy_s() -> float | None:
    """Core-seconds in which this process's available cores were busy: neither idle nor waiting for disks."""
    try:
        fields = [line.split() for line in Path("/proc/stat").read_text().splitlines() if line.startswith("cpu")]
        cores = {f"cpu{core}" for core in _cores()}
        counts = [list(map(int, counts[:8])) for name, *counts in fields if name in cores]
        return sum(sum(count[:3]) + sum(count[5:]) for count in counts) / os.sysconf("SC_CLK_TCK") if counts else None
    except (OSError, ValueError):
        return None


@functools.cache
def gpu_of(device: str) -> Any:
    """NVML handle of a CUDA device; None for other devices or without nvidia-ml-py."""
    if not device.startswith("cuda"):
        return None
    try:
        import pynvml  # an extra
        import torch

        pynvml.nvmlInit()
        return pynvml.nvmlDeviceGetHandleByUUID(f"GPU-{torch.cuda.get_device_properties(device).uuid}")
    except Exception:  # no driver library, no permission, or no NVIDIA GPU: values are unknown
        return None


_SLOWED = {
    "nvmlClocksEventReasonSwPowerCap": "power cap",
    "nvmlClocksThrottleReasonHwSlowdown": "hardware slowdown",
    "nvmlClocksEventReasonSwThermalSlowdown": "heat",
}


def _gpu_facts(handle: Any) -> dict[str, object]:
    import pynvml as nvml  # an extra

    def ask(call: Callable[..., Any], *arguments: Any) -> Any:
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
        "gpu_others": None if processes is None else len(_other_processes(processes)),
    }
