"""The curve that `--window auto` measured, in words. No torch: cards of finished runs print it too."""

from __future__ import annotations

from collections.abc import Mapping


def describe_point(point: Mapping[str, float | None]) -> str:
    """Describe one point of the curve of `--window auto`."""
    rate = point.get("acceptance")
    accepted = "" if rate is None else f", {rate:.2f} of the drafts accepted"
    speed = f", {point['speed_up']:.2f} times AR's speed" if "speed_up" in point else ""
    return (
        f"{point['step_compression']:.2f} tokens per forward, which costs {point['window_cost']:.2f} times one "
        f"token's{accepted}: {point['latency_ms']:,.0f} ms per image{speed}"
    )
