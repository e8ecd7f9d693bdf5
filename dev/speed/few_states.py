"""Ways to multiply a weight matrix with few hidden states: x W', W x', and sums that Inductor compiles."""

from collections.abc import Callable, Sequence
from functools import partial

import torch
from timing import cpu_ms, in_turns, median
from torch import Tensor, nn
from weights_dtype import timed_call

from specbench.models.transformer.compilation import FORMS
from specbench.specs.run_spec import Sampling
from specbench.system.matrix_products import sums_by_state, weights_times_states

STATES = (1, 2, 3, 4, 8)
LARGE, SMALL = (11, 8192, 1024), (1, 256, 256)
"""Matrices, and their sizes: a set of 100 million parameters, and a matrix that fits into a cache."""


def bench_products(_sampling: Sampling, rounds: int) -> tuple[list[dict], list[str]]:
    """Time all products of a set of matrices by way, number of states and dtype, and a sum over the matrices."""
    rows, lines = [], ["matrices, dtype, way, states: CPU ms for all matrices"]
    sets = ((LARGE, torch.float32, 4), (LARGE, torch.bfloat16, 4), (SMALL, torch.float32, 1000))
    for (count, outputs, inputs), dtype, times in sets:
        weights = [torch.randn(outputs, inputs).to(dtype) for _ in range(count)]
        label = f"{count} of {outputs} x {inputs}, {str(dtype).removeprefix('torch.')}"
        contenders: dict[str, Callable[[int], dict]] = {
            f"{label}, read": partial(timed_call, partial(each, torch.sum, weights), times)
        }
        for states in STATES:
            hidden = torch.randn(states, 1, inputs).to(dtype)
            for name, way in ways().items():
                call = partial(each, partial(way, hidden), weights)
                contenders[f"{label}, {name}, {states}"] = partial(timed_call, call, times)
        timed = in_turns(contenders, rounds)
        rows += timed
        for name in contenders:
            lines.append(f"{name}: {median(timed, name, lambda row: cpu_ms(row) / row['tokens']):.4g}")
    return rows, lines


def ways() -> dict[str, Callable[[Tensor, Tensor], Tensor]]:
    """Products [R, 1, o] of states [R, 1, d] and a matrix [o, d]; a compiled product fits one number of states."""
    torch._dynamo.config.recompile_limit = FORMS
    sums = torch.compile(sums_by_state, fullgraph=True, dynamic=False, options={"cpp_wrapper": True})
    return {"x W'": nn.functional.linear, "W x'": weights_times_states, "sums": sums}


def each(way: Callable[[Tensor], Tensor], weights: Sequence[Tensor]) -> None:
    """Multiply every matrix in the given way."""
    for weight in weights:
        way(weight)
