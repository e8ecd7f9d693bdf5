"""Sweeps among the runs of a report: runs of one decoder that differ in a single option."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from specbench.specs.options import plain
from specbench.stats import Estimate

# Pareto front of speed-up and quality.

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


Sweep = dict[str, list[tuple[object, Estimate, float]]]
_NO_SWEEP = {"head", "tree"}


def sweeps(rows: Sequence[Mapping]) -> dict[str, Sweep]:
    """By swept option and curve, (value, speed-up, step ratio) triples in the order of the values.

    A curve is a decoder with the options that its runs vary besides; runs without a speed-up are left out.
    """
    timed = [row for row in rows if row["speedup"] is not None]
    found: dict[str, Sweep] = {}
    for decoder in dict.fromkeys(row["decoder"] for row in timed):
        runs = [row for row in timed if row["decoder"] == decoder]
        varied = [name for name in _options(runs) if len({_value(row, name) for row in runs}) > 1]
        for option in varied:
            for curve, members in _curves(decoder, runs, [name for name in varied if name != option]).items():
                if len({_value(row, option) for row in members}) > 1:
                    found.setdefault(option, {})[curve] = sorted(map(_point(option), members), key=_by_value)
    return found


def _options(runs: Sequence[Mapping]) -> list[str]:
    return [name for name in dict.fromkeys(name for row in runs for name in row["options"]) if name not in _NO_SWEEP]


def _value(row: Mapping, name: str) -> object:
    return row["options"].get(name)


def _curves(decoder: str, runs: Sequence[Mapping], others: Sequence[str]) -> dict[str, list[Mapping]]:
    """Runs that agree in the other varied options, by the decoder's name with these."""
    curves: dict[str, list[Mapping]] = {}
    for row in runs:
        name = " ".join([decoder, *(f"{other}={plain(_value(row, other))}" for other in others)])
        curves.setdefault(name, []).append(row)
    return curves


def _point(option: str):
    return lambda row: (
        _value(row, option),
        Estimate(row["speedup"], row["speedup_low"], row["speedup_high"]),
        row["step_ratio"],
    )


def _by_value(point: tuple) -> tuple:
    number = isinstance(point[0], int | float)
    return not number, point[0] if number else 0, str(point[0])
