"""Torch devices by name: checks that a name is valid and that this machine has the device."""

import os
import re
import sys

from specbench.errors import MISSING_PREREQUISITE, SpecbenchError

# Imports inside functions: torch, because plans on a CPU do not need it.

AUTO = "auto"
_NAME = re.compile(r"(?P<kind>cpu|mps|cuda)(:(?P<index>\d{1,3}))?")


def check_device_name(device: str) -> None:
    """Raise a SpecbenchError for an invalid name."""
    if "," in device:
        advice = "--dtype int8wo halves the model's weights; --workers and --ray load a model on each GPU"
        raise SpecbenchError(f"--device {device:.40}: a model decodes on a single device", advice)
    named = _NAME.fullmatch(device)
    if not named or (named["index"] and named["kind"] != "cuda"):
        raise SpecbenchError(f"--device {device:.40}: not a device", "valid: auto, cpu, cuda, cuda:0, cuda:1, ..., mps")


def require_device(device: str) -> None:
    """Raise a SpecbenchError for an invalid name, or with exit code 5 for a device that torch does not find."""
    check_device_name(device)
    if device == "cpu":
        return
    import torch

    kind, _, index = device.partition(":")
    if kind == "mps":
        devices = int(torch.backends.mps.is_available())
    else:
        devices = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if int(index or 0) >= devices:
        why = f": {no_gpu_reason()}" if kind == "cuda" and not devices else ""
        what = f"--device {device}: torch {torch.__version__} does not find this device{why}"
        raise SpecbenchError(what, "use --device cpu", MISSING_PREREQUISITE)


def has_gpu_driver() -> bool:
    """Return whether the system has the device files of a GPU driver."""
    return any(map(os.path.exists, ("/dev/nvidiactl", "/dev/nvidia0", "/dev/dxg", "/dev/kfd")))


def no_gpu_reason() -> str:
    """Explain why torch has no CUDA device: torch's build, or torch's message on driver and devices."""
    import torch

    if torch.version.cuda is None and torch.version.hip is None:
        return "this build of torch is for CPUs only"
    hidden = os.environ.get("CUDA_VISIBLE_DEVICES")
    try:
        torch.cuda.init()
    except (AssertionError, RuntimeError) as error:  # "... driver on your system is too old (found version 11040). ..."
        reason = str(error).partition(". ")[0].rstrip(".")
        return reason if hidden is None else f"{reason} (CUDA_VISIBLE_DEVICES={hidden})"
    return "no GPU found"


def check_decoding_device(device: str) -> None:
    """Raise a SpecbenchError for an invalid name, and for mps, on which no decoder runs."""
    check_device_name(device)
    if device == "mps":
        raise SpecbenchError("--device mps: decoding needs float64, which mps does not have", "use --device cpu")


def use_device(device: str) -> None:
    """Require a device, make a CUDA device the current one ("cuda" is "cuda:0"), and keep float32 free of TF32.

    Events, streams and allocations without a device use the current one. By default torch uses TF32 in convolutions,
    and in matrix products if an environment variable requests it.
    """
    require_device(device)
    if not device.startswith("cuda"):
        return
    import torch

    torch.set_float32_matmul_precision("highest")
    torch.backends.cudnn.allow_tf32 = False
    torch.cuda.set_device(device if ":" in device else "cuda:0")


def emulates_bfloat16(device: str) -> bool:
    """Return whether a CUDA device of this machine emulates bfloat16 in float32, like devices before Ampere."""
    if not device.startswith("cuda"):
        return False
    import torch

    index = int(device.partition(":")[2] or 0)
    if not torch.cuda.is_available() or index >= torch.cuda.device_count():
        return False
    with torch.cuda.device(index):
        return not torch.cuda.is_bf16_supported(including_emulation=False)


def best_device(float64: bool = True) -> str:
    """Name the fastest available kind of torch device: "cuda", "mps" or "cpu". `float64`: whether the work needs
    float64, as decoding does; Apple's GPUs ("mps") do not have it."""
    if sys.platform == "linux" and "torch" not in sys.modules and not has_gpu_driver():
        return "cpu"  # no need to import torch, which takes seconds
    import torch

    if torch.cuda.is_available():
        return "cuda"
    return "mps" if not float64 and torch.backends.mps.is_available() else "cpu"


def chosen_device(name: str, float64: bool = True) -> str:
    """Resolve the value of `--device`: "auto" means `best_device(float64)`, "gpu:1" means "cuda:1"."""
    name = re.sub(r"^gpu(?=:|$)", "cuda", name.casefold())
    return best_device(float64) if name == AUTO else name
