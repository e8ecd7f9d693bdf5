"""Formats of tables: endings of files, the kinds of output that are written in them, and what else they can hold.

Nothing heavy is imported: commands list and refuse formats before any work. The writer of a format is the function
`OUTPUT_FORMAT`, such as `report_csv`, in the module of its kind of output.
"""

from __future__ import annotations

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
"""Where the writers of each kind of output are: reports of runs, papers' tables, two runs compared, and runs over
their seeds (`report --over`)."""


@dataclass(frozen=True)
class Format:
    """Uses of a format."""

    endings: tuple[str, ...]  # of files; the first is also a name of the format
    outputs: tuple[str, ...]  # keys of `_MODULES`; every other kind of output refuses the format
    to_file: bool = False  # not for a terminal
    columns: bool = False  # whether the columns of a report can be chosen
    long: bool = False  # whether a report can have a row per run and number
    one_table: bool = False  # whether it holds only one of the papers' tables


FORMATS = {
    "markdown": Format(("md", "txt"), tuple(_MODULES), columns=True),
    "csv": Format(("csv",), ("report", "tables"), long=True, one_table=True),
    "latex": Format(("tex",), tuple(_MODULES), columns=True),
    "json": Format(("json",), tuple(_MODULES), long=True),
    "html": Format(("html", "htm"), ("report", "tables"), to_file=True),
    "parquet": Format(("parquet",), ("report", "tables"), to_file=True, long=True, one_table=True),
}


def formats_with(fact: str) -> list[str]:
    """The formats of a kind of output, or whose field `fact` is true."""
    return [name for name, form in FORMATS.items() if fact in form.outputs or getattr(form, fact, False)]


def format_name(output: str, name: str) -> str:
    """The format that a typed name means for a kind of output."""
    formats = formats_with(output)
    return read_name("format", name, formats, {name: FORMATS[name].endings[:1] for name in formats})


def writer(output: str, name: str) -> Callable[..., Any]:
    """Import the writer of a format for a kind of output."""
    return getattr(importlib.import_module(f"specbench.{_MODULES[output]}"), f"{output}_{name}")
