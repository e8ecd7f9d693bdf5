"""Print rows on stdout: as JSON, as a table that fits the terminal, or as markdown where there is none."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence

from rich.box import MARKDOWN
from rich.console import Console
from rich.table import Table
from rich.text import Text

from specbench.specs.options import plain
from specbench.system import console
from specbench.system.console import fitted_distinct, one_line
from specbench.system.json_values import nonfinite_as_null


def print_json(rows: Iterable[dict]) -> None:
    """Print rows as one JSON array on stdout; NaN and infinity become null, other types text."""
    print(json.dumps(nonfinite_as_null(list(rows)), indent=2, ensure_ascii=False, allow_nan=False, default=str))


def print_table(
    rows: Sequence[dict], columns: Sequence[str], kept: Sequence[str] = (), elsewhere: int | None = None
) -> None:
    """Print rows as a table on stdout: fitted to the width of a terminal, without empty columns; as markdown
    elsewhere.

    Args:
        kept: columns that stand in the table even where all rows agree, besides the first.
        elsewhere: width to fit the table to where there is no terminal, instead of markdown.
    """
    if console.is_terminal() or elsewhere:
        width = console.stdout().width if console.is_terminal() else elsewhere
        return _print_fitted(rows, columns, kept, width)
    markdown = Console(width=1000)
    with markdown.capture() as text:
        markdown.print(_markdown(rows, columns))
    print(text.get().strip())


def _print_fitted(rows: Sequence[dict], columns: Sequence[str], kept: Sequence[str], width: int) -> None:
    cells = [[_cell(row.get(column)) for column in columns] for row in rows]
    numeric = [place for place, column in enumerate(columns) if all(_numeric(row.get(column)) for row in rows)]
    screen = Console(highlight=False, width=width)
    headings = [column.replace("_", " ") for column in columns]
    stay = [0, *(columns.index(name) for name in kept)]
    screen.print(fitted_distinct(headings, cells, width, stay, right=numeric))


def _numeric(value: object) -> bool:
    return value is None or (isinstance(value, int | float) and not isinstance(value, bool))


def _markdown(rows: Sequence[dict], columns: Sequence[str]) -> Table:
    table = Table(box=MARKDOWN, header_style="bold", padding=(0, 1), pad_edge=True)
    for column in columns:
        table.add_column(column.replace("_", " "), overflow="fold")
    for row in rows:
        cells = (one_line(_cell(row.get(column))) for column in columns)
        table.add_row(*(Text(cell.replace("|", "\\|")) for cell in cells))
    return table


def _cell(value: object) -> str:
    if value is None:
        return "-"
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, dict):
        return ", ".join(f"{key}={plain(item)}" for key, item in value.items()) or "-"
    if isinstance(value, list | tuple):
        return ", ".join(map(str, value)) or "-"
    return plain(value)
