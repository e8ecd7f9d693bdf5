"""Charts as data. The page's script draws them with a hover text per point; `specbench.reporting.figures` draws them as
figures.

A chart is a dict: `title`, `caption`, `label` (for screen readers), `scales` (of x, y, fy, colours and shapes) and
`layers`. A layer is a dict with `points`, `mark` (a `LayerMark`; "one" is the line at 1) and `by` (key of the points'
value that determines the colour; None: black). Layers of dots also have `hollow` and `size`, layers of lines `dash`.
"""

from collections.abc import Container, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np

from specbench.reporting.columns import bracketed, number
from specbench.reporting.marks import Mark, Marks, mark_at
from specbench.reporting.plot_data import LOGP_EDGES, STEP_SPANS, Point, Sweep
from specbench.reporting.row import ReportRow
from specbench.stats import Estimate
from specbench.system.console import printable

_SPAN_LABELS = dict(zip(STEP_SPANS, ("target forward", "draft", "verify + sample", "host gap"), strict=True))
_PARTS = ("steps saved", "window cost", "overhead", "speed-up")
PART_COLOURS = ("#00694b", "#d27869", "#b469b4", "#0096ff")
DASH = "5,4"  # Line style of values that are not measured times (values of a paper, step ratios)
_ROOM = 0.1  # Margin of an axis with a single value, on each side, as a fraction of the value
MOST_NUMBERS = 100  # Maximum number of points in a chart's list of numbers
Chart = dict[str, Any]
LayerMark = Literal["dot", "line", "interval", "bar", "total", "name", "one"]
Points = Sequence[Mapping[str, Any]]


@dataclass(frozen=True)
class Curve:
    """Printed or measured points of a paper's figure: x (a number or a category) and y."""

    label: str
    measured: bool
    points: Sequence[tuple[Estimate | str, Estimate]]


def figure_chart(curves: Sequence[Curve], x_label: str, y_label: str, order: Sequence[str] = ()) -> Chart:
    """Make the chart of a paper's figure: printed values hollow and dashed, measured values filled, with intervals.
    `order`: first categories of the x axis; other categories follow in order of appearance."""
    groups = list(dict.fromkeys(curve.label for curve in curves))
    named = {group: group or "all rows" for group in groups}
    met = dict.fromkeys(x for curve in curves for x, _ in curve.points if isinstance(x, str))
    categories = [name for name in dict.fromkeys((*order, *met)) if name in met]
    layers = []
    for curve in curves:
        run, where = named[curve.label], "measured here" if curve.measured else "the paper's"
        points = []
        for x, y in curve.points:
            place = _estimates(Estimate(0), y) | {"x": x} if isinstance(x, str) else _estimates(x, y)
            tip = f"{run}, {where}\n{x_label} {x if isinstance(x, str) else f'{x.value:g}'}\n{y_label} {_told(y, 3)}"
            points.append(place | {"run": run, "told": tip})
        if curve.measured:
            layers += _bars(points)
        if not categories:
            layers.append(_layer("line", points, dash=None if curve.measured else DASH))
        layers.append(_dots(points, hollow=not curve.measured))
    values = [x.value for curve in curves for x, _ in curve.points if isinstance(x, Estimate)]
    decades = bool(values) and 0 < 100 * min(values) <= max(values)
    scale = {"type": "log", "tickFormat": "~g"} if decades else {"nice": True}
    marks = {name: mark_at(place) for place, name in enumerate(named.values())}
    return _chart(
        f"{y_label} against {x_label}" if x_label else y_label,
        _figure_caption(curves),
        {
            "x": {"label": x_label, **({"type": "point", "domain": categories} if categories else scale)},
            "y": _axis(y_label),
            **_scales(marks, legend=groups != [""]),
        },
        layers,
    )


def _figure_caption(curves: Sequence[Curve]) -> str:
    """Explain how printed and measured values are drawn."""
    measured = [point for curve in curves if curve.measured for point in curve.points]
    printed = any(not curve.measured for curve in curves)
    bounded = any(isinstance(place, Estimate) and place.low is not None for point in measured for place in point)
    ours = f"measured here{', with 95 % intervals' if bounded else ''}"
    if not printed:
        return f"All values: {ours}. The paper prints no numbers for this."
    return "Hollow and dashed: the paper's values." + (f" Filled: {ours}." if measured else "")


def field_chart(printed: Points, measured: Sequence[ReportRow]) -> Chart:
    """Latency ratio against step ratio. Hollow points: printed rows, grouped by paper; filled points: report rows."""
    hollow = [
        {"x": row["step_ratio"], "y": row["latency_ratio"], "run": row["paper"], "row": f"{row['table']}: {row['row']}"}
        for row in printed
    ]
    filled = [
        _estimates(Estimate(row.over_ar.step_ratio), row.over_ar.speedup)
        | {"run": f"measured here, {row.model}", "row": row.label}
        for row in measured
        if row.over_ar.speedup and row.over_ar.step_ratio is not None
    ]
    top = max([1, *(point[axis] for point in (*hollow, *filled) for axis in "xy")])
    marks = {name: mark_at(place) for place, name in enumerate(dict.fromkeys(point["run"] for point in hollow))}
    marks |= {point["run"]: Mark("#000000", "circle") for point in filled}
    return _chart(
        "The field",
        "Above the dotted line, the latency ratio exceeds the step ratio, which fewer forwards alone cannot explain.",
        {"x": _axis("step ratio"), "y": _axis("latency ratio"), **_scales(marks, legend=True)},
        [
            _layer("line", [{"x": end, "y": end} for end in (0, top)], None, dash=DASH),
            _dots(hollow, hollow=True, size=3), *_bars(filled), _dots(filled),
        ],
        rows=18,
    )  # fmt: skip


def pareto_chart(points: Sequence[Point], metric: str, marks: Marks) -> Chart:
    """Speed-up against a score, both with intervals; up and right is better. Dominated runs are hollow."""
    data = [
        _estimates(point.speed, point.quality)
        | {
            "run": point.label,
            "told": f"{point.label}\nspeed-up {_told(point.speed)}\n{metric} {_told(point.quality, 3)}"
            + (f"\ndominated by {point.dominated_by}" if point.dominated_by else ""),
            "kept": point.dominated_by is None,
        }
        for point in points
    ]
    names = [f"{point.label} (by {point.dominated_by})" for point in points if point.dominated_by]
    verdict = f"Dominated: {', '.join(names)}." if names else "No run is shown to be dominated by another run."
    lower = any(point.better == "lower" for point in points)
    return _chart(
        f"{metric} against speed",
        "Bars: 95 % confidence intervals. Hollow: dominated, i.e. slower and worse than another run, with intervals "
        f"that do not overlap. {verdict}",
        {
            "x": _axis("speed-up over AR"),
            "y": _axis(f"{metric}{' (axis inverted)' if lower else ''}", reverse=lower),
            **_scales(marks, {point.label for point in points}),
        },
        [
            *_bars(data),
            _dots([run for run in data if run["kept"]]),
            _dots([run for run in data if not run["kept"]], hollow=True),
            _layer("name", data),
        ],
    )


def prompts_chart(
    ratios: Mapping[str, Sequence[tuple[str, float]]], speed: Mapping[str, Estimate], marks: Marks
) -> Chart:
    """Speed-up of every prompt, with a row of points per run. `ratios`: (prompt, speed-up) pairs of each run; `speed`:
    the run's speed-up over all prompts, marked by a bar."""
    points = [
        {"x": ratio, "y": name, "run": name, "told": f"{_cut(prompt, 60)}\n{name}: {number(ratio)}x"}
        for name, pairs in ratios.items()
        for prompt, ratio in pairs
    ]
    totals = [
        {"x": speed[name].value, "y": name, "run": name, "told": f"{name}, all prompts: {_told(speed[name])}"}
        for name in ratios
    ]
    return _chart(
        "Speed-up of each prompt",
        "Points: images in common with AR. Bar: the speed-up over all these images.",
        {"x": _axis("speed-up over AR"), "y": {"label": None, "domain": list(ratios)}, **_scales(marks, ratios)},
        [_layer("one", [1]), _dots(points, size=3.5), _layer("total", totals, None)],
        rows=len(ratios),
    )


def parts_chart(rows: Mapping[str, ReportRow]) -> Chart:
    """Factors of each run's speed-up: steps saved, window cost and overhead. `rows`: {name: report row}."""
    points, bounds = [], []
    for name, row in rows.items():
        speed, steps = row.over_ar.speedup, row.over_ar.step_ratio
        cost, overhead = row.over_ar.window_cost, row.over_ar.overhead
        if not speed or not steps or not cost or not overhead:
            continue
        reached = (1.0, steps, steps / cost, steps / (cost * overhead))
        texts = (f"x {number(steps)}", f"/ {number(cost)}", f"/ {number(overhead)}", _told(speed))
        for place, part in enumerate(_PARTS):
            first, last = (1.0, reached[-1]) if part == "speed-up" else (reached[place], reached[place + 1])
            points.append(
                {"x1": min(first, last), "x2": max(first, last), "y": part, "fy": name, "part": part,
                 "told": f"{name}\n{part}: {texts[place]}"}
            )  # fmt: skip
        if speed.low is not None:
            bounds.append({"x1": speed.low, "x2": speed.high, "y": _PARTS[-1], "fy": name})
    return _chart(
        "The parts of the speed-up",
        "Starting from AR's speed (1): the steps saved multiply the speed; the cost of a wider forward and the "
        "overhead divide it. The last bar is the resulting speed-up with its 95 % interval. Logarithmic axis.",
        {
            "x": {"label": "times as fast as AR", "type": "log", "grid": True, "ticks": 6, "tickFormat": "~g"},
            "y": {"label": None, "domain": list(_PARTS), "axis": None},
            "fy": {"label": None, "domain": list(rows)},
            "color": {"domain": list(_PARTS), "range": PART_COLOURS, "legend": True},
        },
        [_layer("one", [1]), _layer("bar", points, "part"), _layer("interval", bounds, None)],
        rows=2 * len(rows),
    )  # fmt: skip


def sweep_chart(option: str, curves: Sweep, marks: Marks) -> Chart:
    """Speed-up against a swept option, with a line per decoder; dashed lines are step ratios. `curves`: (value of the
    option, speed-up, step ratio) triples of each line."""
    text = any(isinstance(value, str) for points in curves.values() for value, _, _ in points)
    solid, dashed = [], []
    for name, points in curves.items():
        for value, speed, steps in points:
            x = str(value) if text else value
            tip = f"{name} {option}={value}\nspeed-up {_told(speed)}\nsteps {number(steps)}x"
            solid.append({"x": x, "y": speed.value, "y1": speed.low, "y2": speed.high, "run": name, "told": tip})
            dashed.append({"x": x, "y": steps, "run": name, "told": tip})
    return _chart(
        f"Sweep of {option}",
        "Solid: speed-up over AR, with 95 % intervals. Dashed: steps saved, which would be the speed-up if a step, "
        "with drafting and verification, took as long as a step of AR.",
        {
            "x": {"label": option, **({"type": "point"} if text else {})},
            "y": {"label": "times AR", "grid": True, "nice": True},
            **_scales(marks),
        },
        [
            *_bars(solid), _layer("line", dashed, dash=DASH), _layer("line", solid, dash=None), _dots(dashed, True, 3),
            _dots(solid), _ends(solid),
        ],
    )  # fmt: skip


def offsets_chart(rates: Mapping[str, Sequence[float | None]], marks: Marks) -> Chart:
    """Acceptance at each window offset, one line per run with drafts. A rate is None if no draft was verified."""
    points = [
        {"x": place, "y": value, "run": name, "told": f"{name}\noffset {place}: {number(value, 3)}"}
        for name, values in rates.items()
        for place, value in enumerate(values, 1)
        if value is not None
    ]
    return _chart(
        "Acceptance by window offset",
        "Fraction of the verified draft tokens that were accepted, by position in the window.",
        {
            "x": {"label": "position of the draft in the window", "tickFormat": "d"},
            "y": {"label": "acceptance", "domain": [0, 1], "grid": True},
            **_scales(marks, rates),
        },
        _curves(points, marks, 2.5),
    )


def time_chart(step_ms: Mapping[str, Mapping[str, float]]) -> Chart:
    """Milliseconds per step, one bar per run, divided by span."""
    points = [
        {"x": spans[span], "y": name, "span": _SPAN_LABELS[span],
         "told": f"{name}\n{_SPAN_LABELS[span]}: {number(spans[span])} ms of {number(sum(spans.values()))} ms"}
        for name, spans in step_ms.items()
        for span in STEP_SPANS
    ]  # fmt: skip
    return _chart(
        "Time per step",
        "Total time of each span over the number of target forwards, without prefill and rendering.",
        {
            "x": {"label": "milliseconds per step", "grid": True},
            "y": {"label": None, "domain": list(step_ms)},
            "color": {"domain": list(_SPAN_LABELS.values()), "range": PART_COLOURS[::-1], "legend": True},
        },
        [_layer("bar", points, "span")],
        rows=len(step_ms),
    )


def logp_chart(shares: Mapping[str, np.ndarray], marks: Marks) -> Chart:
    """Histogram of log p of the committed tokens, one line per run."""
    middles = (LOGP_EDGES[1:] + LOGP_EDGES[:-1]) / 2
    points = [
        {"x": float(middle), "y": 100 * float(share), "run": name,
         "told": f"{name}\nlog p {low:g} to {low + 0.5:g}: {100 * share:.2g} %"}
        for name, values in shares.items()
        for middle, low, share in zip(middles, LOGP_EDGES, values, strict=False)
        if share > 0
    ]  # fmt: skip
    return _chart(
        "Log-probability of the tokens",
        "Natural log of the target probability of each free token.",
        {
            "x": {"label": "log p in nats (the first bin includes all lower values)"},
            "y": {"label": "% of free tokens", "type": "log", "grid": True, "ticks": 4, "tickFormat": "~g"},
            **_scales(marks, shares),
        },
        _curves(points, marks, 1.5),
    )


def numbers(chart: Chart) -> list[str]:
    """Describe at most `MOST_NUMBERS` points of a chart in words, for pages whose scripts do not run."""
    lines = dict.fromkeys(
        str(point["told"]).replace("\n", ": ", 1).replace("\n", ", ")
        for layer in chart["layers"]
        for point in layer["points"]
        if isinstance(point, Mapping) and "told" in point
    )
    left_out = len(lines) - MOST_NUMBERS
    return [*list(lines)[:MOST_NUMBERS], *([f"and {left_out:,} more points"] if left_out > 0 else [])]


def _chart(title: str, caption: str, scales: Mapping[str, Any], layers: Points, rows: float | None = None) -> Chart:
    """Make a chart; `rows`: number of rows of bars or points, if it determines the height."""
    opened = {axis: _room(axis, scale, layers) for axis, scale in scales.items()}
    return {"title": title, "caption": caption, "label": title, "scales": opened, "layers": list(layers), "rows": rows}


def _room(axis: str, scale: Mapping[str, object], layers: Points) -> Mapping[str, object]:
    """Add a margin to a scale with a single value. Without it, the label would show all digits of the value."""
    channels = [name for name in (axis, f"{axis}1", f"{axis}2") if axis in ("x", "y")]
    points = [point for layer in layers for point in layer["points"]]
    values = {point.get(name) if isinstance(point, Mapping) else point for point in points for name in channels}
    values.discard(None)
    if len(values) != 1 or "domain" in scale or not isinstance(value := values.pop(), int | float):
        return scale
    low, high = sorted((value * (1 - _ROOM), value * (1 + _ROOM))) if value else (-1, 1)
    return {**scale, "domain": [low, high], "ticks": 4}


def _axis(label: str, **more: object) -> dict[str, object]:
    """Make the scale of a numeric axis."""
    return {"label": label, "nice": True, "grid": True, **more}


def _layer(mark: LayerMark, points: Sequence[object], by: str | None = "run", **more: object) -> dict[str, object]:
    return {"mark": mark, "points": list(points), "by": by, **more}


def _bars(points: Points) -> list[dict[str, object]]:
    """Make the layer of intervals, for the points that have an interval."""
    bounded = [point for point in points if point.get("x1") is not None or point.get("y1") is not None]
    return [_layer("interval", bounded)] if bounded else []


def _curves(points: Points, marks: Marks, size: float) -> list[dict[str, object]]:
    """Make the layers of a line per run, with the run's dots and name."""
    by_dash: dict[str | None, list[Mapping[str, object]]] = {}
    for point in points:
        by_dash.setdefault(marks[point["run"]].dash, []).append(point)
    lines = [_layer("line", of_dash, dash=dash) for dash, of_dash in by_dash.items()]
    return [*lines, _dots(points, size=size), _ends(points)]


def _dots(points: Points, hollow: bool = False, size: float = 4.5) -> dict[str, object]:
    return _layer("dot", points, hollow=hollow, size=size)


def _ends(points: Points) -> dict[str, object]:
    """Make the layer with the runs' names at the ends of their lines; the page's script moves overlapping names."""
    return _layer("name", list({point["run"]: point for point in points}.values()))


def _estimates(x: Estimate, y: Estimate) -> dict[str, float | None]:
    return {"x": x.value, "x1": x.low, "x2": x.high, "y": y.value, "y1": y.low, "y2": y.high}


def _told(estimate: Estimate, digits: int = 2) -> str:
    return number(estimate.value, digits) + bracketed(estimate, digits)


def _scales(marks: Marks, shown: Container[str] | None = None, legend: bool = False) -> dict[str, object]:
    """Make the scales of colours and shapes, of all runs or only of runs in `shown`."""
    kept = {name: mark for name, mark in marks.items() if shown is None or name in shown}
    return {
        "color": {"domain": list(kept), "range": [mark.colour for mark in kept.values()], "legend": legend},
        "symbol": {"domain": list(kept), "range": [mark.symbol for mark in kept.values()]},
    }


def _cut(text: str, most: int) -> str:
    clean = printable(text)
    return clean if len(clean) <= most else f"{clean[: most - 1]}…"
