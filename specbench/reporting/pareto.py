"""Pareto front of speed-up and quality."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from specbench.stats import Estimate

_DISTANCES = ("fid[", "fid-infinity[", "kid[", "cmmd[", "shapes-frechet")


@dataclass(frozen=True)
class Point:
    """Speed and quality of one run; `dominated_by` is the label of a run that Pareto-dominates it."""

    label: str
    run_id: str
    speed: Estimate
    quality: Estimate
    dominated_by: str | None = None


def lower_is_better(metric: str) -> bool:
    """Whether a lower score is better: distances to reference images."""
    return metric.startswith(_DISTANCES)


def pareto(runs: Sequence[Mapping], metric: str, fingerprint: str) -> list[Point]:
    """Build a point for each report row with a speed-up and this score, and mark Pareto-dominated points.

    Dominance uses the point values, not the intervals.
    """
    points = []
    for row in runs:
        named = [s for s in row["scores"] if (s["metric"], s["fingerprint"]) == (metric, fingerprint)]
        if named and row["speedup"] is not None:
            speed = Estimate(row["speedup"], row["speedup_low"], row["speedup_high"])
            quality = Estimate(named[0]["value"], named[0]["low"], named[0]["high"])
            points.append(Point(row["label"], row["run_id"], speed, quality))
    sign = -1 if lower_is_better(metric) else 1
    return [_marked(point, points, sign) for point in points]


def _marked(point: Point, points: Sequence[Point], sign: int) -> Point:
    here = (point.speed.value, sign * point.quality.value)
    for other in points:
        there = (other.speed.value, sign * other.quality.value)
        if there != here and there[0] >= here[0] and there[1] >= here[1]:
            return Point(point.label, point.run_id, point.speed, point.quality, other.label)
    return point
