"""Joined tables in any of the formats, and on a terminal: columns that do not fit beside the others stand in further
panels below."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence

import pyarrow as pa
from rich.console import Console, Group
from rich.padding import Padding
from rich.text import Text

from specbench.errors import SpecbenchError
from specbench.papers.formats import CELL_NUMBERS, HERE, OWN, PAPER, flat, records, text_table
from specbench.papers.join import PaperTable
from specbench.reporting.text_formats import csv_text
from specbench.store.image_scores import parquet_bytes
from specbench.system.json_values import json_text
from specbench.system.table_formats import FORMATS, format_name, writer
from specbench.system.text_tables import (
    COLUMN_GAP,
    LATEX_NEEDS,
    TextCell,
    TextTable,
    escape,
    latex_label,
    latex_table,
    markdown_table,
    packed,
    panel,
    tex,
)

_KIND, _LONGEST_LABEL = 6, 32


def render_tables(tables: Sequence[PaperTable], fmt: str = "markdown", notes: bool = False) -> str | bytes:
    """The tables in one of `FORMATS`, parquet as bytes. LaTeX has footnotes and definitions only with `notes`."""
    fmt = format_name("tables", fmt)
    if FORMATS[fmt].one_table and len(tables) > 1:
        raise SpecbenchError(f"--format {fmt} holds one table only", "name one table")
    return writer("tables", fmt)(tables, notes)


def tables_markdown(tables: Sequence[PaperTable], notes: bool = True) -> str:
    """Format as markdown: heading, table, footnotes, definitions, notes."""
    blocks = []
    for table in map(text_table, tables):
        below = "\n".join(f"- {escape(text)}" for text in table.notes)
        blocks.append(f"### {escape(table.title)}\n\n{markdown_table(table)}\n\n{below}\n")
    return "\n".join(blocks)


def tables_latex(tables: Sequence[PaperTable], notes: bool = False) -> str:
    """Format as a booktabs `tabular` in a `table*` each; with `notes`, footnotes and notes follow it."""
    blocks = []
    for joined in tables:
        table = text_table(joined, notes)
        with_model = "" if joined.table.whole else latex_label(None, *joined.table.notes).removeprefix("tab:specbench")
        blocks.append(LATEX_NEEDS + latex_table(table, f"tab:{joined.table.name}{with_model}", wide=True))
        foot = "\n\n".join(map(tex, table.notes))
        blocks[-1] += f"\n{{\\footnotesize\n{foot}\n\n}}\n" if notes else ""
    return "\n".join(blocks)


def tables_csv(tables: Sequence[PaperTable], notes: bool = True) -> str:
    """Format one table as csv, one line per row; columns "NAME paper", "NAME measured" and so on."""
    return csv_text(flat(*tables))


def tables_json(tables: Sequence[PaperTable], notes: bool = True) -> str:
    """Format as one JSON array of the tables' `records`."""
    return json_text(row for joined in tables for row in records(joined))


def tables_parquet(tables: Sequence[PaperTable], notes: bool = True) -> bytes:
    """Format one table as parquet with the columns of csv; its description is in the file's metadata."""
    [joined] = tables
    rows = flat(joined)
    fields = [(name, _arrow(name)) for name in rows[0]]
    about = {"specbench.table": joined.table.name, "specbench.heading": joined.heading}
    about["specbench.notes"] = "\n".join(text_table(joined).notes)
    return parquet_bytes(pa.Table.from_pylist(rows, schema=pa.schema(fields, metadata=about)))


def tables_html(tables: Sequence[PaperTable], notes: bool = True) -> str:
    """Format as a page, see `specbench.papers.html_page`."""
    from specbench.papers.html_page import tables_page  # brings jinja2 and matplotlib

    return tables_page(tables)


def _arrow(name: str) -> pa.DataType:
    if name.endswith(tuple(f" {key}" for key in CELL_NUMBERS)):
        return pa.float64()
    return pa.int64() if name == "images" or name.endswith(" n") else pa.string()


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
