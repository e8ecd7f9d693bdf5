"""Joined tables in any of the formats, and on a terminal: columns that do not fit beside the others stand in further
panels below."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence

from rich.console import Console, Group
from rich.padding import Padding
from rich.text import Text

from specbench.errors import SpecbenchError, read_name
from specbench.papers.formats import (
    HERE,
    OWN,
    PAPER,
    records,
    table_csv,
    table_latex,
    table_markdown,
    table_parquet,
    text_table,
)
from specbench.papers.join import PaperTable
from specbench.system.json_values import json_text
from specbench.system.text_tables import COLUMN_GAP, TextCell, TextTable, packed, panel

TABLE_FORMATS = ("markdown", "csv", "latex", "json", "html", "parquet")
_KIND, _LONGEST_LABEL = 6, 32


def render_tables(tables: Sequence[PaperTable], fmt: str = "markdown", notes: bool = False) -> str | bytes:
    """The tables in one of `TABLE_FORMATS`, parquet as bytes. LaTeX has footnotes and definitions only with `notes`."""
    fmt = read_name("format", fmt, TABLE_FORMATS)
    if fmt == "json":
        return json_text(row for joined in tables for row in records(joined))
    if fmt == "html":
        from specbench.papers.html_page import tables_page  # brings jinja2 and matplotlib

        return tables_page(tables)
    if fmt == "markdown":
        return "\n".join(map(table_markdown, tables))
    if fmt == "latex":
        return "\n".join(table_latex(joined, notes) for joined in tables)
    if len(tables) > 1:
        raise SpecbenchError(f"--format {fmt} holds one table only", "name one table")
    return table_csv(tables[0]) if fmt == "csv" else table_parquet(tables[0])


def terminal(joined: PaperTable, console: Console) -> Group:
    """What to print on a console of any width."""
    table = text_table(joined, intervals_apart=True)
    labels = [*(row[0].text for row in table.rows), *(group for group, _ in table.groups if group)]
    headings = table.headings[table.labels :]
    widths = [
        max(*(len(row[place].text) for row in table.rows), *(len(word) for word in heading.split()))
        for place, heading in enumerate(headings, table.labels)
    ]
    longest = max(map(len, labels))
    whole = longest + _KIND + 2 * COLUMN_GAP + sum(width + COLUMN_GAP for width in widths)
    label = longest if whole <= console.width else min(longest, _LONGEST_LABEL)
    panels = []
    for chosen in packed(widths, console.width - label - _KIND - 2 * COLUMN_GAP):
        shown = {table.labels + place: widths[place] for place in chosen}
        drawn = panel(table.headings, {0: label, 1: _KIND, **shown}, _rows(table, shown), right=shown, dim=(1,))
        panels.append(Padding(drawn, (0, 0, 1, 0)))
    return Group(Text(table.title, style="bold"), Text(), *panels, *map(Text, table.notes))


def _rows(table: TextTable, places: Collection[int]) -> Iterator[tuple[Sequence[TextCell], str | None]]:
    """The printed lines, and the others that have a text at these places, each with its style."""
    for group, rows in table.groups:
        if group:
            yield [TextCell(group)], "italic"
        for row in rows:
            kind = row[1].text
            if kind == PAPER or any(row[place].text for place in places):
                yield row, "cyan" if kind in (HERE, OWN) else None
