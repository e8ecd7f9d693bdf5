"""The forecast's forward against a measured forward on a CPU, at three model sizes and windows of 1 to 64."""

import statistics
import sys
import time
from collections.abc import Callable

import torch
from llama import PROMPT, RandomLlama

from specbench.models.forward_time import Forward, Reached, forward_ms
from specbench.specs.run_spec import Sampling
from specbench.system.device_peaks import Peak
from specbench.system.matrix_products import product

WINDOWS = (1, 2, 4, 8, 16, 32, 64)
SIZES = {
    "20m": {"vocabulary": 1024, "side": 12, "width": 512, "inner": 1376, "layers": 6, "heads": 8},
    "100m": {"vocabulary": 8192, "side": 12, "width": 768, "inner": 2048, "layers": 12, "heads": 12},
    "400m": {"vocabulary": 8192, "side": 12, "width": 1536, "inner": 4096, "layers": 14, "heads": 12},
}
NARROW = {"width": 64, "inner": 64, "heads": 1, "vocabulary": 64}
"""A model of the same depth whose forward consists almost only of calls: the overhead."""
GOAL = 0.15
_SECONDS = 0.2
"""Time for each measurement."""


@torch.inference_mode()
def bench_forecast(sampling: Sampling, rounds: int) -> tuple[list[dict], list[str]]:
    """Predict and measure forwards with guidance (2 rows), side by side in every round, in CPU milliseconds.

    The forecast's inputs are measured in the same round: the rate of products with matrices of the sizes of the model's
    weights, the bandwidth of a copy, and the calls, which are a forward of the same depth and width 64. Calls are
    measured alone, and with the products of a layer between the layers of that forward: calls are slower if weights
    that stream through the caches have evicted their data.
    """
    rows, lines = (
        [],
        ["model, window: predicted ms, measured ms, ratio; ratio with products and calls calibrated apart"],
    )
    for name, sizes in SIZES.items():
        model, narrow = RandomLlama(**sizes), RandomLlama(**sizes | NARROW)
        part = [
            {"model": name, "window": window, "round": turn, **_compared(model, narrow, window)}
            for turn in range(rounds)
            for window in WINDOWS
        ]
        rows += part
        for window in WINDOWS:
            of_window = [row for row in part if row["window"] == window]
            keys = ("predicted_ms", "measured_ms", "ratio", "ratio_apart")
            predicted, measured, ratio, apart = (statistics.median(row[key] for row in of_window) for key in keys)
            lines.append(f"{name}, {window}: {predicted:.2f}, {measured:.2f}, {ratio:.3f}; {apart:.3f}")
            print(lines[-1], file=sys.stderr)
    for key, label in (("ratio", "calibrated together"), ("ratio_apart", "calibrated apart")):
        ratios = _ratios(rows, key)
        within = sum(abs(ratio - 1) <= GOAL for ratio in ratios.values())
        worst = max(ratios, key=lambda case: abs(ratios[case] - 1))
        far = f"{ratios[worst]:.3f} ({worst[0]}, {worst[1]})"
        lines.append(f"{label}, within {GOAL:.0%}: {within} of {len(ratios)}; furthest {far}")
    return rows, lines


def _ratios(rows: list[dict], name: str) -> dict[tuple[str, int], float]:
    """Median ratio of the rounds by model and window."""
    cases = dict.fromkeys((row["model"], row["window"]) for row in rows)
    return {
        case: statistics.median(row[name] for row in rows if (row["model"], row["window"]) == case) for case in cases
    }


def _compared(model: RandomLlama, narrow: RandomLlama, window: int) -> dict[str, object]:
    """Measure a forward and the inputs of its forecast, taking turns."""
    forward, calls = _forward(model, window), _forward(narrow, window)
    weights = _matrices(model)
    hidden = {matrix.shape[1]: torch.randn(2, window, matrix.shape[1]) for matrix in weights}
    copied = torch.ones(max(model.size.kv * 2 * 4 * 256, 2**20), dtype=torch.uint8)
    target = torch.empty_like(copied)

    def products() -> None:
        for matrix in weights:
            product(hidden[matrix.shape[1]], matrix)

    def products_of(layer: int) -> None:
        for matrix in weights[7 * layer : 7 * (layer + 1)]:
            product(hidden[matrix.shape[1]], matrix)

    def together() -> None:
        hooks = [
            layer.mlp.act_fn.register_forward_pre_hook(lambda *_, number=number: products_of(number))
            for number, layer in enumerate(narrow.backbone.layers)
        ]
        calls()
        products_of(len(hooks))
        for hook in hooks:
            hook.remove()

    contenders = {"forward": forward, "products": products, "calls": calls, "together": together}
    spent = _in_turns(contenders | {"copy": lambda: target.copy_(copied)})
    flops = 2 * 2 * window * sum(matrix.numel() for matrix in weights) / (spent["products"] / 1e3)
    bandwidth = 2 * len(copied) / (spent["copy"] / 1e3)
    peak = Peak("here", {0: bandwidth}, flops, "measured in the same round", {2 * window: flops})
    start = PROMPT + _start(model, window)
    work = Forward(model.size, model.network.moved, model.layout.vocab, 4, window, 1, True, start)
    parts = forward_ms(work, peak, Reached())
    rest = sum(parts.values()) - parts["weights"]
    predicted = rest + spent["together"]
    return {
        "measured_ms": spent["forward"],
        "predicted_ms": predicted,
        "ratio": predicted / spent["forward"],
        "ratio_apart": (sum(parts.values()) + spent["calls"]) / spent["forward"],
        "parts_ms": parts,
        "together_ms": spent["together"],
        "calls_ms": spent["calls"],
        "flops": flops,
        "bytes_per_s": bandwidth,
    }


def _start(model: RandomLlama, window: int) -> int:
    return max(0, (model.layout.length - window) // 2)


def _forward(model: RandomLlama, window: int) -> Callable[[], object]:
    """A forward of `window` tokens in the middle of an image."""
    session = model.begin(model.encode(["a"]), 3.0, window)
    positions = torch.arange(window)[None] + _start(model, window)
    tokens = torch.zeros_like(positions)
    return lambda: session.forward(tokens, positions)


def _matrices(model: RandomLlama) -> list[torch.Tensor]:
    """Matrices of the sizes of the model's weights, in the order of its products."""
    config, head = model.backbone.config, model.output.weight
    width, inner = config.hidden_size, config.intermediate_size
    layer = [(width, width)] * 4 + [(inner, width)] * 2 + [(width, inner)]
    return [torch.randn(size) for size in (*layer * config.num_hidden_layers, tuple(head.shape))]


def _in_turns(calls: dict[str, Callable[[], object]]) -> dict[str, float]:
    """Median CPU milliseconds of each call; after a warm-up the calls take turns for a fixed time."""
    spent: dict[str, list[float]] = {name: [] for name in calls}
    for call in calls.values():
        call()
    end = time.perf_counter() + _SECONDS * len(calls)
    while len(spent["forward"]) < 3 or time.perf_counter() < end:
        for name, call in calls.items():
            start = time.process_time()
            call()
            spent[name].append((time.process_time() - start) * 1e3)
    return {name: statistics.median(times) for name, times in spent.items()}
