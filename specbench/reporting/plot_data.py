"""Data of a report's charts: time and log-probabilities of steps, speed-up of each prompt, quality against speed with
the Pareto front, and sweeps (runs of a decoder that differ in a single option)."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.compute as pc

from specbench.reporting.comparability import Run
from specbench.reporting.row import SIGNS, ReportRow
from specbench.specs.options import plain
from specbench.stats import Better, Estimate
from specbench.stats.speed import with_times
from specbench.store.run_store import RunStore
from specbench.store.schema import KEY, RowStatus

STEP_SPANS = ("target", "draft", "verify", "host")
"""Timing spans of a decode step, as in `specbench.decoding.generation.SPANS`."""
LOGP_EDGES = np.arange(-12.0, 0.001, 0.5)  # Histogram bins of log p in nats; the first bin includes smaller values
_NO_SWEEP = {"head", "tree"}
Sweep = dict[str, list[tuple[Any, Estimate, float | None]]]


@dataclass
class StepData:
    """Aggregates over the decoded images of a run: `step_ms`, milliseconds per target forward of each span (a ratio of
    totals; None for batch sizes above 1), and `logp`, the fraction of free tokens in each bin of `LOGP_EDGES`."""

    step_ms: dict[str, float] | None
    logp: np.ndarray | None


def step_data(folder: Path) -> StepData:
    """Aggregate the rows of a run."""
    run, counts = Run(folder), np.zeros(len(LOGP_EDGES) - 1)
    for piece in RunStore(folder).batches(("status", "forced", "logp")):
        rows = piece.filter(pc.equal(piece["status"], RowStatus.OK))
        if not rows.num_rows:
            continue
        names = ("forced", "logp")
        forced, logp = (rows[name].combine_chunks().flatten().to_numpy(zero_copy_only=False) for name in names)
        inside = np.clip(logp[~forced.astype(bool)], LOGP_EDGES[0], LOGP_EDGES[-1])
        counts += np.histogram(inside, LOGP_EDGES)[0]
    timed = with_times(run.rows)
    per_step = run.info.spec.batch == 1 and len(timed)
    step = {span: float(timed[f"{span}_ms"].sum() / timed["nfe"].sum()) for span in STEP_SPANS} if per_step else None
    return StepData(step, counts / counts.sum() if counts.sum() else None)


def speed_by_prompt(folder: Path, baseline: Path, most: int) -> list[tuple[str, float]]:
    """Return (prompt, speed-up) of the first `most` images that both a run and its AR baseline decoded singly."""
    mine, theirs = (Run(path).rows[[*KEY, "latency_ms"]].dropna(subset=["latency_ms"]) for path in (folder, baseline))
    pairs = mine.merge(theirs, on=list(KEY), suffixes=("", "_base")).head(most)
    pairs = pairs.merge(RunStore(folder).samples(["prompt"]), on=list(KEY))
    pairs = pairs[pairs["latency_ms"] > 0]
    return list(zip(pairs["prompt"], pairs["latency_ms_base"] / pairs["latency_ms"], strict=True))


@dataclass(frozen=True)
class Point:
    """Speed and quality of one run; `dominated_by` is the label of a run that Pareto-dominates it."""

    label: str
    run_id: str
    speed: Estimate
    quality: Estimate
    better: Better
    dominated_by: str | None = None


def pareto(runs: Sequence[ReportRow], metric: str, fingerprint: str) -> list[Point]:
    """Build a point for each report row with a speed-up and this score, and mark Pareto-dominated points.

    A point dominates another point if it is faster and scores better, and neither the two speed intervals nor the two
    score intervals overlap. Points that lack an interval are ignored.
    """
    points = []
    for row in runs:
        score = row.score(metric, fingerprint)
        if score and row.over_ar.speedup is not None:
            points.append(Point(row.label, row.run_id, row.over_ar.speedup, score.estimate, score.better))

    def dominated(point: Point) -> str | None:
        faster = (p for p in points if _above(p.speed, point.speed, 1))
        return next((p.label for p in faster if _above(p.quality, point.quality, SIGNS[p.better])), None)

    return [replace(point, dominated_by=dominated(point)) for point in points]


def _above(estimate: Estimate, other: Estimate, sign: int) -> bool:
    """Return whether the interval of `estimate` is entirely above the interval of `other`, or below if `sign` is -1."""
    if estimate.low is None or estimate.high is None or other.low is None or other.high is None:
        return False
    return estimate.low > other.high if sign > 0 else estimate.high < other.low


def sweeps(rows: Sequence[ReportRow]) -> dict[str, Sweep]:
    """Return {swept option: {curve: (value, speed-up, step ratio) triples in the order of the values}}.

    A curve is a decoder with fixed values of its other varied options. Runs without a speed-up are left out.
    """
    timed = [(row, speed) for row in rows if (speed := row.over_ar.speedup) is not None]
    by_option: dict[str, Sweep] = {}
    for decoder in dict.fromkeys(row.decoder for row, _ in timed):
        runs = [pair for pair in timed if pair[0].decoder == decoder]
        options = dict.fromkeys(name for row, _ in runs for name in row.options if name not in _NO_SWEEP)
        varied = [name for name in options if len({row.options.get(name) for row, _ in runs}) > 1]
        for option in varied:
            curves: Sweep = {}
            for row, speed in runs:
                others = (f"{name}={plain(row.options.get(name))}" for name in varied if name != option)
                point = row.options.get(option), speed, row.over_ar.step_ratio
                curves.setdefault(" ".join([decoder, *others]), []).append(point)
            for curve, points in curves.items():
                if len({value for value, *_ in points}) > 1:
                    by_option.setdefault(option, {})[curve] = sorted(points, key=_by_value)
    return by_option


def _by_value(point: tuple[Any, ...]) -> tuple[int, Any]:
    return (0, point[0]) if isinstance(point[0], int | float) else (1, str(point[0]))
