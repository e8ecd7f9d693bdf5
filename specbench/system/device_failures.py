"""Device failures as one-line errors: out of memory, and errors after which the device cannot compute."""

import gc
from collections.abc import Iterator
from contextlib import contextmanager

from specbench.errors import FAILURE, SpecbenchError
from specbench.system.console import one_line
from specbench.system.monitor import gpu_users

# Imports inside functions: torch, because many commands do not need it.

_NO_MEMORY = ("out of memory", "can't allocate memory", "ALLOC_FAILED")


def release_memory() -> None:
    """Free the memory of unreferenced objects, such as a deleted model and its compiled steps."""
    import torch

    gc.collect()
    if torch.cuda.is_initialized():
        torch.cuda.empty_cache()


def is_out_of_memory(error: BaseException) -> bool:
    """Return whether an error is a failed allocation, on a GPU or in main memory."""
    return isinstance(error, MemoryError) or any(text in str(error) for text in _NO_MEMORY)


def out_of_memory(what: str, device: object, error: BaseException, advice: str) -> SpecbenchError:
    """Make the error for a failed allocation: the object that did not fit, the device's processes, and a remedy."""
    others = f"; {users}" if (users := gpu_users(str(device))) else ""
    reason = one_line(str(error), 200).partition(". GPU ")[0] or type(error).__name__
    return SpecbenchError(f"{what} does not fit into the memory of {device}: {reason}{others}", advice, FAILURE)


@contextmanager
def memory_for(what: str, device: object, advice: str) -> Iterator[None]:
    """Raise a SpecbenchError if an allocation in the block fails."""
    try:
        yield
    except SpecbenchError:  # PluginError, which already names the plug-in
        raise
    except Exception as error:
        if not is_out_of_memory(error):
            raise
        problem = out_of_memory(what, device, error, advice)
    else:
        return
    raise problem  # without `from`, because the traceback keeps tensors alive


def check_alive(device: object, error: BaseException) -> None:
    """Raise a SpecbenchError if `error` left the device unusable, so that every later call of the process fails.
    Examples are a failed assertion in a kernel, an illegal access, and a GPU that fell off its bus."""
    try:
        _probe(device)
    except Exception as answer:
        if is_out_of_memory(answer):
            return
        raise SpecbenchError(
            f"{device} stopped working after: {one_line(str(error).partition(chr(10))[0])}",
            "finished images are kept; run the same command again to resume; if it recurs, see 'dmesg | grep Xid'",
            FAILURE,
        ) from None


def _probe(device: object) -> None:
    """Run a minimal computation on a device."""
    import torch

    torch.zeros(1, device=device).cpu()
