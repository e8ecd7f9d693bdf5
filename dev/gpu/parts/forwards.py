"""Forwards by window, at Lumina's true size, against the forecast of `specbench forecast`."""

import statistics
import time
from collections.abc import Callable

import torch
from llama import PROMPT, RandomLlama

from parts.claims import Outcome, claim
from parts.scales import SIDE, Scale, has_graphs, random_llama
from specbench.models.forward_time import Forward, Reached, forward_ms
from specbench.models.transformer.model import TransformerModel
from specbench.papers.forecasts import BANDWIDTH, FLOPS
from specbench.system.device_peaks import Peak, find_peak

WINDOWS = (1, 2, 4, 8, 16, 32, 64, 96, 128)
"""Windows whose forward is compared with the forecast."""


def forwards(device: str, scale: Scale) -> Outcome:
    """Time forwards with guidance in the middle of an image, by window, and add the range of the forecast.

    On a GPU a captured graph is replayed, so that the kernels are timed without the calls that launch them.
    """
    model = random_llama(device, scale, side=SIDE if has_graphs(device) else None)
    dtype, start = str(scale.dtype).removeprefix("torch."), model.layout.length // 2
    peak_here = find_peak(device, dtype, torch.get_num_threads())
    rows = []
    for window in WINDOWS:
        if window < model.layout.length:
            launched, kernels = _forward_ms(model, window, start)
            row = {"window": window, "context": PROMPT + start, "called_ms": launched, "ms": kernels}
            rows.append(row | (_forecast_ms(model, scale.dtype, window, start, peak_here) if peak_here else {}))
    value = ", ".join(f"{row['ms']:.2f} at {row['window']}" for row in rows)
    free = max(row["window"] for row in rows if row["ms"] <= 1.1 * rows[0]["ms"])
    claims = [
        claim("milliseconds of a forward, kernels only, by window", value),
        claim("widest window within 1.1 times the forward of one column", free),
        claim("the same with its calls, one column", f"{rows[0]['called_ms']:.2f} ms"),
    ]
    if peak_here is None:
        return [*claims, claim("forecast", "the device's peaks are unknown: doctor --measure")], rows
    outside = [row["window"] for row in rows if not row["low_ms"] <= row["ms"] <= row["high_ms"]]
    within = f"{len(rows) - len(outside)} of {len(rows)}" + (f"; outside: {outside}" if outside else "")
    ratios = [row["middle_ms"] / row["ms"] for row in rows]
    claims.append(claim("windows whose forward is within the forecast's range", within, "all", not outside))
    claims.append(claim("middle of the forecast over measured", f"{min(ratios):.2f} to {max(ratios):.2f}"))
    return claims, rows


@torch.inference_mode()
def _forward_ms(model: TransformerModel, window: int, start: int) -> tuple[float, float]:
    """Milliseconds of a forward called from Python, and of its kernels alone (the same on a CPU)."""
    session = model.begin(model.encode(["a"]), 3.0, window)
    positions = (start + torch.arange(window, device=model.device)).expand(2, -1)
    tokens, slots = torch.zeros_like(positions), PROMPT - 1 + positions
    visible = PROMPT + start + window

    def call() -> None:
        session._step(tokens, positions, slots, None, visible)

    if model.device.type != "cuda":
        spent = _median_ms(call, 3, lambda: None)
        return spent, spent
    for _ in range(3):
        call()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        call()
    end = time.perf_counter() + 1  # an idle GPU is slow
    while time.perf_counter() < end:
        graph.replay()
        torch.cuda.synchronize()
    return _median_ms(call, 5, torch.cuda.synchronize), _median_ms(graph.replay, 20, torch.cuda.synchronize)


def _median_ms(call: Callable[[], None], times: int, wait: Callable[[], None]) -> float:
    """Median over three rounds of the mean milliseconds of `times` calls."""
    spent = []
    for _ in range(3):
        wait()
        start = time.perf_counter()
        for _ in range(times):
            call()
        wait()
        spent.append((time.perf_counter() - start) * 1e3 / times)
    return statistics.median(spent)


def _forecast_ms(model: RandomLlama, dtype: torch.dtype, window: int, start: int, peak: Peak) -> dict[str, float]:
    """The forecast's range, its middle, and the floor at the device's peaks."""
    moved, vocabulary = model.network.moved, model.layout.vocab
    work = Forward(model.size, moved, vocabulary, dtype.itemsize, window, 1, True, PROMPT + start)

    def at(bandwidth: float, flops: float) -> float:
        return sum(forward_ms(work, peak, Reached(bandwidth, flops)).values())

    low, high = at(BANDWIDTH[1], FLOPS[1]), at(BANDWIDTH[0], FLOPS[0])
    middle = at(sum(BANDWIDTH) / 2, sum(FLOPS) / 2)
    return {"low_ms": low, "high_ms": high, "middle_ms": middle, "floor_ms": at(1, 1)}
