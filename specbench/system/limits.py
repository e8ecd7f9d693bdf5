"""Cores, threads and memory that this process may use, limited by affinity, cgroups (containers, cluster jobs), SLURM,
and the environment variables of OpenMP and MKL."""

import os
import sys
from collections.abc import Iterator
from functools import cache
from pathlib import Path

_GROUPS, _PROCESS = Path("/sys/fs/cgroup"), Path("/proc")


def available_cores() -> int:
    """Number of CPU cores that this process may use."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    for name in ("SLURM_CPUS_PER_TASK", "SLURM_CPUS_ON_NODE"):
        if asked := whole_number(os.environ.get(name, "")):
            cores = min(cores, asked)
            break
    for group in _groups("cpu"):
        share = _words(group / "cpu.max") or _words(group / "cpu.cfs_quota_us") + _words(group / "cpu.cfs_period_us")
        if len(share) == 2 and all(map(str.isdecimal, share)):
            cores = min(cores, max(1, int(share[0]) // max(int(share[1]), 1)))
    return cores


def whole_number(text: str) -> int:
    """Parse a number of at most ten ASCII digits, which all libraries read alike; return 0 for other texts."""
    return int(text) if text.isascii() and text.isdecimal() and len(text) <= 10 else 0


def available_threads() -> int:
    """Number of cores of this process, but at most the number of threads that the environment requests."""
    return min(available_cores(), asked_threads() or sys.maxsize)


def asked_threads() -> int | None:
    """Number of threads that MKL_NUM_THREADS, or else OMP_NUM_THREADS, requests; None if neither is set. As in torch,
    the first number of OpenMP's list for nested regions counts, and OMP_THREAD_LIMIT is the maximum."""
    most = _threads_of("OMP_THREAD_LIMIT")
    asked = _threads_of("MKL_NUM_THREADS") or _threads_of("OMP_NUM_THREADS") or most
    return asked and min(asked, most or asked)


def _threads_of(variable: str) -> int | None:
    """Return the first number of a variable. If a number is not above 0, print a warning and return None."""
    if not (text := os.environ.get(variable, "").strip()):
        return None
    numbers = [number.strip().removeprefix("+") for number in text.split(",")]
    if all(0 < whole_number(number) < 2**31 for number in numbers):
        return int(numbers[0])
    _warn_ignored(f"{variable}={text:.40} is ignored: it must be a number of threads above 0, or several with commas")
    return None


@cache
def _warn_ignored(text: str) -> None:
    from specbench.system.console import warn  # brings rich

    warn(text)


def available_memory() -> int | None:
    """Bytes of main memory available to this process (the page cache counts as free); None if unknown."""
    free = [_table(_PROCESS / "meminfo").get("MemAvailable:", 0) * 1024 or pages_bytes("SC_AVPHYS_PAGES")]
    for group in _groups("memory"):
        for limit, used in (("memory.max", "memory.current"), ("memory.limit_in_bytes", "memory.usage_in_bytes")):
            if (most := _words(group / limit)) and most[0].isdecimal() and (taken := _words(group / used)):
                kept = _table(group / "memory.stat")
                cached = sum(kept.get(f"total_{name}", kept.get(name, 0)) for name in ("active_file", "inactive_file"))
                free.append(max(0, int(most[0]) - int(taken[0]) + cached))
    return min((size for size in free if size is not None), default=None)


def pages_bytes(pages: str) -> int | None:
    """Convert a page count of `os.sysconf` to bytes; None if unknown."""
    try:
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf(pages)
    except (ValueError, OSError, AttributeError):
        return None


def _groups(controller: str) -> Iterator[Path]:
    """List the folders of this process's cgroup (version 1 or 2) and of its parent cgroups."""
    for line in _text(_PROCESS / "self" / "cgroup").splitlines():
        _, _, entry = line.partition(":")
        controllers, _, path = entry.partition(":")
        if controllers and controller not in controllers.split(","):
            continue
        root = _GROUPS / controller if controllers else _GROUPS
        group = root / path.strip("/")
        yield from (group, *(parent for parent in group.parents if parent.is_relative_to(root)))


def _table(path: Path) -> dict[str, int]:
    """Read a file of lines "name number" as a dict."""
    pairs = (line.split()[:2] for line in _text(path).splitlines())
    return {pair[0]: int(pair[1]) for pair in pairs if len(pair) == 2 and pair[1].isdecimal()}


def _words(path: Path) -> list[str]:
    return _text(path).split()


def _text(path: Path) -> str:
    try:
        return path.read_text()
    except (OSError, ValueError):
        return ""
