"""Pareto front of speed-up and quality."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

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

    A point is dominated by another that is faster and scores better, both with intervals that do not overlap. Without
    an interval of either number nothing is said.
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
    for other in points:
        if _above(other.speed, point.speed, 1) and _above(other.quality, point.quality, sign):
            return replace(point, dominated_by=other.label)
    return point


def _above(one: Estimate, other: Estimate, sign: int) -> bool:
    """Whether the interval of `one` lies wholly above that of `other`, or below it where `sign` is -1."""
    if one.low is None or other.low is None:
        return False
    return one.low > other.high if sign > 0 else one.high < other.low
