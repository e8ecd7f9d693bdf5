"""Functions of tensors, as they are or as kernels compiled for the shapes they are called with."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from types import FunctionType
from typing import ParamSpec, TypeVar

import torch

from specbench.errors import MISSING_PREREQUISITE, SpecbenchError

FORMS = 64
"""Forms that one function may have side by side; torch's own limit of 8 is there for accidents."""

Args = ParamSpec("Args")
Result = TypeVar("Result")


def call_eager(function: Callable[Args, Result], *args: Args.args, **kwargs: Args.kwargs) -> Result:
    """`function(*args)`; what stands in for `CompiledFunctions` where nothing is compiled."""
    return function(*args, **kwargs)


class Compiled:
    """One function, compiled.

    Attributes:
        seconds: time of the calls that compiled something.
        forms: how many did.
    """

    def __init__(self, function: Callable, dynamic: bool, options: dict[str, object]):
        """`dynamic`: sizes are symbols of one form, else there is a form for each; `options` are Inductor's."""
        self.seconds, self.forms = 0.0, 0
        # torch finds what it has compiled by code object; where guards are left out, nobody checks whose it is.
        own = FunctionType(
            function.__code__.replace(), function.__globals__, function.__name__, None, function.__closure__
        )
        torch._dynamo.config.recompile_limit = max(torch._dynamo.config.recompile_limit, FORMS)
        self._call = torch.compile(own, fullgraph=True, dynamic=dynamic, options=options)

    def __call__(self, *args: object) -> object:
        """The function's result.

        Raises:
            SpecbenchError: exit code 5 where it cannot be compiled.
        """
        before, start = _graphs(), time.perf_counter()
        try:
            result = self._call(*args)
        except (torch._dynamo.exc.TorchDynamoException, torch._dynamo.exc.FailOnRecompileLimitHit) as error:
            reason = str(error).strip().partition("\n")[0]
            raise SpecbenchError(
                f"a step cannot be compiled here: {reason}", "--compile off", MISSING_PREREQUISITE
            ) from error
        if _graphs() != before:
            self.seconds += time.perf_counter() - start
            self.forms += 1
        return result


def _graphs() -> int:
    """Graphs that this process has compiled so far."""
    return torch._dynamo.utils.counters["stats"]["unique_graphs"]


def graph_bytes() -> int:
    """GPU memory of captured graphs, which torch keeps in pools of their own."""
    segments = torch.cuda.memory_snapshot()
    return sum(segment["total_size"] for segment in segments if tuple(segment["segment_pool_id"]) != (0, 0))


class CompiledFunctions:
    """Calls a decoder's sampling, verification and drafting compiled: on a small model, these hundred small calls take
    as long as the target's forward.

    Each function is compiled for one set of shapes. Compiled code checks shapes alone, so whatever else a function
    depends on must be the same in all calls.
    """

    def __init__(self, options: dict[str, object]):
        """`options` are Inductor's."""
        # A hash uses each of its intermediate numbers twice: unless they are kept early, its expression is written out
        # once per use of a use, and compiling takes minutes.
        self._options = {"guard_filter_fn": _on_shapes, "realize_opcount_threshold": 8, **options}
        self._compiled: dict[Callable, Compiled] = {}

    def __call__(self, function: Callable[Args, Result], *args: Args.args) -> Result:
        if function not in self._compiled:
            self._compiled[function] = Compiled(function, False, self._options)
        return self._compiled[function](*args)

    @property
    def seconds(self) -> float:
        """Time of the calls that compiled something."""
        return sum(compiled.seconds for compiled in self._compiled.values())

    @property
    def forms(self) -> int:
        """How many did."""
        return sum(compiled.forms for compiled in self._compiled.values())


def compiled_functions(device: torch.device) -> CompiledFunctions:
    """As the device needs them. On a GPU their kernels are launched one by one: a captured graph would keep what it
    made where its next run overwrites it, and the drafter still reads it then."""
    return CompiledFunctions({} if device.type == "cuda" else {"cpp_wrapper": True})


def _on_shapes(guards: Sequence) -> list[bool]:
    return [guard.guard_type in ("TENSOR_MATCH", "SHAPE_ENV") for guard in guards]
