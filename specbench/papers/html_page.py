"""Joined tables as one self-contained HTML page with notes and plots of figures."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

from specbench.papers.cells import Cell
from specbench.papers.formats import below, by_group, heading, texts
from specbench.papers.join import Line, PaperTable
from specbench.papers.table import Row
from specbench.reporting import charts
from specbench.reporting.html import scripts, template
from specbench.stats import Estimate

_WHERE = {"option": "options", "sampling": "sampling"}


def page(tables: Sequence[PaperTable]) -> str:
    """HTML page of tables and figures, without external resources."""
    shown = [_shown(joined) for joined in tables]
    return template("tables.html.jinja").render(
        title=", ".join(joined.table.name for joined in tables),
        tables=shown,
        **scripts([table["chart"] for table in shown if table["chart"]]),
    )


def _shown(joined: PaperTable) -> dict:
    curves = figure_curves(joined)
    return {
        "name": joined.table.name,
        "heading": joined.heading,
        "columns": [heading(column) for column in joined.table.columns],
        "groups": [(group, [texts(joined, line) for line in lines]) for group, lines in by_group(joined.lines)],
        "notes": below(joined),
        "chart": charts.figure_chart(curves, *_labels(joined)) if curves else None,
    }


def figure_curves(joined: PaperTable) -> list[charts.Curve]:
    """Curves of a figure: printed and measured points per group of rows; none with fewer than two of either."""
    axes, rows = joined.table.axes, list(zip(joined.table.rows, joined.lines, strict=True))
    curves = []
    for group in dict.fromkeys(line.group for line in joined.lines) if axes else ():
        members = [(row, line) for row, line in rows if line.group == group]
        for measured in (False, True):
            points = list(_points(axes, members, measured))
            if len(points) > 1:
                curves.append(charts.Curve(group or "", measured, points))
    return curves


def _points(axes: Mapping[str, str], members: Sequence[tuple[Row, Line]], measured: bool) -> Iterator[tuple]:
    for row, line in members:
        y = _estimate(line.cells[axes["y"]], measured)
        x = _place(axes["x"], row, line, measured)
        if x is not None and y is not None:
            yield x, y


def _place(axis: str, row: Row, line: Line, measured: bool) -> Estimate | str | None:
    """Position of a row on the x axis: a number, or a label."""
    kind, _, name = axis.partition(":")
    if axis == "model":
        return line.label
    if kind not in _WHERE:
        return _estimate(line.cells[axis], measured)
    value = row.settings[_WHERE[kind]].get(name)
    return Estimate(float(value), None, None) if isinstance(value, int | float) else value


def _estimate(cell: Cell, measured: bool) -> Estimate | None:
    if measured:
        return None if cell.value is None else Estimate(cell.value, cell.low, cell.high)
    return None if cell.paper is None else Estimate(cell.paper, None, None)


def _labels(joined: PaperTable) -> tuple[str, str]:
    headers = {column.name: column.header for column in joined.table.columns}
    x, y = (joined.table.axes[axis] for axis in ("x", "y"))
    return headers.get(x, x.partition(":")[2].replace("_", "-")), headers[y]
