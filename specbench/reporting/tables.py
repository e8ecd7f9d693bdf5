"""Report rows as text: markdown for people (definitions below), csv and json for programs."""

from __future__ import annotations

import csv
import io
import json
import math
from collections.abc import Callable, Mapping, Sequence
from itertools import groupby

from specbench.errors import unknown_name
from specbench.reporting.columns import (
    DECODER,
    QUALITY,
    SPEED,
    THROUGHPUT,
    TRACED,
    WINDOW,
    Column,
    part_columns,
    score_columns,
)

READING = (
    "speed-up = step compression / (window cost x overhead), "
    "step compression counted against AR's over the same images."
)


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
    blocks, columns = [], {}
    for _, group in groupby(rows, key=lambda row: (row["model"], json.dumps(row["setting"], sort_keys=True))):
        runs = list(group)
        speed = THROUGHPUT if runs[0]["setting"]["batch"] > 1 else SPEED
        traced = TRACED if any(row["draft_tv"] is not None for row in runs) else ()
        quality = (*QUALITY, *traced, *score_columns(runs))
        blocks += [f"### {_heading(runs[0])}", _table(speed, runs)]
        blocks += [text for text in (_window_remark(runs),) if text]
        blocks.append(_table(quality, runs))
        for metric, parts in part_columns(runs).items():
            blocks += [f"{escape(metric)} by part:", _table((DECODER, WINDOW, *parts), runs)]
        columns |= {column.heading: column for column in (*speed, *quality)}
    definitions = [text for column in columns.values() if (text := column.definition())]
    blocks.append("\n".join(f"- {_line(text)}" for text in [*definitions, READING]))
    machines = dict.fromkeys(line for row in rows for line in row["environment"])
    lines = [f"Measured on {_line(line)}." for line in machines]
    blocks.append("\n".join(lines + _load(rows)))
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


def _heading(row: Mapping) -> str:
    setting = row["setting"]
    sampling = setting["sampling"]
    parts = [f"prompts {setting['prompts']}", f"seed {setting['seed']}"]
    parts += [f"guidance {sampling['guidance']:g}", f"temperature {sampling['temperature']:g}"]
    parts += [f"top-k {sampling['top_k']}" if sampling["top_k"] else "no top-k"]
    threads = f"{setting['threads']} thread{'s' if setting['threads'] != 1 else ''}"
    parts += [f"top-p {sampling['top_p']:g}"] if sampling["top_p"] < 1 else []
    parts += [
        setting["dtype"],
        setting["device"],
        threads,
        f"batch {setting['batch']}",
    ]
    return _line(f"{row['model']}: {', '.join(parts)}")


def _window_remark(rows: Sequence[Mapping]) -> str | None:
    """Says in words what the window cost column does to the speed-up, where a window is not free."""
    costly = [row for row in rows if (row["window_cost"] or 0) > 1.1]
    if not costly:
        return None
    worst = max(costly, key=lambda row: row["window_cost"])
    return (
        f"A window is not free on this machine: feeding {worst['options'].get('window', 1)} tokens takes "
        f"{worst['window_cost']:.1f} times as long as feeding one ({worst['label']}), so saving steps is not "
        f"saving as much time."
    )


def _load(rows: Sequence[Mapping]) -> list[str]:
    """Other work makes latencies noisy, so it is said how busy the machine was."""
    known = [load for row in rows for load in row["load"] if isinstance(load, int | float)]
    if not known:
        return []
    span = f"{min(known):.1f}" if min(known) == max(known) else f"{min(known):.1f} to {max(known):.1f}"
    return [f"Load average when the runs started: {span}."]


def _table(columns: Sequence[Column], rows: Sequence[Mapping]) -> str:
    lines = [
        " | ".join(escape(column.heading) for column in columns),
        " | ".join("---" if index == 0 else "---:" for index in range(len(columns))),
        *(" | ".join(escape(column.cell(row)) for column in columns) for row in rows),
    ]
    return "\n".join(f"| {line} |" for line in lines)


def escape(text: str) -> str:
    return _line(text).replace("\\", "\\\\").replace("|", "\\|").replace("<", "&lt;")


def _line(text: str) -> str:
    return " ".join(str(text).split())


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
