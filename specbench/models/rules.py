"""Sampling, verification and drafting as compiled functions, beside the compiled target.

On a small model, or many of its columns, these hundred small calls cost as much as the target's forward.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import ParamSpec, TypeVar

import torch

Args = ParamSpec("Args")
Result = TypeVar("Result")


def as_it_is(function: Callable[Args, Result], *args: Args.args, **kwargs: Args.kwargs) -> Result:
    """`function(*args)`; what stands in for `CompiledRules` where nothing is compiled."""
    return function(*args, **kwargs)


class CompiledRules:
    """Calls functions compiled, each for the first shapes it is called with.

    Compiled code looks at shapes alone: whatever else a function depends on must be the same in all calls.

    Attributes:
        seconds: time of the calls that compiled something.
        forms: how many did.
    """

    def __init__(self, options: dict[str, object]):
        """`options` are Inductor's."""
        self.seconds, self.forms = 0.0, 0
        # A hash uses each of its intermediate numbers twice: unless they are kept early, its expression is written out
        # once per use of a use, and compiling takes minutes.
        self._options = {"guard_filter_fn": _of_shapes, "realize_opcount_threshold": 8, **options}
        self._compiled: dict[Callable, Callable] = {}

    def __call__(self, function: Callable[Args, Result], *args: Args.args) -> Result:
        if function in self._compiled:
            return self._compiled[function](*args)
        self._compiled[function] = torch.compile(
            function, fullgraph=True, dynamic=False, isolate_recompiles=True, options=self._options
        )
        start = time.perf_counter()
        result = self._compiled[function](*args)
        self.seconds += time.perf_counter() - start
        self.forms += 1
        return result


def compiled_rules(device: torch.device) -> CompiledRules:
    """As the device needs them. On a GPU their kernels are launched one by one, as what they change is not to be kept
    where a graph was captured."""
    return CompiledRules({} if device.type == "cuda" else {"cpp_wrapper": True})


def _of_shapes(guards: Sequence) -> list[bool]:
    return [guard.guard_type in ("TENSOR_MATCH", "SHAPE_ENV") for guard in guards]
