"""What papers print for the cells that runs measured: same decoder, options and model."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

from specbench.errors import SpecbenchError
from specbench.models.facts import RANDOM
from specbench.models.hub_model import MODELS
from specbench.papers.forecasts import decoder_of, printed_values, row_settings
from specbench.papers.table import SCORE, Row, Table
from specbench.papers.table_files import load_tables
from specbench.reporting.columns import number

_MOST, _MOST_SCORES = 3, 2
_SPEEDS = {"nfe": "NFE", "latency_ms": "latency", "speedup": "speed-up", "step_compression": "step compression"}


def printed_beside(rows: Sequence[Mapping]) -> list[str]:
    """A line for each of up to three cells of papers with the decoder, options and model of a report row, those with
    most speeds first; none for models that no paper has."""
    models = {model.name for model in MODELS}
    ours = [row for row in rows if row["decoder"] != "ar" and RANDOM not in row["model"]]
    ours = [row for row in ours if row["model"].partition("+")[0] in models]
    found = [cell for table in load_tables() for row in ours for cell in _cells(table, row)] if ours else []
    found.sort(key=lambda cell: -cell[0])
    lines, seen = [], set()
    for _, label, numbers, line in found:
        if (label, numbers[0]) not in seen:  # else a copy, in this paper or in another
            lines.append(line)
        seen |= {(label, text) for text in numbers}
    return lines[:_MOST]


def _cells(table: Table, ours: Mapping) -> Iterator[tuple[int, str, list[str], str]]:
    """Number of printed speeds, our label, printed numbers and line of each cell of a table like one of our rows."""
    for row in table.rows:
        try:
            settings = None if row.own or not row.paper else row_settings(table, row)
            theirs = settings and decoder_of(settings)
        except SpecbenchError:  # a head or file that is not here
            continue
        if not theirs or theirs.name != ours["decoder"] or settings.model != ours["model"].partition("+")[0]:
            continue
        stated = {name: value for name, value in theirs.options if name not in ("window", "head")}
        numbers = _numbers(table, row)
        if numbers and all(str(ours["options"].get(key)) == str(value) for key, value in stated.items()):
            line = _line(table, row, ours["label"], dict(theirs.options).get("window"), numbers)
            yield sum(key in _SPEEDS for key in printed_values(table, row)), ours["label"], numbers, line


def _line(table: Table, row: Row, label: str, window: object, numbers: Sequence[str]) -> str:
    """What a paper prints for the cell of our row of this label."""
    place = f"{table.paper}, {table.source}{f', {row.group}' if row.group else ''}"
    place += f", window {window}" if window is not None else ""
    on = f"; on {hardware.partition(' (')[0]}" if (hardware := row.hardware or table.hardware) else ""
    return f"Printed for {label} ({place}): {', '.join(numbers)}{on}."


def _numbers(table: Table, row: Row) -> list[str]:
    """The printed NFE, latency, speed-up and scores."""
    printed = {column.key: column for column in table.columns if column.name in row.paper}
    shown = []
    for key in (*_SPEEDS, *[key for key in printed if key.startswith(SCORE)][:_MOST_SCORES]):
        if column := printed.get(key):
            unit = " s" if key == "latency_ms" else ""
            value = number(row.paper[column.name] * (1e-3 / column.scale if unit else 1), column.precision)
            shown.append(f"{_SPEEDS.get(key, column.header)} {value}{unit}")
    return shown
