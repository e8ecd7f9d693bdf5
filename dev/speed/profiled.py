"""Profile of a compiled step with torch's profiler; its overhead adds to every call."""

from timing import CAPTION
from torch.profiler import ProfilerActivity, profile

from specbench.decoding.loop import decode
from specbench.models.catalog import load_model
from specbench.prompts import Request
from specbench.specs.presets import resolve
from specbench.specs.run_spec import Sampling

DECODERS, SHOWN = ("ar", "sjd"), 12


def bench_profile(sampling: Sampling, rounds: int) -> tuple[list[dict], list[str]]:
    """Milliseconds and calls per step of the most expensive operations of compiled `shapes` steps, by decoder."""
    model = load_model("shapes")
    model.compile()
    rows, lines = [], ["decoder, part: ms per step without its own parts, calls per step"]
    for name in DECODERS:
        spec, request = resolve(name), Request(CAPTION, "bench")
        decode(model, [request], spec, sampling, seed=0, render=False)
        with profile(activities=[ProfilerActivity.CPU]) as profiler:
            [image] = decode(model, [request], spec, sampling, seed=0, render=False)
        parts = sorted(profiler.key_averages(), key=lambda part: -part.self_cpu_time_total)[:SHOWN]
        for part in parts:
            ms, calls = part.self_cpu_time_total / 1e3 / image.nfe, part.count / image.nfe
            rows.append({"name": name, "part": part.key, "self_ms_per_step": ms, "calls_per_step": calls})
            lines.append(f"{name}, {part.key[:60]}: {ms:.3f}, {calls:.1f}")
    return rows, lines
