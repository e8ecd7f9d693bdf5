"""Formats of tables: file suffixes, kinds of output, and options that a format supports.

Imports are light, because commands list and reject formats before any work. The writer of a format is the function
`OUTPUT_FORMAT`, such as `report_csv`, in the module of its kind of output.
"""

import importlib
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from specbench.errors import read_name

_MODULES = {
    "report": "reporting.text_formats",
    "tables": "papers.render",
    "comparison": "reporting.text_formats",
    "over": "reporting.over",
}
"""{kind of output: module of its writers}: reports of runs, papers' tables, comparisons of two runs, and runs pooled
over seeds (`report --over`)."""


@dataclass(frozen=True)
class Format:
    """Capabilities of a format."""

    endings: tuple[str, ...]  # file suffixes; the first one also names the format
    outputs: tuple[str, ...]  # supported kinds of output: keys of `_MODULES`
    to_file: bool = False  # whether it is only written to files
    columns: bool = False  # whether the columns of a report can be chosen
    long: bool = False  # whether a report can have a row per run and number
    one_table: bool = False  # whether a file holds only one paper's table


FORMATS = {
    "markdown": Format(("md", "txt"), tuple(_MODULES), columns=True),
    "csv": Format(("csv",), ("report", "tables"), long=True, one_table=True),
    "latex": Format(("tex",), tuple(_MODULES), columns=True),
    "json": Format(("json",), tuple(_MODULES), long=True),
    "html": Format(("html", "htm"), ("report", "tables"), to_file=True),
    "parquet": Format(("parquet",), ("report", "tables"), to_file=True, long=True, one_table=True),
}


def formats_with(fact: str) -> list[str]:
    """List the formats of a kind of output, or the formats whose field `fact` is true."""
    return [name for name, form in FORMATS.items() if fact in form.outputs or getattr(form, fact, False)]


def format_name(output: str, name: str) -> str:
    """Return the format with this name or synonym; reject formats that the kind of output does not support."""
    formats = formats_with(output)
    return read_name("format", name, formats, {name: FORMATS[name].endings[:1] for name in formats})


def writer(output: str, name: str) -> Callable[..., Any]:
    """Import the writer of a format for a kind of output."""
    return getattr(importlib.import_module(f"specbench.{_MODULES[output]}"), f"{output}_{name}")
