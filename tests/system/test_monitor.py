"""Disturbances of a measurement: cores that the run needs, the same GPU, clocks that are held back."""

import os
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from specbench.runs.run_progress import machine_warnings
from specbench.system import monitor
from specbench.system.monitor import MachineMonitor, gpu_disturbances, others_at_work


@pytest.fixture
def machine(monkeypatch):
    """A machine of 8 cores, of which this process may use the first four; `machine(busy)` sets seconds of cores."""
    state = {"stat": "", "now": 0.0}
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {0, 1, 2, 3}, raising=False)
    monkeypatch.setattr(monitor.time, "perf_counter", lambda: state["now"])
    monkeypatch.setattr(monitor.time, "process_time", lambda: 0.0)
    monkeypatch.setattr(torch, "get_num_threads", lambda: 2)
    honest = Path.read_text
    monkeypatch.setattr(
        Path, "read_text", lambda path, *a, **k: state["stat"] if str(path) == "/proc/stat" else honest(path, *a, **k)
    )
    ticks = os.sysconf("SC_CLK_TCK")

    def at(now: float, *busy: float) -> None:
        lines = [f"cpu{core} {int(seconds * ticks)} 0 0 999 999 0 0 0 0 0" for core, seconds in enumerate(busy)]
        state.update(now=now, stat="\n".join(["cpu 9 9 9 9 9 9 9 9", *lines, "intr 1"]))

    return at


def reading(machine, *busy: float, device: str = "cpu") -> dict:
    machine(0.0, *[0.0] * 8)
    readings = MachineMonitor(device)
    machine(10.0, *busy)
    return readings.read()


def test_other_work_counts_if_it_takes_cores_that_the_run_needs_and_a_gpu_needs_one_core(machine):
    beside = reading(machine, 5.0, 5.0, 5.0, 0.0)
    assert beside["other_cores"] == 1.5 and beside["taken_cores"] == 0.0 and others_at_work(beside) is None
    within = reading(machine, 10.0, 10.0, 10.0, 5.0)
    assert within["taken_cores"] == 1.5 and others_at_work(within) == "other processes used 1.5 of the needed cores"
    assert reading(machine, 10.0, 10.0, 10.0, 0.0, 10.0, 10.0, 10.0, 10.0, device="cuda")["taken_cores"] == 0.0
    assert reading(machine, 10.0, 10.0, 10.0, 5.0, device="cuda")["taken_cores"] == 0.5
    assert machine_warnings([{"other_cores": 9.0, "taken_cores": 0.0}]) == []
    assert machine_warnings([{"other_cores": 2.0}]) == ["other processes took 2.0 of the cores"], "earlier readings"


def test_runs_report_a_gpu_that_was_slowed_or_shared():
    machines = [{"gpu_slowed": []}, {"gpu_slowed": ["heat"]}, {"gpu_slowed": ["power cap", "heat"], "gpu_others": 2}]
    sentences = gpu_disturbances(machines)
    clocks = "the driver lowered the GPU's clock (heat, power cap) in 2 of 3 readings"
    assert sentences == ["2 other processes computed on the GPU", clocks] and machine_warnings(machines) == sentences
    assert others_at_work(machines[1]) == "the driver lowered the GPU's clock (heat) in 1 of 1 readings"


@pytest.mark.parametrize(("pids", "cuda", "others"), [
    (["own"], True, ""), (["own", 7], True, "process 7 has 1.0 GiB"), ([4242], True, ""),
    ([4242, 7], True, "process 7 has 1.0 GiB"), ([4242], False, "process 4242 has 2.0 GiB"), ([], True, ""),
])  # fmt: skip
def test_in_a_container_a_process_does_not_take_itself_for_another(pids, cuda, others, monkeypatch):
    """If NVML reports the host's numbers (4242 is this process there), its own is not among them."""
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: cuda)
    numbers = [os.getpid() if pid == "own" else pid for pid in pids]
    memory = {os.getpid(): 2**29, 7: 2**30, 4242: 2**31}
    processes = [SimpleNamespace(pid=pid, usedGpuMemory=memory[pid]) for pid in numbers]
    nvml = SimpleNamespace(nvmlDeviceGetComputeRunningProcesses=lambda _: processes, NVMLError=OSError)
    monkeypatch.setitem(sys.modules, "pynvml", nvml)
    monkeypatch.setattr(monitor, "gpu_of", lambda _: "handle")
    assert monitor.gpu_users("cuda") == others
    assert len(monitor._other_processes(processes)) == bool(others)
