"""Print rows on stdout: as JSON, as a table on a terminal, or as markdown if stdout is no terminal."""

import sys
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.text import Text

from specbench.specs.options import plain
from specbench.system import console
from specbench.system.files import STDOUT
from specbench.system.json_values import json_text
from specbench.system.text_tables import distinct_columns, markdown_table, plain_table, terminal_table


def print_json(rows: Iterable[Mapping[str, Any]]) -> None:
    """Print rows as one JSON array on stdout."""
    sys.stdout.write(json_text(rows))


def write_or_print(content: str | bytes, to: Path | None) -> None:
    """Write to a file and print its path, or print on stdout."""
    if to is None:
        sys.stdout.write(str(content))  # binary formats require a file
        return
    from specbench.system.files import write_output  # `list` does not need it

    write_output(to, content if isinstance(content, bytes) else content.encode("utf-8"))
    print_written(to)


def print_written(path: Path) -> None:
    """Print the path of a written file; print nothing for stdout."""
    if str(path) not in STDOUT:
        print(path)


def print_table(
    rows: Sequence[Mapping[str, Any]], columns: Sequence[str], kept: Sequence[str] = (), elsewhere: int | None = None
) -> None:
    """Print rows as a table on stdout. On a terminal, the table fits the width and omits empty columns except `kept`.
    Without a terminal, it is markdown, or a table of the width `elsewhere` if given."""
    headings = {column: column.replace("_", " ") for column in columns}
    table = plain_table([*headings.values()], [[_cell(row.get(column)) for column in columns] for row in rows])
    width = console.stdout().width if console.is_terminal() else elsewhere
    if width is None:
        return print(markdown_table(table, aligned=True))
    numeric = (int, float, type(None))
    left = [
        heading
        for column, heading in headings.items()
        if any(isinstance(row.get(column), bool) or not isinstance(row.get(column), numeric) for row in rows)
    ]
    table = distinct_columns(table, [headings[name] for name in (columns[0], *kept)])
    Console(highlight=False, width=width).print(terminal_table(table, width, left))


def print_line(line: str) -> None:
    """Print a line on stdout, wrapped between words on a terminal."""
    if console.is_terminal():
        console.stdout().print(Text(line))
    else:
        print(line)


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
