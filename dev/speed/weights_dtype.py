"""AR with 100 million parameters in float32 and bfloat16, its matrix products alone, and the reading of its
weights."""

import time
from collections.abc import Callable
from functools import partial

import torch
from llama import RandomLlama
from timing import cpu_ms, in_turns, median, timed_decode
from torch import nn

from specbench.specs.presets import resolve
from specbench.specs.run_spec import Sampling
from specbench.system.matrix_products import linear_output

ROWS = {"guided": 2, "unguided": 1}


@torch.inference_mode()
def timed_call(call: Callable[[], object], times: int, sample: int) -> dict:
    """Milliseconds of `times` calls."""
    start, cpu = time.perf_counter(), time.process_time()
    for _ in range(times):
        call()
    spent = {"wall_ms": (time.perf_counter() - start) * 1e3, "cpu_ms": (time.process_time() - cpu) * 1e3}
    return {**spent, "tokens": times}


def multiply(layers: list[nn.Linear], inputs: list[torch.Tensor]) -> None:
    """Run every matrix product of an eager forward once."""
    for layer, columns in zip(layers, inputs, strict=True):
        linear_output(layer, columns)


def bench_bfloat16(sampling: Sampling, rounds: int) -> tuple[list[dict], list[str]]:
    """Decode 64 tokens with a random Llama, eager and compiled, by the dtype of its weights, with guidance and without.

    `products` are all matrix products of the same number of eager forwards; `read` is a sum over as many bytes as the
    weights have.
    """
    contenders, sizes = {}, {}
    for dtype in (torch.float32, torch.bfloat16):
        model, compiled, name = RandomLlama(dtype=dtype), RandomLlama(dtype=dtype), str(dtype).removeprefix("torch.")
        compiled.compile()
        sizes[name] = model.size.weights * dtype.itemsize
        contenders[f"read {name}"] = partial(timed_call, torch.ones(sizes[name] // 4).sum, 16)
        layers = [part for part in [*model.backbone.modules(), model.output] if isinstance(part, nn.Linear)]
        for label, rows in ROWS.items():
            inputs = [torch.randn(rows, 1, part.in_features).to(dtype) for part in layers]
            contenders[f"products {label} {name}"] = partial(timed_call, partial(multiply, layers, inputs), 16)
            chosen = Sampling(3.0 if rows == 2 else 1.0, 1.0, 1000)
            contenders[f"ar {label} {name}"] = partial(timed_decode, model, resolve("ar"), chosen)
            contenders[f"ar compiled {label} {name}"] = partial(timed_decode, compiled, resolve("ar"), chosen)
    timed = in_turns(contenders, rounds)
    per_token = {name: median(timed, name, lambda row: cpu_ms(row) / row["tokens"]) for name in contenders}
    lines = ["CPU ms per token; tokens per second; over the reading of the weights"]
    for name, ms in per_token.items():
        over = ms / per_token[f"read {name.split()[-1]}"]
        lines.append(f"{name}: {ms:.1f}, {1e3 / ms:.1f}, {over:.2f}")
    lines += [f"{name}: {size / 1e6:.0f} MB" for name, size in sizes.items()]
    return timed, lines
