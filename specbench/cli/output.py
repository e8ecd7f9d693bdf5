"""Print rows on stdout: as JSON, as a table that fits the terminal, or as markdown where there is none."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

from rich.box import MARKDOWN
from rich.console import Console
from rich.table import Table
from rich.text import Text

from specbench.specs.options import plain
from specbench.system import console
from specbench.system.console import fitted_distinct, one_line
from specbench.system.files import STDOUT
from specbench.system.json_values import json_text


def print_json(rows: Iterable[Mapping]) -> None:
    """Print rows as one JSON array on stdout."""
    sys.stdout.write(json_text(rows))


def write_or_print(content: str | bytes, to: Path | None) -> None:
    """Write to a file and print its path, or print on stdout."""
    if to is None:
        sys.stdout.write(content)
        return
    from specbench.system.files import write_output  # not for `list`

    write_output(to, content if isinstance(content, bytes) else content.encode("utf-8"))
    print_written(to)


def print_written(path: Path) -> None:
    """Print which file output was written to; nothing where it went to stdout itself."""
    if str(path) not in STDOUT:
        print(path)


def print_table(
    rows: Sequence[dict], columns: Sequence[str], kept: Sequence[str] = (), elsewhere: int | None = None
) -> None:
    """Print rows as a table on stdout: fitted to the width of a terminal, without empty columns, but for those `kept`;
    elsewhere as markdown, or fitted to the width `elsewhere`."""
    if not (console.is_terminal() or elsewhere):
        return print(markdown_table(rows, columns))
    width = console.stdout().width if console.is_terminal() else elsewhere
    values = {column: [row.get(column) for row in rows] for column in columns}
    texts = {name for name, held in values.items() if not all(isinstance(value, int | float | None) for value in held)}
    texts |= {name for name, held in values.items() if any(isinstance(value, bool) for value in held)}
    cells = [[_cell(row.get(column)) for column in columns] for row in rows]
    headings = [column.replace("_", " ") for column in columns]
    stay = [0, *(columns.index(name) for name in kept)]
    right = [place for place, column in enumerate(columns) if column not in texts]
    Console(highlight=False, width=width).print(fitted_distinct(headings, cells, width, stay, right=right))


def print_line(line: str) -> None:
    """Print a line on stdout, wrapped between words on a terminal."""
    if console.is_terminal():
        console.stdout().print(Text(line))
    else:
        print(line)


def markdown_table(rows: Sequence[dict], columns: Sequence[str]) -> str:
    """Rows as a table in markdown."""
    table = Table(box=MARKDOWN, header_style="bold", padding=(0, 1), pad_edge=True)
    for column in columns:
        table.add_column(column.replace("_", " "), overflow="fold")
    for row in rows:
        cells = (one_line(_cell(row.get(column))) for column in columns)
        table.add_row(*(Text(cell.replace("|", "\\|")) for cell in cells))
    screen = Console(width=1000)
    with screen.capture() as text:
        screen.print(table)
    return text.get().strip()


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
