"""Joined tables as one self-contained HTML page, with notes and the plots of figures."""

from collections.abc import Mapping, Sequence
from itertools import product
from typing import Any

from specbench.papers.cells import Cell
from specbench.papers.formats import by_group, row_texts, text_table
from specbench.papers.join import Line, PaperTable
from specbench.papers.table import Row
from specbench.reporting import charts
from specbench.reporting.html import data_url, scripts, template
from specbench.reporting.image_tiles import mean_map, share_picture
from specbench.stats import Estimate

_WHERE = {"option": "options", "sampling": "sampling"}
_MAP_NAMES = {"accepted": "accepted drafts", "top1": "top-1 of p", "draft_top1": "top-1 of q", "draft_tv": "TV(p, q)"}


def tables_page(tables: Sequence[PaperTable]) -> str:
    """Make the HTML page of tables and figures, without external resources."""
    shown = [_shown(joined) for joined in tables]
    return template("tables.html.jinja").render(
        title=", ".join(joined.table.name for joined in tables),
        tables=shown,
        **scripts([chart for table in shown for chart in table["charts"]]),
    )


def _shown(joined: PaperTable) -> dict[str, Any]:
    maps = [
        {"name": f"{line.label}: {_MAP_NAMES[name]}", "picture": data_url(share_picture(values))}
        for line in joined.lines
        for folder, name in product(line.folders, joined.table.maps)
        if (values := mean_map(folder, name)) is not None
    ]
    empty = dict.fromkeys(_labels(joined, axes)[1] for axes in joined.table.axes if not figure_curves(joined, axes))
    undrawn = [f"{name} is not drawn: neither the paper nor a run has numbers for it." for name in empty]
    if joined.table.maps and not maps:
        names = ", ".join(_MAP_NAMES[name] for name in joined.table.maps)
        undrawn.append(f"No map of {names}: the paper prints only a picture, and no run has the map.")
    table = text_table(joined)
    return {
        "name": joined.table.name,
        "heading": table.title,
        "columns": table.headings[table.labels :],
        "groups": [(group, [row_texts(joined, line) for line in lines]) for group, lines in by_group(joined.lines)],
        "notes": table.notes,
        "charts": figure_charts(joined),
        "undrawn": undrawn,
        "maps": maps,
    }


def figure_charts(joined: PaperTable) -> list[charts.Chart]:
    """Return the panels of a paper's figure that have points."""
    return [
        charts.figure_chart(curves, *_labels(joined, axes), _order(joined, axes))
        for axes in joined.table.axes
        if (curves := figure_curves(joined, axes))
    ]


def figure_curves(joined: PaperTable, axes: Mapping[str, str]) -> list[charts.Curve]:
    """Return the curves of a panel of a figure: printed and measured points per group of rows."""
    rows = list(zip(joined.table.rows, joined.lines, strict=True))
    curves = []
    for group, measured in product(dict.fromkeys(line.group for line in joined.lines), (False, True)):
        places = [
            (_place(axes["x"], row, line, measured), _estimate(line.cells[axes["y"]], measured))
            for row, line in rows
            if line.group == group
        ]
        if points := [(x, y) for x, y in places if x is not None and y is not None]:
            curves.append(charts.Curve(group or "", measured, points))
    return curves


def _place(axis: str, row: Row, line: Line, measured: bool) -> Estimate | str | None:
    """Return the position of a row on an axis: a number, or a label."""
    kind, _, name = axis.partition(":")
    if axis == "model":
        return line.label
    if kind not in _WHERE:
        return _estimate(line.cells[axis], measured)
    value = getattr(row.settings, _WHERE[kind]).get(name)
    return Estimate(float(value)) if isinstance(value, int | float) else value


def _estimate(cell: Cell, measured: bool) -> Estimate | None:
    if not measured:
        return None if cell.paper is None else Estimate(cell.paper)
    if cell.value is None:
        return None
    return Estimate(cell.value, cell.low, cell.high)


def _labels(joined: PaperTable, axes: Mapping[str, str]) -> tuple[str, str]:
    headers = {column.name: column.header for column in joined.table.columns}
    return headers.get(axes["x"], axes["x"].partition(":")[2].replace("_", "-")), headers[axes["y"]]


def _order(joined: PaperTable, axes: Mapping[str, str]) -> list[str]:
    """Return the labels on the x axis, in the order of the rows."""
    rows = zip(joined.table.rows, joined.lines, strict=True)
    return [x for row, line in rows if isinstance(x := _place(axes["x"], row, line, False), str)]
