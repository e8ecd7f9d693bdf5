"""Report rows as text: markdown for people (definitions below), csv and json for programs."""

from __future__ import annotations

import csv
import io
import json
import math
from collections.abc import Callable, Mapping, Sequence

from specbench.errors import unknown_name
from specbench.reporting.columns import Column
from specbench.reporting.sections import circumstances, definitions, sections
from specbench.system.console import printable


def render(rows: Sequence[Mapping], fmt: str = "markdown") -> str:
    """The rows of `report_rows` in one of `FORMATS`.

    Raises:
        SpecbenchError: unknown format.
    """
    if fmt not in FORMATS:
        raise unknown_name("format", fmt, FORMATS)
    return FORMATS[fmt](rows)


def markdown(rows: Sequence[Mapping]) -> str:
    """Tables of speed and of quality for each setting, then what every column means, then the machine."""
    blocks, found = [], sections(rows)
    for section in found:
        blocks.append(f"### {_prose(section.heading)}")
        for table in section.tables:
            blocks += [f"{escape(table.title)}:"] if table.title else []
            blocks.append(_table(table.columns, section.runs))
            blocks += [_prose(table.remark)] if table.remark else []
    blocks.append("\n".join(f"- {_prose(text)}" for text in definitions(found)))
    blocks.append("\n".join(_prose(text) for text in circumstances(rows)))
    return "\n\n".join(block for block in blocks if block) + "\n"


def to_json(rows: Sequence[Mapping]) -> str:
    """One JSON array; what is missing or infinite is null."""
    return json.dumps(finite(list(rows)), indent=2, ensure_ascii=False, allow_nan=False) + "\n"


def to_csv(rows: Sequence[Mapping]) -> str:
    """One line per run; nested values as JSON, each score in a column of its own."""
    flat = [_flat(row) for row in rows]
    names = list(dict.fromkeys(name for row in flat for name in row))
    text = io.StringIO()
    writer = csv.DictWriter(text, names, restval="", lineterminator="\n")
    writer.writeheader()
    writer.writerows(flat)
    return text.getvalue()


FORMATS: dict[str, Callable[[Sequence[Mapping]], str]] = {
    "markdown": markdown,
    "csv": to_csv,
    "json": to_json,
}


def finite(value):
    """`value` with every number JSON cannot hold replaced by None."""
    if isinstance(value, Mapping):
        return {key: finite(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [finite(item) for item in value]
    if isinstance(value, float) and not math.isfinite(value):
        return None
    return value


def _table(columns: Sequence[Column], rows: Sequence[Mapping]) -> str:
    lines = [
        " | ".join(escape(column.heading) for column in columns),
        " | ".join("---" if index == 0 else "---:" for index in range(len(columns))),
        *(" | ".join(escape(column.cell(row)) for column in columns) for row in rows),
    ]
    return "\n".join(f"| {line} |" for line in lines)


def escape(text: str) -> str:
    """Text as a cell of a markdown table."""
    return _prose(str(text).replace("\\", "\\\\").replace("|", "\\|"))


def _prose(text: str) -> str:
    """Text as one line of markdown outside tables; no tag in it is one."""
    return " ".join(printable(str(text)).split()).replace("<", "&lt;")


def _flat(row: Mapping) -> dict[str, object]:
    flat = {}
    for name, value in finite(row).items():
        if name == "scores":
            flat |= {f"score {score['metric']} {score['fingerprint']}": score["value"] for score in value}
        elif isinstance(value, dict | list):
            flat[name] = json.dumps(value, sort_keys=True, ensure_ascii=False)
        else:
            flat[name] = inert(value)
    return flat


def inert(value: object) -> object:
    """Text that a spreadsheet would run as a formula, made plain text."""
    return f"'{value}" if isinstance(value, str) and value[:1] in ("=", "+", "-", "@", "\t") else value
