"""Write joined tables in each format, and lay them out on a terminal."""

from collections.abc import Sequence
from dataclasses import replace

import pyarrow as pa
from rich.console import Console, Group
from rich.text import Text

from specbench.errors import SpecbenchError
from specbench.papers.formats import CELL_NUMBERS, flat, records, text_table
from specbench.papers.join import PaperTable
from specbench.reporting.text_formats import csv_text
from specbench.store.image_scores import parquet_bytes
from specbench.system.json_values import json_text
from specbench.system.table_formats import FORMATS, format_name, writer
from specbench.system.text_tables import (
    LATEX_NEEDS,
    escape,
    latex_label,
    latex_table,
    markdown_table,
    terminal_table,
    tex,
)


def render_tables(tables: Sequence[PaperTable], fmt: str = "markdown", notes: bool = False) -> str | bytes:
    """Render the tables in one of `FORMATS`; parquet gives bytes. LaTeX omits definitions unless `notes` is true."""
    fmt = format_name("tables", fmt)
    if FORMATS[fmt].one_table and len(tables) > 1:
        raise SpecbenchError(f"--format {fmt} can hold only one table", "name one table")
    return writer("tables", fmt)(tables, notes)


def tables_markdown(tables: Sequence[PaperTable], notes: bool = True) -> str:
    """Format as markdown: heading, table, footnotes, definitions, notes."""
    blocks = []
    for table in map(text_table, tables):
        below = "\n".join(f"- {escape(text)}" for text in table.notes)
        blocks.append(f"### {escape(table.title)}\n\n{markdown_table(table)}\n\n{below}\n")
    return "\n".join(blocks)


def tables_latex(tables: Sequence[PaperTable], notes: bool = False) -> str:
    """Format each table as a booktabs `tabular` in a `table*`, then its footnotes, with `notes` also definitions."""
    blocks = []
    for joined in tables:
        table = text_table(joined, notes)
        with_model = "" if joined.table.whole else latex_label(None, *joined.table.notes).removeprefix("tab:specbench")
        blocks.append(LATEX_NEEDS + latex_table(table, f"tab:{joined.table.name}{with_model}", wide=True))
        foot = "\n\n".join(map(tex, table.notes))
        blocks[-1] += f"\n{{\\footnotesize\n{foot}\n\n}}\n" if foot else ""
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
    from specbench.papers.html_page import tables_page  # imports jinja2 and matplotlib

    return tables_page(tables)


def _arrow(name: str) -> pa.DataType:
    if name.endswith(tuple(f" {key}" for key in CELL_NUMBERS)):
        return pa.float64()
    return pa.int64() if name == "images" or name.endswith(" n") else pa.string()


def terminal(joined: PaperTable, console: Console) -> Group:
    """Lay out a joined table for the width of a terminal."""
    table = text_table(joined, intervals_apart=True)
    shown = terminal_table(replace(table, title="", notes=()), console.width, dim=(1,))
    return Group(Text(table.title, style="bold"), Text(), shown, Text(), *map(Text, table.notes))
