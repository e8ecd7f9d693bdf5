"""Draw the charts of the HTML page as figures for papers: pdf, svg or png by matplotlib, with the numbers as csv.

Fonts are embedded as TrueType. Runs differ in marker and line style, bars in hatching, so figures are readable in grey.
"""

import io
import os
import re
from collections.abc import Mapping, Sequence
from functools import partial
from itertools import cycle
from typing import Any

from specbench.reporting.charts import DASH, Chart
from specbench.reporting.plotting import Axes, Figure, styled
from specbench.reporting.text_formats import csv_text

WIDTHS = {"column": 3.25, "page": 6.75}  # Inches of a column and of the text of a two-column page
_UNDATED = {"pdf": {"CreationDate": None}, "svg": {"Date": None}}
_MARKERS = {"circle": "o", "square": "s", "triangle": "^", "diamond": "D", "star": "*", "cross": "P"}
_DASHES, _HATCHES = ("-", "--", "-.", ":"), ("", "///", "...", "xxx", "+++", "---")
_BLACK = {"color": "0.1", "marker": "o", "hatch": "", "dash": "-"}
_ROW, _LEGEND, _LEAST = 0.17, 0.16, 1.9  # Inches: a row of points, a line of the legend, the smallest height
Datum = Mapping[str, Any]
Look = Mapping[str, str]
Places = Mapping[str, list[Any]]


class Drawn(Figure):
    """Figure that notebooks display without an import of pyplot."""

    def _repr_png_(self) -> bytes:
        return saved(self, "png")


def figure_names(charts: Sequence[Chart]) -> dict[str, Chart]:
    """Return {short name made of the title: chart}. Repeated titles are numbered."""
    named: dict[str, Chart] = {}
    for chart in charts:
        name = slug = re.sub(r"[^a-z0-9]+", "-", str(chart["title"]).lower()).strip("-")
        while name in named:
            name = f"{slug}-{int(name.removeprefix(slug).strip('-') or 1) + 1}"
        named[name] = chart
    return named


def chart_figure(chart: Chart, width: str = "column") -> Drawn:
    """Draw a chart; `width` is one of `WIDTHS`."""
    scales = chart["scales"]
    colours = scales.get("color", {})
    runs = [str(name) for name in colours.get("domain", ())]
    shapes = scales.get("symbol", {}).get("range", ["circle"] * len(runs))
    rows = chart.get("rows") or 0
    legend = (len(runs) + 1) // 2 * _LEGEND if len(runs) > 1 else 0
    with styled():
        figure = Drawn((WIDTHS[width], max(_LEAST, rows * _ROW + 0.6) + legend), layout="constrained")
        axes = figure.add_subplot()
        looks = {
            name: {"color": colour, "marker": _MARKERS[shape], "hatch": hatch, "dash": dash}
            for name, colour, shape, hatch, dash in zip(
                runs, colours.get("range", ()), shapes, cycle(_HATCHES), cycle(_DASHES), strict=False
            )
        }
        places = _places(chart)
        for layer in chart["layers"]:
            _draw_layer(axes, layer, looks, places)
        _axes(axes, scales, places)
        shown = {text: handle for handle, text in zip(*axes.get_legend_handles_labels(), strict=True)}
        if len(shown) > 1:
            figure.legend(shown.values(), shown.keys(), loc="outside lower center", ncols=2, frameon=False)
    return figure


def saved(figure: Figure, fmt: str) -> bytes:
    """Return the content of a figure's file, which is deterministic; `fmt` is pdf, svg or png."""
    sink = io.BytesIO()
    epoch = os.environ.pop("SOURCE_DATE_EPOCH", None)  # matplotlib fails on an invalid value, even without a date
    try:
        with styled():
            figure.savefig(sink, format=fmt, metadata=_UNDATED.get(fmt))
    finally:
        os.environ.update({"SOURCE_DATE_EPOCH": epoch} if epoch is not None else {})
    return sink.getvalue()


def _places(chart: Chart) -> dict[str, list[Any]]:
    """Return the ordered categories of each axis: of x, and of y or (facet, y)."""
    places: dict[str, list[Any]] = {}
    for axis in ("x", "y"):
        scale = chart["scales"].get(axis, {})
        texts = [p.get(axis) for layer in chart["layers"] for p in layer["points"] if isinstance(p, Mapping)]
        texts = [text for text in texts if isinstance(text, str)]
        domain = scale.get("domain") or ()
        if texts:
            places[axis] = list(dict.fromkeys([*(name for name in domain if isinstance(name, str)), *texts]))
    if facets := chart["scales"].get("fy", {}).get("domain"):
        places["y"] = [(facet, row) for facet in facets for row in places["y"]]
    return places


def _place(point: Datum, channel: str, places: Places) -> Any:
    """Return the position of a point on an axis: its number, or the index of its category."""
    value, axis = point.get(channel), channel[0]
    if isinstance(value, str):
        return places[axis].index((point["fy"], value) if "fy" in point else value)
    return value


def _draw_layer(axes: Axes, layer: Mapping[str, Any], looks: Mapping[str, Look], places: Places) -> None:
    """Draw the points of a layer, with a colour and a line style per run or part."""
    mark = layer["mark"]
    if mark == "one":
        axes.axvline(1, color="0.5", linewidth=0.6, linestyle=":")
        return
    stacked: dict[Any, float] = {}  # start of the next bar in each stack
    for name in dict.fromkeys(point.get(layer["by"]) for point in layer["points"]):
        points = [point for point in layer["points"] if point.get(layer["by"]) == name]
        look = looks.get(str(name), _BLACK)
        colour = look["color"]

        def at(channel: str, some: Sequence[Datum] = points) -> list[Any]:
            return [_place(point, channel, places) for point in some]

        if mark == "dot":
            face = "white" if layer["hollow"] else colour
            axes.scatter(at("x"), at("y"), s=14, marker=look["marker"], facecolors=face, edgecolors=colour,
                         linewidths=0.9, label=name, zorder=3)  # fmt: skip
        elif mark == "line":
            dash = ":" if layer["dash"] == DASH else look["dash"]
            axes.plot(at("x"), at("y"), color=colour, linestyle=dash, linewidth=1)
        elif mark == "interval":
            across, up = ([point for point in points if point.get(end) is not None] for end in ("x1", "y1"))
            axes.hlines(at("y", across), at("x1", across), at("x2", across), color=colour, linewidth=0.9)
            axes.vlines(at("x", up), at("y1", up), at("y2", up), color=colour, linewidth=0.9)
        elif mark == "total":
            axes.scatter(at("x"), at("y"), marker="|", s=90, color="black", linewidths=1.6, zorder=4)
        elif mark == "bar":
            starts, ends = at("x1"), at("x2")
            if "x1" not in points[0]:
                starts = [stacked.get(place, 0.0) for place in at("y")]
                ends = [start + length for start, length in zip(starts, at("x"), strict=True)]
                stacked |= dict(zip(at("y"), ends, strict=True))
            widths = [end - start for start, end in zip(starts, ends, strict=True)]
            axes.barh(at("y"), widths, left=starts, height=0.8, color=colour, hatch=look["hatch"],
                      edgecolor="white", linewidth=0.3, label=name)  # fmt: skip


def _axes(axes: Axes, scales: Mapping[str, Mapping[str, Any]], places: Places) -> None:
    for name, axis in (("x", axes.xaxis), ("y", axes.yaxis)):
        scale = scales.get(name, {})
        if scale.get("label"):
            axis.set_label_text(str(scale["label"]))
        if scale.get("type") == "log":
            getattr(axes, f"set_{name}scale")("log")
            axis.set_major_formatter("{x:g}")
            axis.set_minor_formatter(partial(_minor_label, axis) if name == "x" else "")
        if name in places:
            texts = places[name]
            if name == "y" and isinstance(texts[0], tuple):
                rows = len(texts) // len({facet for facet, _ in texts})
                middles = [place + (rows - 1) / 2 for place in range(0, len(texts), rows)]
                axis.set_ticks(middles, [texts[int(middle)][0] for middle in middles])
            else:
                axis.set_ticks(range(len(texts)), texts)
            if name == "y":
                axes.set_ylim(len(texts) - 0.5, -0.5)
        elif scale.get("domain"):
            getattr(axes, f"set_{name}lim")(*scale["domain"])
        if scale.get("reverse"):
            axis.set_inverted(True)
        if scale.get("grid"):
            axis.grid(True, color="0.9", linewidth=0.5)
            axes.set_axisbelow(True)


def _minor_label(axis: Any, value: float, place: int) -> str:
    """Label a minor tick of a logarithmic axis; on a wide axis only some ticks, so that labels do not overlap."""
    low, high = sorted(axis.get_view_interval())
    labelled = "25" if high > 8 * low else "2357" if high > 3 * low else "23456789"
    return f"{value:g}" if f"{value:.0e}"[0] in labelled else ""


def figure_csv(chart: Chart) -> str:
    """Format the numbers of a chart as csv, a line per point: `layer` (number), its mark, and the point's values."""
    rows = [
        {"layer": place, "mark": layer["mark"], **{name: value for name, value in point.items() if name != "told"}}
        for place, layer in enumerate(chart["layers"], 1)
        for point in layer["points"]
        if isinstance(point, Mapping)
    ]
    return csv_text(rows)
