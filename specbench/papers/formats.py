"""Joined tables as input of writers: tables of texts, or records.

In a table of texts, a row has up to three lines: printed, measured, difference.
"""

from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import groupby
from operator import attrgetter
from typing import Any

from specbench.errors import unknown_name
from specbench.metrics.catalog import bundled_metrics
from specbench.papers.cells import OVER_BASELINE, Cell
from specbench.papers.join import Line, PaperTable, definition, plain_name
from specbench.papers.table import SCORE, Column, Table
from specbench.reporting.columns import FEW_PROMPTS, MISSING, TOO_FEW, between, number
from specbench.reporting.row import ARROWS, typed_heading
from specbench.stats import RULE
from specbench.system.text_tables import TextCell, TextTable

PAPER, HERE, OWN, INTERVAL, DIFFERENCE = "paper", "here", "own", "95 %", "diff."
OWN_ROWS = f"Rows marked {OWN} are not in the paper: they were added here and measured like the other rows."
BOLD = (
    "Bold: printed values that are bold in the paper (if its text marks them), and the best measured value of a group "
    "and column, if its difference from AR is real. Only the speed-up and scores other than distances to "
    f"reference images are tested; other measured values are never bold. {RULE}"
)
LEGEND = "A difference marked * is real: the paper's value lies outside the measured 95 % interval."
CELL_NUMBERS = ("paper", "spread", "measured", "low", "high", "difference")


def text_table(joined: PaperTable, defined: bool = True, intervals_apart: bool = False) -> TextTable:
    """Convert the joined table to texts (see `row_texts`), with footnotes and, if `defined`, definitions and notes."""
    headings = ["", "", *map(heading, joined.table.columns)]
    groups = [
        (group, [line for row in members for line in row_texts(joined, row, intervals_apart)])
        for group, members in by_group(joined.lines)
    ]
    table = TextTable(headings, groups, labels=2, title=joined.heading)
    return replace(table, notes=_below(joined, table.marked, defined))


def only_columns(joined: PaperTable, names: Sequence[str]) -> PaperTable:
    """Select columns of the joined table, in the order of `names`. A name (in any case) is a heading of the table, the
    name of a number in reports ("NFE"), or the name of a column, number or metric in the table's file. The column of
    speed-ups over a baseline always stays."""
    usual, by_name = _columns_by_name(joined.table)
    names = [*names, *(name for name in (OVER_BASELINE,) if name in by_name and name not in names)]
    for name in names:
        if typed_heading(name) not in by_name:
            raise unknown_name("column", name, usual)
    columns = tuple(by_name[typed_heading(name)] for name in names)
    cells = ({column.name: line.cells[column.name] for column in columns} for line in joined.lines)
    return replace(
        joined,
        table=replace(joined.table, columns=columns),
        lines=tuple(replace(line, cells=kept) for line, kept in zip(joined.lines, cells, strict=True)),
        definitions=tuple(map(definition, columns)),
    )


def check_columns(table: Table, names: Sequence[str], other_model: bool) -> None:
    """Reject a name that `only_columns` will not find after the table is measured: no column of the table, and, for
    another model than the paper's, no metric that may be added."""
    usual, by_name = _columns_by_name(table)
    added = [
        text
        for name in (bundled_metrics() if other_model else ())
        for text in (name.lower(), name.lower().replace("-", " "))
    ]
    for name in names:
        typed = typed_heading(name)
        if typed not in by_name and typed != OVER_BASELINE and not typed.startswith(tuple(added)):
            raise unknown_name("column", name, usual)


def _columns_by_name(table: Table) -> tuple[dict[str, Column], dict[str, Column]]:
    """Return the columns by their usual names, and by every name that `only_columns` accepts."""
    usual = {plain_name(column): column for column in table.columns}
    by_name = {
        text.lower(): column
        for column in table.columns
        for text in (column.key.removeprefix(SCORE), column.key, column.header, column.name)
    }
    return usual, by_name | usual


def records(joined: PaperTable) -> list[dict[str, Any]]:
    """Return a dict per row: `table, group, label, runs, images, notes, chosen`, and `cells`, which maps each column
    name to a dict of `header, paper, spread, measured, low, high, difference, n, why, notes`."""
    return [
        {
            "table": joined.table.name,
            "group": line.group,
            "label": line.label,
            "runs": list(line.runs),
            "images": line.images,
            "notes": list(line.notes),
            **({"own": True} if line.own else {}),
            "chosen": list(line.chosen),
            "cells": {
                column.name: {"header": column.header, **_plain(line.cells[column.name])}
                for column in joined.table.columns
            },
        }
        for line in joined.lines
    ]


def flat(joined: PaperTable) -> list[dict[str, object]]:
    """Return records with flattened cells: "NAME paper", "NAME measured", ..., "NAME n", "NAME why"."""
    rows = []
    for record in records(joined):
        row = {name: value for name, value in record.items() if name not in ("cells", "runs", "notes", "chosen", "own")}
        notes = dict.fromkeys((*record["notes"], *record["chosen"]))
        row |= {"runs": " ".join(record["runs"]), "notes": " ".join(notes)}
        for name, cell in record["cells"].items():
            row |= {f"{name} {key}": cell[key] for key in (*CELL_NUMBERS, "n", "why")}
        rows.append(row)
    return rows


def by_group(lines: Sequence[Line]) -> Iterator[tuple[str | None, list[Line]]]:
    """Yield each group's name with its consecutive lines."""
    return ((group, list(members)) for group, members in groupby(lines, key=attrgetter("group")))


def row_texts(joined: PaperTable, line: Line, intervals_apart: bool = False) -> list[list[TextCell]]:
    """Return the text lines of a row: label (only in the first line), kind of value, a text for each column. Lines
    without values are omitted, except the printed line of a row without any values."""
    notes, columns = joined.footnotes, joined.table.columns
    cells = [(column, line.cells[column.name]) for column in columns]
    some = any(cell.low is not None for other in joined.lines for cell in other.cells.values())
    if not some and not joined.table.whole:  # a note below the table gives the reason
        cells = [(column, replace(cell, too_few=False)) for column, cell in cells]
    kinds = {
        PAPER: [_printed(column, cell) + _marks(cell.printed_notes, notes) for column, cell in cells],
        HERE: [_value(column, cell, not intervals_apart) + _marks(cell.notes, notes) for column, cell in cells],
        INTERVAL: [_bounds(column, cell) if intervals_apart else "" for column, cell in cells],
        DIFFERENCE: [_difference(column, cell) for column, cell in cells],
    }
    if line.images is None:
        kind = PAPER if joined.table.whole and joined.table.paper else HERE
        kinds = {kind: kinds[kind]}
    shown = {kind: values for kind, values in kinds.items() if kind in (PAPER, HERE) or any(values)}
    if HERE in shown and all(text == MISSING for text in shown.get(PAPER, ("",))):
        del shown[PAPER]  # most figures print no values
    label = line.label + _marks(line.notes, notes)
    part = "" if line.expected is None else f"{line.images:,} of {line.expected:,} images"
    labels = {HERE: part} | {next(iter(shown)): label}
    if part and PAPER not in shown:
        labels[HERE] = f"{label}, {part}"
    bold = {
        PAPER: [cell.bold for _, cell in cells],
        HERE: [line in _best_measured(joined, line.group, column) for column in columns],
    }
    unmarked = [False] * len(cells)
    return [
        [
            TextCell(labels.get(kind, "")),
            TextCell(OWN if line.own and kind == HERE else kind),
            *map(TextCell, values, bold.get(kind, unmarked)),
        ]
        for kind, values in shown.items()
    ]


def _best_measured(joined: PaperTable, group: str | None, column: Column) -> list[Line]:
    """Return the rows with the best measured value of a group, if this value is tested and differs from AR's."""
    pairs = [(line, line.cells[column.name]) for line in joined.lines if line.group == group]
    values = [cell.value for _, cell in pairs if cell.value is not None]
    if column.better is None or not values:
        return []
    top = max(values) if column.better == "higher" else min(values)
    return [line for line, cell in pairs if cell.value == top and cell.real]


def _below(joined: PaperTable, bold: bool, defined: bool) -> list[str]:
    """Return footnotes and, if `defined`, definitions and notes, one line each. `bold`: whether any cell is bold."""
    notes = [f"{_superscript(place)} {text}" for place, text in enumerate(joined.footnotes, 1)]
    marked = any(cell.outside for line in joined.lines for cell in line.cells.values())
    few = any(cell.too_few for line in joined.lines for cell in line.cells.values())
    added = any(line.own for line in joined.lines) and joined.table.paper
    legend = [text for text, used in ((OWN_ROWS, added), (LEGEND, marked), (BOLD, bold), (FEW_PROMPTS, few)) if used]
    return [*notes, *legend, *((*joined.definitions, *joined.remarks) if defined else ())]


def heading(column: Column) -> str:
    return column.header + (f"\u00a0{ARROWS[column.better]}" if column.better else "")


def _printed(column: Column, cell: Cell) -> str:
    spread = "" if cell.spread is None else f" ({_exactly(cell.spread, column)})"
    return (MISSING if cell.paper is None else _exactly(cell.paper, column)) + spread


def _exactly(value: float, column: Column) -> str:
    """Format a printed value with as many decimals as the paper prints."""
    return number(value, 0 if isinstance(value, int) else getattr(value, "decimals", column.precision))


def _value(column: Column, cell: Cell, with_bounds: bool) -> str:
    if cell.value is None:
        return cell.why or MISSING
    bounds = _bounds(column, cell) if with_bounds else ""
    return number(cell.value, column.precision) + cell.mark + (f" [{bounds}]" if bounds else "")


def _bounds(column: Column, cell: Cell) -> str:
    if cell.too_few:
        return TOO_FEW
    if cell.low is None or cell.high is None:
        return ""
    return between(cell.low, cell.high, column.precision)


def _difference(column: Column, cell: Cell) -> str:
    if cell.difference is None:
        return ""
    return f"{cell.difference:+,.{column.precision}f}{'*' if cell.outside else ''}"


def _marks(notes: Sequence[str], footnotes: Sequence[str]) -> str:
    shown = [_superscript(footnotes.index(note) + 1) for note in notes if note in footnotes]
    return " " + ",".join(shown) if shown else ""


def _superscript(place: int) -> str:
    return str(place).translate(str.maketrans("0123456789", "⁰¹²³⁴⁵⁶⁷⁸⁹"))


def _plain(cell: Cell) -> dict[str, object]:
    numbers = (cell.paper, cell.spread, cell.value, cell.low, cell.high, cell.difference)
    marked = {"differs_from_baseline": True} if cell.mark else {}
    notes = [*cell.printed_notes, *cell.notes]
    return dict(zip(CELL_NUMBERS, numbers, strict=True)) | {"n": cell.n, "why": cell.why, **marked, "notes": notes}
