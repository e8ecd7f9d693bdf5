"""Torch devices by name: which names are valid, which of them this machine has."""

from __future__ import annotations

import re

from specbench.errors import MISSING_PREREQUISITE, SpecbenchError

# Imports inside functions: torch, not for plans on a CPU, which do without.

_NAME = re.compile(r"(?P<kind>cpu|mps|cuda)(:(?P<index>\d{1,3}))?")


def check_device_name(device: str) -> None:
    """Raise a SpecbenchError for a name that no machine has."""
    named = _NAME.fullmatch(device)
    if not named or (named["index"] and named["kind"] != "cuda"):
        raise SpecbenchError(f"--device {device:.40}: not a device", "valid: cpu, cuda, cuda:0, cuda:1, ..., mps")


def require_device(device: str) -> None:
    """Raise a SpecbenchError for an invalid name, with exit code 5 for a device that torch does not find."""
    check_device_name(device)
    if device == "cpu":
        return
    import torch

    kind, _, index = device.partition(":")
    if kind == "mps":
        found = int(torch.backends.mps.is_available())
    else:
        found = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if int(index or 0) >= found:
        raise SpecbenchError(
            f"--device {device}: torch {torch.__version__} finds no such device", "use --device cpu",
            MISSING_PREREQUISITE,
        )  # fmt: skip


def best_device() -> str:
    """Name the fastest kind of torch device available: "cuda", "mps" or "cpu"."""
    import torch

    if torch.cuda.is_available():
        return "cuda"
    return "mps" if torch.backends.mps.is_available() else "cpu"
