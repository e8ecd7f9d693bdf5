"""Joined tables in any of the formats, and on a terminal: columns that do not fit beside the others stand in further
panels below."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from rich.console import Console, Group
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from specbench.errors import SpecbenchError, read_name
from specbench.papers.formats import (
    HERE,
    OWN,
    PAPER,
    below,
    records,
    table_csv,
    table_latex,
    table_markdown,
    table_parquet,
    text_table,
)
from specbench.papers.join import PaperTable
from specbench.reporting.text_formats import TextTable
from specbench.system.console import packed
from specbench.system.json_values import json_text

TABLE_FORMATS = ("markdown", "csv", "latex", "json", "html", "parquet")
_GAP, _KIND, _LONGEST_LABEL = 2, 6, 32


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
    labels = [*(line.cells[0] for line in table.lines), *(group for group, _ in table.groups if group)]
    headings = table.headings[table.labels :]
    widths = [
        max(*(len(line.cells[place]) for line in table.lines), *(len(word) for word in heading.split()))
        for place, heading in enumerate(headings, table.labels)
    ]
    longest = max(map(len, labels))
    whole = longest + _KIND + 2 * _GAP + sum(width + _GAP for width in widths)
    label = longest if whole <= console.width else min(longest, _LONGEST_LABEL)
    panels = [
        _panel(table, {table.labels + place: widths[place] for place in chosen}, label)
        for chosen in packed(widths, console.width - label - _KIND - 2 * _GAP)
    ]
    return Group(Text(joined.heading, style="bold"), Text(), *panels, *map(Text, below(joined)))


def _panel(table: TextTable, widths: Mapping[int, int], label: int) -> Padding:
    """The labels, in this width, and the columns at these places."""
    panel = Table(box=None, header_style="bold", padding=(0, _GAP, 0, 0), pad_edge=False)
    panel.add_column("", width=label, overflow="fold")
    panel.add_column("", width=_KIND, style="dim")
    for place, width in widths.items():
        panel.add_column(table.headings[place], width=width, justify="right", overflow="fold")
    for group, lines in table.groups:
        if group:
            panel.add_row(Text(group, style="italic"))
        for cells, bold in lines:
            if cells[1] == PAPER or any(cells[place] for place in widths):
                texts = (Text(cells[place], style="bold" if place in bold else "") for place in widths)
                style = "cyan" if cells[1] in (HERE, OWN) else None
                panel.add_row(Text(cells[0]), cells[1], *texts, style=style)
    return Padding(panel, (0, 0, 1, 0))
