"""Where a run's numbers come from: versions, source revision, hardware. Collecting it never fails; unknown is
null."""

from __future__ import annotations

import os
import platform
import subprocess
import sys
from datetime import UTC, datetime
from importlib import metadata
from pathlib import Path

PACKAGES = ("specbench", "torch", "transformers", "numpy", "pandas", "pyarrow", "safetensors")


def now() -> str:
    """The time as UTC ISO 8601 with milliseconds."""
    return datetime.now(UTC).isoformat(timespec="milliseconds")


def collect() -> dict[str, object]:
    """Facts about this process, as stored in `run.json` for every invocation that wrote rows."""
    return {"started_at": now(), "versions": versions(), "git": git_state(), "hardware": hardware(), "load": load()}


def versions() -> dict[str, str | None]:
    found: dict[str, str | None] = {"python": platform.python_version()}
    for package in PACKAGES:
        try:
            found[package] = metadata.version(package)
        except metadata.PackageNotFoundError:
            found[package] = None
    return found


def git_state() -> dict[str, object]:
    """Revision of the checkout specbench runs from, and whether tracked files differ from it; null when
    installed."""
    here = Path(__file__).parent
    revision = _output("git", "-C", str(here), "rev-parse", "HEAD")
    tracked = _output("git", "-C", str(here), "ls-files", "--error-unmatch", Path(__file__).name)
    if revision is None or tracked is None:
        return {"revision": None, "dirty": None}
    changes = _output("git", "-C", str(here), "status", "--porcelain", "--untracked-files=no")
    return {"revision": revision, "dirty": None if changes is None else bool(changes)}


def hardware() -> dict[str, object]:
    """Processor, cores this process may use, memory, accelerators. Equal dicts mean comparable latencies."""
    return {
        "platform": f"{platform.system()} {platform.machine()}",
        "cpu": _cpu_model(),
        "cores": len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count(),
        "memory_gib": _memory_gib(),
        "gpus": _gpus(),
    }


def load() -> float | None:
    """Processes that wanted a core during the last minute: what else the machine was doing."""
    try:
        return round(os.getloadavg()[0], 1)
    except (OSError, AttributeError):
        return None


def describe(info: dict[str, object]) -> str:
    """One invocation's hardware and versions as the line printed under tables."""
    machine, found = info.get("hardware") or {}, info.get("versions") or {}
    parts = [machine.get("cpu"), f"{machine.get('cores')} cores", *(machine.get("gpus") or [])]
    parts += [f"{name} {found[name]}" for name in ("python", "torch", "transformers", "specbench") if found.get(name)]
    git = info.get("git") or {}
    if git.get("revision"):
        parts.append(f"git {str(git['revision'])[:10]}{' with changes' if git.get('dirty') else ''}")
    return ", ".join(str(part) for part in parts if part)


def _output(*command: str) -> str | None:
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=10)
    except (OSError, subprocess.SubprocessError):
        return None
    return done.stdout.strip() if done.returncode == 0 else None


def _cpu_model() -> str | None:
    try:
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                return line.split(":", 1)[1].strip()
    except OSError:
        pass
    return platform.processor() or None


def _memory_gib() -> float | None:
    try:
        return round(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30, 1)
    except (ValueError, OSError, AttributeError):
        return None


def _gpus() -> list[str]:
    torch = sys.modules.get("torch")
    if torch is None or not torch.cuda.is_available():
        return []
    return [torch.cuda.get_device_name(index) for index in range(torch.cuda.device_count())]
