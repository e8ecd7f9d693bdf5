"""Devices whose tensors have no numbers: whoever reads one fails, and so does whoever makes or mixes in another's."""

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from specbench.decoding import row_jacobi, zipar
from specbench.decoding.drafters import eagle
from specbench.models.transformer import host_sync


class OtherDevice(AssertionError):
    """A tensor on another device than the model's."""


class NoKernel(Exception):
    """An operation that CUDA does not have."""


_PRODUCTS = {
    getattr(torch.ops.aten, name) for name in ("matmul", "mm", "bmm", "mv", "addmm", "addmv", "baddbmm", "dot")
}


class OneDevice(TorchDispatchMode):
    """Refuses operations that take or make a tensor on another device than `device`, and matrix products of integers,
    for which CUDA has no kernel."""

    def __init__(self, device: str):
        super().__init__()
        self._kind = torch.device(device).type

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        result = function(*args, **(kwargs or {}))
        if function.overloadpacket in _PRODUCTS and not result.is_floating_point():
            raise NoKernel(f"{function} of integers")
        for value in tree_leaves((args, kwargs, result)):
            if isinstance(value, torch.Tensor) and value.device.type != self._kind:
                raise OtherDevice(f"{function} has a tensor of shape {list(value.shape)} on {value.device}")
        return result


class RowsAtWork:
    """Answer loops that ask once a step which rows are at work: all of them, so many times."""

    def __init__(self) -> None:
        self.left = 0

    def __call__(self, numbers: torch.Tensor) -> list[bool]:
        self.left -= 1
        return [self.left >= 0] * len(numbers)


_ROWS_AT_WORK = RowsAtWork()


def step(loop) -> None:
    """One step of any decode loop."""
    if hasattr(loop, "step"):
        loop.step(0)
    else:
        _ROWS_AT_WORK.left = 1
        for _ in loop.run():
            pass


def give_host_reads(monkeypatch) -> None:
    """Answer what a run may ask a device once per batch or image, and loops over image rows once a step."""
    monkeypatch.setattr(eagle, "to_host", lambda numbers: [4] * len(numbers))
    monkeypatch.setattr(zipar, "to_host", _ROWS_AT_WORK)
    monkeypatch.setattr(row_jacobi, "to_host", _ROWS_AT_WORK)
    monkeypatch.setattr(host_sync.AsyncHostCopy, "latest", lambda self, numbers, when: ([4] * len(numbers), when))


def refuse_host_numbers(monkeypatch) -> None:
    """Fail if a tensor is made from numbers of the host, for which a GPU waits."""

    def refuse(*args, **kwargs):
        raise AssertionError("a step makes a tensor from numbers of the host, for which a GPU waits")

    monkeypatch.setattr(torch, "tensor", refuse)
    monkeypatch.setattr(torch, "as_tensor", lambda x, *a, **k: x if isinstance(x, torch.Tensor) else refuse())
