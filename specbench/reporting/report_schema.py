"""Columns of reports, from `report_schema.toml`; its numbers are described by `specbench.stats.NUMBERS`."""

import tomllib
from pathlib import Path
from typing import Any

from specbench.stats import NUMBERS, Number
from specbench.store import schema

_TABLES = tomllib.loads(Path(__file__).with_suffix(".toml").read_text(encoding="utf-8"))
KEYS = tuple(_TABLES["report"].pop("keys").split())
"""Order of the keys of a report row in JSON and CSV; other keys follow."""


def _with_numbers(columns: str) -> str:
    """Expand the names of numbers in the text `columns` to lines with their columns; append numbers not named in it."""
    lines = [part for line in columns.splitlines() for part in ([line] if "|" in line else line.split(", "))]
    lines += [name for name in NUMBERS if name not in lines]
    return "".join(_columns_of(NUMBERS[line]) if line in NUMBERS else f"{line}\n" for line in lines)


def _columns_of(number: Number[..., Any]) -> str:
    meanings = {"": number.definition.partition(": ")[2].removesuffix(".")}
    meanings |= {"_low": "lower end of its 95 % interval", "_high": "upper end"} if number.bounded else {}
    return "".join(f"{number.name}{end} | {number.type} | {number.unit} | {text}\n" for end, text in meanings.items())


REPORT = schema.declared("report", _with_numbers(_TABLES["report"]["columns"]))
LONG_REPORT = schema.declared("numbers", _TABLES["numbers"]["columns"])
REPORT_TABLES = schema.TABLES | {"report": REPORT, "numbers": LONG_REPORT, "samples": schema.IMAGE_TABLE}
"""{name: schema} of all declared tables, including tables that are not files."""
