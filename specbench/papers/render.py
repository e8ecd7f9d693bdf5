"""Joined tables in any of the formats."""

from __future__ import annotations

from collections.abc import Sequence

from specbench.errors import SpecbenchError, unknown_name
from specbench.papers.formats import latex, markdown, to_csv, to_json, to_parquet
from specbench.papers.join import PaperTable

FORMATS = ("markdown", "csv", "latex", "json", "html", "parquet")


def render_tables(tables: Sequence[PaperTable], fmt: str = "markdown") -> str | bytes:
    """The tables in one of `FORMATS`; bytes for parquet.

    Raises:
        SpecbenchError: unknown format, or one that holds a single table.
    """
    if fmt not in FORMATS:
        raise unknown_name("format", fmt, FORMATS)
    if fmt == "json":
        return to_json(tables)
    if fmt == "html":
        from specbench.papers.html_page import tables_page  # brings jinja2 and matplotlib

        return tables_page(tables)
    if fmt in ("markdown", "latex"):
        return "\n".join(map(markdown if fmt == "markdown" else latex, tables))
    if len(tables) > 1:
        raise SpecbenchError(f"--format {fmt} holds one table only", "name one table")
    return to_csv(tables[0]) if fmt == "csv" else to_parquet(tables[0])
