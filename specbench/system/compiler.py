"""Whether steps are to be compiled, and whether they can be on this machine. No torch here."""

from __future__ import annotations

import os
import shutil
import sysconfig
from importlib.util import find_spec
from pathlib import Path

MODES = ("auto", "on", "off")


def should_compile(mode: str, device: str) -> tuple[bool, str | None]:
    """Whether to compile for `device`, and why not, where that was asked for.

    "auto" compiles on CUDA alone: on a CPU it takes minutes until torch has it on disk.
    """
    if mode == "off" or (mode == "auto" and not device.startswith("cuda")):
        return False, None
    reason = missing(device)
    return reason is None, f"--compile {mode}: {reason}; steps run as they are" if reason else None


def missing(device: str) -> str | None:
    """What a compiler for `device` lacks here; None if nothing."""
    kind = device.partition(":")[0]
    if kind == "mps":
        return "there is no compiler for mps"
    if kind == "cuda" and find_spec("triton") is None:
        return "the package triton is not installed"
    variable, known = ("CC", ("gcc", "clang", "cc")) if kind == "cuda" else ("CXX", ("g++", "clang++"))
    compilers = (os.environ[variable],) if os.environ.get(variable) else known
    if not any(map(shutil.which, compilers)):
        return f"no compiler ({', '.join(compilers)}) is installed"
    if not Path(sysconfig.get_path("include"), "Python.h").is_file():
        return "Python's header files are not installed (package python3-dev or alike)"
    return None
