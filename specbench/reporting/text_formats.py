"""Formats of report rows: markdown and LaTeX with definitions, csv, json, parquet."""

import csv
import io
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import pyarrow as pa

from specbench.errors import SpecbenchError, enumerated
from specbench.reporting.columns import MARK
from specbench.reporting.compare import HEADINGS, comparison_lines, directions, real_differences, reasons, verdict
from specbench.reporting.report_schema import LONG_REPORT, REPORT
from specbench.reporting.row import Compared, ReportRow, record, with_bounds
from specbench.reporting.sections import (
    BOLD_RULE,
    ReportTable,
    Section,
    circumstances,
    definitions,
    legend,
    sections,
    with_columns,
)
from specbench.store.image_scores import parquet_bytes
from specbench.store.schema import OWNER, column_facts
from specbench.system import text_tables
from specbench.system.json_values import json_text, nonfinite_as_null
from specbench.system.table_formats import FORMATS, format_name, formats_with, writer
from specbench.system.text_tables import LATEX_NEEDS, TextTable, escape, latex_label, prose, tex

_FORMULA = tuple("=+-@\t\r\n\uff1d\uff0b\uff0d\uff20")  # First characters of formulas, also full-width
REPORT_SCHEMA = 2  # Increment if a key of a report row is removed or changes its meaning, not for new keys


@dataclass(frozen=True)
class ReportOptions:
    """Options of a report. csv, json and parquet always contain all data."""

    columns: Sequence[str] = ()  # markdown, LaTeX: only these columns, see `specbench.reporting.sections.with_columns`
    notes: bool = False  # LaTeX: the answer, definitions and machines below the tables
    caption: str | None = None  # LaTeX: replaces the model and setting
    everything: bool = False  # markdown and LaTeX: all tables and notes, not only the first
    explain: bool = False  # markdown: the definition of each column
    label: str | None = None  # LaTeX: label of the first table; the default contains a digest of the runs
    long: bool = False  # csv, json and parquet: a row per run and number


def render(rows: Sequence[ReportRow], fmt: str = "markdown", **options: Any) -> str | bytes:
    """Format the rows of `report_rows` in one of `FORMATS`; `options`: fields of `ReportOptions`."""
    fmt, shown = format_name("report", fmt), ReportOptions(**options)
    if shown.columns and not FORMATS[fmt].columns:
        raise SpecbenchError(
            f"--columns: {fmt} always has all columns", f"use --format {enumerated(formats_with('columns'), 'or')}"
        )
    return writer("report", fmt)(rows, shown)


def _chosen(rows: Sequence[ReportRow], options: ReportOptions) -> list[Section]:
    return with_columns(sections(rows), options.columns) if options.columns else sections(rows)


def report_markdown(rows: Sequence[ReportRow], options: ReportOptions) -> str:
    """Format as markdown: for each setting the answer, the first table or all tables, and notes."""
    blocks, everything, grouped = [], options.everything, _chosen(rows, options)
    for section in grouped:
        blocks.append(f"### {prose(section.heading)}")
        blocks.append("\n".join(f"- {prose(text)}" for text in section.answer))
        for table in section.shown(everything):
            texts = _texts(section, table)
            blocks += [f"{escape(texts.title)}:"] if texts.title else []
            blocks += [text_tables.markdown_table(texts), *map(prose, texts.notes)]
        below = [*section.notes, *([f"Measured on {section.machines}."] if section.machines else [])]
        blocks += [prose(text) for text in below] if not everything else []
    meanings = definitions(grouped, everything) if options.explain else ()
    blocks.append("\n".join(f"- {prose(text)}" for text in meanings))
    blocks.append("\n".join(prose(text) for text in circumstances(rows)) if everything else "")
    return "\n\n".join(block for block in blocks if block) + "\n"


def _texts(section: Section, table: ReportTable, best: bool = False) -> TextTable:
    """Format a table without empty columns, or with all columns that the user chose. `best`: bold by `BOLD_RULE`."""
    texts = table.texts(section.runs, best)
    return text_tables.distinct_columns(texts, kept=texts.headings) if section.tables else texts


def report_csv(rows: Sequence[ReportRow], options: ReportOptions) -> str:
    """Format as CSV: one line per run, one column per score, nested values as JSON."""
    return csv_text(long_rows(rows) if options.long else [_flat(row) for row in _records(rows)])


def csv_text(rows: Sequence[Mapping[str, object]]) -> str:
    """Format rows as CSV, with a column per key. Text that a spreadsheet would evaluate as a formula is quoted."""
    text = io.StringIO()
    names = list(dict.fromkeys(name for row in rows for name in row))
    lines: list[list[Any]] = [[*names], *([row.get(name, "") for name in names] for row in rows)]
    for line in lines:
        inert = [f"'{cell}" if isinstance(cell, str) and cell.startswith(_FORMULA) else cell for cell in line]
        csv.writer(text, lineterminator="\n").writerow(inert)
    return text.getvalue()


def report_json(rows: Sequence[ReportRow], options: ReportOptions) -> str:
    """Format as a JSON array of objects. `schema` is the version of the keys; missing and non-finite numbers are
    null."""
    return json_text(long_rows(rows) if options.long else [{"schema": REPORT_SCHEMA, **row} for row in _records(rows)])


def report_html(rows: Sequence[ReportRow], options: ReportOptions) -> bytes:
    """Format as a page, see `specbench.reporting.html`."""
    from specbench.reporting.html import page  # imports jinja2 and matplotlib

    return page(rows).encode("utf-8", "backslashreplace")


def _records(rows: Sequence[ReportRow]) -> list[dict[str, object]]:
    """Convert the rows to plain values. `real` contains the verdicts that tables and sentences show."""
    real = (sorted(real_differences(row.folder, row.over_ar)) for row in rows)
    return [record(replace(row, real=names)) for row, names in zip(rows, real, strict=True)]


def report_latex(rows: Sequence[ReportRow], options: ReportOptions) -> str:
    """Format as LaTeX: a booktabs `table` for the first table of each section, or for all tables, and notes; bold by
    `BOLD_RULE`."""
    grouped = _chosen(rows, options)
    tables = [(section, table) for section in grouped for table in section.shown(options.everything)]
    floats, marked = [], False
    label = latex_label(options.label, *(row.run_id for row in rows))
    for place, (section, table) in enumerate(tables, 1):
        base = next((f"; {MARK}: differs from {row.against.baseline}" for row in section.runs if row.against), "")
        heading = options.caption or section.heading + base
        texts = _texts(section, table, best=True)
        marked = marked or texts.marked
        captioned = replace(texts, title=f"{texts.title}; {heading}" if texts.title else heading)
        floats.append(text_tables.latex_table(captioned, label if place == 1 else f"{label}-{place}"))
    answers = "".join(f"{tex(sentence)}\n\n" for section in grouped for sentence in section.answer)
    below = answers + "\n\n".join(map(tex, (*definitions(grouped), *circumstances(rows, load=False)))) + "\n"
    comment = "".join(f"% {text}\n" for text in (*[BOLD_RULE] * marked, *legend(rows)))
    notes = f"\n{{\\footnotesize\n{below}\n}}\n" if options.notes else ""
    return LATEX_NEEDS + comment + "\n".join(floats) + notes


def _compared(rows: Sequence[Compared], title: str = "") -> TextTable:
    return text_tables.plain_table(HEADINGS, comparison_lines(rows), title)


def comparison_latex(rows: Sequence[Compared], a: str, b: str, label: str | None = None) -> str:
    """Format the compared numbers as a booktabs `table`, with the verdict as its caption."""
    caption = f"{b} (B) compared with {a} (A). {verdict(rows)}"
    return LATEX_NEEDS + text_tables.latex_table(_compared(rows, caption), latex_label(label, a, b))


def comparison_markdown(rows: Sequence[Compared], a: str, b: str, label: str | None = None) -> str:
    """Format the verdict in sentences, and the compared numbers as a markdown table."""
    text = "\n".join(f"- {line}" for line in (*directions(a, b), verdict(rows), *reasons(rows)))
    return f"{text}\n\n{text_tables.markdown_table(_compared(rows), aligned=True)}\n"


def comparison_json(rows: Sequence[Compared], a: str, b: str, label: str | None = None) -> str:
    """Format the compared numbers as JSON."""
    return json_text(row.record for row in rows)


def report_parquet(rows: Sequence[ReportRow], options: ReportOptions) -> bytes:
    """Format as parquet, see `report_arrow`."""
    return parquet_bytes(report_arrow(rows, options.long))


def report_arrow(rows: Sequence[ReportRow], long: bool = False) -> pa.Table:
    """Convert report rows to a table with schema `REPORT`, or if `long`, `LONG_REPORT` (a row per run and number)."""
    if long:
        return pa.Table.from_pylist(long_rows(rows), schema=LONG_REPORT)
    texts = {field.name for field in REPORT if pa.types.is_string(field.type)}
    flat = [{key: _json(value) if key in texts else value for key, value in row.items()} for row in _records(rows)]
    return pa.Table.from_pylist(flat, schema=REPORT)


def _json(value: object) -> object:
    """Convert nested values to JSON; return other values unchanged."""
    nested = isinstance(value, Mapping | list | tuple)
    return json.dumps(nonfinite_as_null(value), sort_keys=True, ensure_ascii=False) if nested else value


def long_rows(rows: Sequence[ReportRow]) -> list[dict[str, object]]:
    """Make a row with the columns of `LONG_REPORT` for each number and score of report rows."""
    units = {name: facts["unit"] for name, facts in column_facts(REPORT).items()}
    names = [field.name for field in REPORT if pa.types.is_floating(field.type)]
    numbers = []
    for row in rows:
        about = {name: getattr(row, name) for name in ("label", *OWNER)}
        for name in (name for name in names if not name.endswith(("_low", "_high"))):
            bounds = zip(("value", "low", "high"), with_bounds(name, row.number(name)).values(), strict=True)
            n = row.over_ar.pairs if name in vars(row.over_ar) else row.n
            numbers.append({**about, "number": name, **dict(bounds), "n": n, "unit": units[name]})
        for score in row.scores:
            kept = {name: score.stored[name] for name in ("fingerprint", "value", "low", "high", "n")}
            numbers.append({**about, "number": score.metric, **kept, "unit": score.stored["unit"] or ""})
    return numbers


def _flat(row: Mapping[str, Any]) -> dict[str, object]:
    flat: dict[str, object] = {}
    for name, value in row.items():
        if name == "scores":
            flat |= {f"score {score['metric']} {score['fingerprint']}": score["value"] for score in value}
        else:
            flat[name] = _json(value)
    return {name: nonfinite_as_null(value) for name, value in flat.items()}
