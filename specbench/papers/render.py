"""Joined tables in any of the formats."""

from __future__ import annotations

from collections.abc import Sequence

from specbench.errors import SpecbenchError, read_name
from specbench.papers.formats import table_csv, table_json, table_latex, table_markdown, table_parquet
from specbench.papers.join import PaperTable

TABLE_FORMATS = ("markdown", "csv", "latex", "json", "html", "parquet")


def render_tables(tables: Sequence[PaperTable], fmt: str = "markdown", notes: bool = False) -> str | bytes:
    """The tables in one of `TABLE_FORMATS`, parquet as bytes. LaTeX has footnotes and definitions only with `notes`."""
    fmt = read_name("format", fmt, TABLE_FORMATS)
    if fmt == "json":
        return table_json(tables)
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
