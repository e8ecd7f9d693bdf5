"""What an image will cost on this device: a forecast from the roofline, said before the first one."""

from __future__ import annotations

from specbench.models.facts import BYTES
from specbench.runs.dry_run import seconds_per_image
from specbench.runs.plan import Plan
from specbench.stats.forward_time import Forward, Reached, forward_ms
from specbench.system.console import duration
from specbench.system.device_peaks import find_peak, glimpse_peak

_SHORT_S, _LONG_S = 5.0, 3600.0
"""Seconds of an image below which nothing is said, and above which something else is proposed."""


def cost_note(plan: Plan) -> str | None:
    """The time of an image of AR by the roofline, in one line; None where it is short, or known from earlier runs, or
    the model's size is unknown."""
    size, model = plan.model.size, plan.model
    earlier = seconds_per_image(plan.out, model.name, "ar", plan.device)
    if size is None or plan.workers.elsewhere or earlier is not None:
        return None
    given = plan.device, plan.dtype, plan.threads
    peak = find_peak(*given) or glimpse_peak(*given)[0]  # a busy machine's, too: the run will be as slow
    guided, context = plan.sampling.guidance != 1, model.stream / 2
    forward = Forward(size, model.layers, model.v_image, BYTES[plan.dtype], 1, 1, guided, context)
    seconds = model.stream * sum(forward_ms(forward, peak, Reached()).values()) / 1e3
    return cost_text(model.stream, seconds, peak.name, peak.source) if seconds >= _SHORT_S else None


def cost_text(steps: int, seconds: float, device: str, source: str) -> str:
    """The forecast of AR's `steps` in words."""
    said, where = f"forecast: {duration(seconds)} an image of ar", f"on {device} ({source})"
    if seconds > _LONG_S:
        return f"{said} {where}; instead: a GPU, --model janus, or to try it --random-weights --scale tiny"
    return f"{said} ({steps:,} steps) {where}; k tokens per step divide the steps by k"
