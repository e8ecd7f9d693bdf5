"""Provenance of a run: package versions, git revision, hardware. Never fails; unknown values are null."""

import json
import os
import platform
import re
import subprocess
import sys
from collections.abc import Iterable, Mapping
from contextlib import suppress
from datetime import UTC, datetime
from functools import cache
from importlib import metadata
from pathlib import Path
from typing import Any

from specbench.system.limits import available_cores, pages_bytes
from specbench.system.version import __version__

BUILD_RECORD = Path(__file__).with_name("build.json")
"""File that `dev/release/build_hook.py` adds to wheels and source distributions; absent in a checkout."""
DISTRIBUTION = "specbench-image"  # Name for pip; `specbench` on the package index is another project


def now() -> str:
    """Current time as UTC ISO 8601 with milliseconds."""
    return datetime.now(UTC).isoformat(timespec="milliseconds")


def environment_facts() -> dict[str, object]:
    """Facts about this process, as stored in `run.json` for every invocation that wrote rows."""
    return {
        "started_at": now(),
        "versions": versions(),
        "git": git_state(),
        "hardware": hardware(),
        "load": load_average(),
    }


def versions() -> dict[str, str | None]:
    # The metadata of an editable installation contain the version of the day of its installation.
    present: dict[str, str | None] = {"python": platform.python_version(), "specbench": __version__}
    for package in ("torch", "transformers", "numpy", "pandas", "pyarrow", "safetensors", "torchao"):
        try:
            present[package] = metadata.version(package)
        except metadata.PackageNotFoundError:
            present[package] = None
    return present


def requirements() -> list[str]:
    """List the declared requirements of the package and its extras; empty if the package is not installed."""
    for name in (DISTRIBUTION, "specbench"):  # the second name: checkouts installed before 0.4.0
        with suppress(metadata.PackageNotFoundError):
            return metadata.requires(name) or []
    return []


def git_state() -> dict[str, object]:
    """Git revision of the running checkout, or of the checkout from which the installed package was built.

    `dirty`: whether tracked files were modified. Both are null if unknown.
    """
    if state := checkout_state():
        return state
    try:
        state = json.loads(BUILD_RECORD.read_text())
        return {"revision": state["revision"], "dirty": state["dirty"]}
    except (OSError, ValueError, LookupError, TypeError):
        return {"revision": None, "dirty": None}


def checkout_state() -> dict[str, object] | None:
    """Git revision of the checkout that tracks this file; None outside of a checkout."""
    here = Path(__file__).parent
    revision = _output("git", "-C", str(here), "rev-parse", "HEAD")
    tracked = _output("git", "-C", str(here), "ls-files", "--error-unmatch", Path(__file__).name)
    if revision is None or tracked is None:
        return None
    changes = _output("git", "-C", str(here), "status", "--porcelain", "--untracked-files=no")
    return {"revision": revision, "dirty": None if changes is None else bool(changes)}


def hardware() -> dict[str, object]:
    """Return CPU model, cores available to this process, memory and GPUs; with a GPU also CUDA, driver, and whether
    TF32 is used."""
    torch: Any = sys.modules.get("torch")
    memory = pages_bytes("SC_PHYS_PAGES")
    gpus = torch.cuda.device_count() if torch and torch.cuda.is_available() else 0
    return {
        "platform": f"{platform.system()} {platform.machine()}",
        "cpu": _cpu_model(),
        "cores": available_cores(),
        "memory_gib": None if memory is None else round(memory / 2**30, 1),
        "gpus": [torch.cuda.get_device_name(index) for index in range(gpus)],
        **(_cuda_facts(torch) if gpus else {}),
    }


def _cuda_facts(torch: Any) -> dict[str, object]:
    tf32 = torch.backends.cudnn.allow_tf32 or torch.backends.cuda.matmul.allow_tf32
    try:
        driver = re.search(r"Module\S*(?: for \S+)?\s+(\d[\d.]+)", Path("/proc/driver/nvidia/version").read_text())
    except OSError:
        driver = None
    return {"tf32": tf32, "cuda": torch.version.cuda, "driver": driver and driver[1]}


def load_average() -> float | None:
    """Load average of the last minute: mean number of runnable processes."""
    try:
        return round(os.getloadavg()[0], 1)
    except OSError:
        return None


def core_count(cores: object) -> str:
    """The number of cores in words: "1 core", "8 cores"."""
    return f"{cores} core" if cores == 1 else f"{cores} cores"


def describe_machine(hardware: Mapping[str, Any], versions: Mapping[str, Any], git: Mapping[str, Any]) -> str:
    """Format hardware and versions as the line printed under tables."""
    cores = hardware.get("cores")
    parts = [hardware.get("cpu"), cores and core_count(cores), *(hardware.get("gpus") or [])]
    shown = ("python", "torch", "transformers", "specbench")
    parts += [*_named(versions, shown), _commit(git)]
    return ", ".join(str(part) for part in parts if part)


def describe_installation() -> str:
    """Format version, commit and main packages of this installation as the line of `specbench --version`."""
    present = versions()
    packages = _named(present, ("python", "torch", "transformers"))
    return ", ".join(part for part in [*_named(present, ("specbench",)), _commit(git_state()), *packages] if part)


def _named(versions: Mapping[str, Any], names: Iterable[str]) -> list[str]:
    return [f"{name} {versions[name]}" for name in names if versions.get(name)]


def _commit(git: Mapping[str, Any]) -> str | None:
    if not git.get("revision"):
        return None
    return f"git {str(git['revision'])[:10]}{' with changes' if git.get('dirty') else ''}"


def _output(*command: str) -> str | None:
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=10)
    except (OSError, subprocess.SubprocessError):
        return None
    return done.stdout.strip() if done.returncode == 0 else None


def _cpu_model() -> str | None:
    """Name of the processor. On ARM, Linux reports it only through lscpu, and Python on a Mac only as "arm"."""
    try:
        name = _model_name(Path("/proc/cpuinfo").read_text())
    except OSError:
        name = None
    name = name or _model_name(_output("lscpu") or "") or _output("sysctl", "-n", "machdep.cpu.brand_string")
    return name or platform.processor() or platform.machine() or None


@cache
def cpu_features() -> str:
    """Describe the processor features on which compiled code depends: name, and on Linux the instruction sets."""
    try:
        table = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        table = []
    known = (line for line in table if line.lower().startswith(("flags", "features")))
    return f"{_cpu_model()} {next(known, '')}"


def _model_name(table: str) -> str | None:
    lines = (line.partition(":") for line in table.splitlines() if line.lower().startswith("model name"))
    return next((name.strip() for _, _, name in lines if name.strip() != "-"), None)
