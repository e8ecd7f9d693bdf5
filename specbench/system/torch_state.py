"""Global state of torch, which a calling program or a plug-in may have changed."""

from collections.abc import Callable, Iterable
from functools import partial
from operator import attrgetter
from threading import Lock
from typing import Any, NamedTuple, TypeVar

import torch

_Function = TypeVar("_Function", bound=Callable[..., Any])


class _State(NamedTuple):
    read: Callable[[], Any]
    write: Callable[[Any], None]
    pinned: Any = None  # None: do not set the state, only restore it


def _attribute(of: object, name: str, pinned: object) -> _State:
    return _State(partial(getattr, of, name), partial(setattr, of, name), pinned)


def _precision(unit: Any) -> _State:
    """State of float32 precision for one kind of operation; the value "none" means: as the global setting."""

    def write(value: str) -> None:
        unit.fp32_precision = "none"
        if unit.fp32_precision != value:
            unit.fp32_precision = value

    return _State(partial(getattr, unit, "fp32_precision"), write, "ieee")


_OF_THREAD = [_State(torch.get_num_threads, torch.set_num_threads)]
_OF_THREAD += [
    _State(partial(torch.is_autocast_enabled, kind), partial(torch.set_autocast_enabled, kind), False)
    for kind in ("cpu", "cuda")
]
_UNITS = [
    attrgetter(f"{library}.{work}")(torch.backends)
    for library, works in {"cuda": ("matmul",), "cudnn": ("conv", "rnn"), "mkldnn": ("matmul", "conv", "rnn")}.items()
    for work in works
    if hasattr(torch.backends, "fp32_precision")  # since torch 2.9
]
_OF_PROCESS = (
    _State(torch.get_default_dtype, torch.set_default_dtype, torch.float32),
    _State(torch.get_float32_matmul_precision, torch.set_float32_matmul_precision, "highest"),
    _attribute(torch.backends.cudnn, "allow_tf32", False),
    *map(_precision, _UNITS),
    _State(torch.get_deterministic_debug_mode, torch.set_deterministic_debug_mode, 0),
)
_STATES = (*_OF_THREAD, *_OF_PROCESS)


class PinnedTorch(torch.inference_mode):
    """Context or decorator for computing in a run's dtype and on its device: no autocast, no TF32 or bfloat16 in
    float32 products, new tensors in float32 on the CPU. `mode`: inference mode if true, else with gradients. Afterwards
    the earlier state and number of threads are restored, global state only when no other thread is in this context."""

    _lock, _open = Lock(), 0  # number of open contexts in all threads
    _shared: Iterable[tuple[_State, Any]] = ()

    def __call__(self, function: _Function) -> _Function:
        return super().__call__(function)  # torch's decorator has no types

    def __enter__(self) -> None:
        super().__enter__()
        self._before = [(state, _read(state)) for state in _OF_THREAD]
        with self._lock:
            if not PinnedTorch._open:
                PinnedTorch._shared = [(state, _read(state)) for state in _OF_PROCESS]
            PinnedTorch._open += 1
            _set((state, state.pinned) for state in _STATES)
        # This context slows down every call, so it is entered only if the default device is not the CPU.
        self._device = None if torch.get_default_device().type == "cpu" else torch.device("cpu")
        if self._device:
            self._device.__enter__()

    def __exit__(self, *error: Any) -> None:
        if self._device:
            self._device.__exit__(*error)
        with self._lock:
            PinnedTorch._open -= 1
            _set((*self._before, *(() if self._open else self._shared)))
        super().__exit__(*error)


def _set(values: Iterable[tuple[_State, Any]]) -> None:
    for state, value in values:
        if value not in (None, _read(state)):
            state.write(value)


def _read(state: _State) -> Any:
    """Read a state; None if torch refuses, because the state was set through other functions of torch."""
    try:
        return state.read()
    except RuntimeError:
        return None
