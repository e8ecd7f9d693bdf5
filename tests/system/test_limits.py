"""Cores and memory that a process may use: cgroups of both versions, SLURM's allocation, the page cache."""

import os

import pytest

from specbench.system import limits

GIB = 2**30


@pytest.fixture
def machine(tmp_path, monkeypatch):
    """Write files of a machine of 8 cores with 64 GiB available; the process is in the group /job of cgroup v2."""
    groups, process = tmp_path / "cgroup", tmp_path / "proc"
    monkeypatch.setattr(limits, "_GROUPS", groups)
    monkeypatch.setattr(limits, "_PROCESS", process)
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(8)), raising=False)
    for name in ("SLURM_CPUS_PER_TASK", "SLURM_CPUS_ON_NODE"):
        monkeypatch.delenv(name, raising=False)

    def write(content: dict[str, str]) -> None:
        for name, text in content.items():
            path = (process if name in ("meminfo", "self/cgroup") else groups) / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text)

    write({"meminfo": f"MemFree: 1024 kB\nMemAvailable: {64 * 2**20} kB\n", "self/cgroup": "0::/job\n"})
    return write


def test_a_cgroup_limits_memory_and_cores_and_so_does_the_one_around_it(machine):
    assert limits.available_memory() == 64 * GIB and limits.available_cores() == 8, "the page cache counts as free"
    stat = f"anon 5\nactive_file {GIB}\ninactive_file {GIB}\n"
    machine({"job/memory.max": f"{16 * GIB}\n", "job/memory.current": f"{6 * GIB}\n", "job/memory.stat": stat})
    machine({"job/cpu.max": "max 100000\n", "cpu.max": "350000 100000\n"})
    assert limits.available_memory() == 12 * GIB and limits.available_cores() == 3
    machine({"memory.max": f"{4 * GIB}\n", "memory.current": f"{5 * GIB}\n", "job/cpu.max": "50000 100000\n"})
    assert limits.available_memory() == 0 and limits.available_cores() == 1
    machine({"memory.max": "max\n", "job/memory.max": "max\n"})
    assert limits.available_memory() == 64 * GIB


def test_the_older_version_of_cgroups_also_limits_and_a_system_without_them_has_an_answer(
    machine, monkeypatch, tmp_path
):
    machine({"self/cgroup": "7:cpu,cpuacct:/box\n4:memory:/box\n0::/\n"})
    machine({"cpu/box/cpu.cfs_quota_us": "200000\n", "cpu/box/cpu.cfs_period_us": "100000\n"})
    machine({"memory/box/memory.limit_in_bytes": f"{8 * GIB}\n", "memory/box/memory.usage_in_bytes": f"{3 * GIB}\n"})
    machine({"memory/box/memory.stat": f"total_inactive_file {GIB}\ninactive_file 7\n"})
    assert limits.available_memory() == 6 * GIB and limits.available_cores() == 2
    machine({"cpu/box/cpu.cfs_quota_us": "-1\n"})
    assert limits.available_cores() == 8
    monkeypatch.setattr(limits, "_PROCESS", tmp_path / "nowhere")
    assert limits.available_cores() == 8 and (limits.available_memory() or 1) > 0


def test_slurm_allocates_cores_to_a_task(machine, monkeypatch):
    for nonsense in ("٣", "9" * 5000):
        monkeypatch.setenv("SLURM_CPUS_PER_TASK", nonsense)
        assert limits.available_cores() == 8
    monkeypatch.setenv("SLURM_CPUS_ON_NODE", "6")
    assert limits.available_cores() == 6
    monkeypatch.setenv("SLURM_CPUS_PER_TASK", "2")
    assert limits.available_cores() == 2
