"""Formats of report rows: markdown and LaTeX with definitions, csv, json, parquet."""

from __future__ import annotations

import csv
import hashlib
import io
import json
import re
from collections.abc import Callable, Container, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import pyarrow as pa

from specbench.errors import SpecbenchError, read_name
from specbench.reporting.columns import ReportColumn
from specbench.reporting.compare import HEADINGS, comparison_lines, real_differences, verdict
from specbench.reporting.row import Compared, ReportRow, record
from specbench.reporting.sections import (
    BOLD_RULE,
    ReportTable,
    Section,
    bold_cells,
    circumstances,
    definitions,
    sections,
    with_columns,
)
from specbench.stats import Estimate
from specbench.store.image_scores import parquet_bytes
from specbench.store.schema import LONG_REPORT, OWNER, REPORT, column_facts
from specbench.system.console import one_line, printable, used_columns
from specbench.system.json_values import json_text, nonfinite_as_null

REPORT_SCHEMA = 2  # Raised where a key of a report row is removed or changes its meaning; new keys do not raise it
LATEX_NEEDS = "% needs \\usepackage{booktabs}\n"


@dataclass(frozen=True)
class ReportOptions:
    """What a report of runs shows; formats for programs have all of it."""

    columns: Sequence[str] = ()  # of markdown and LaTeX, the only ones, see `specbench.reporting.sections.with_columns`
    notes: bool = False  # LaTeX: the answer, definitions and machines below the tables
    caption: str | None = None  # LaTeX: in place of the model and setting
    everything: bool = False  # markdown and LaTeX: all tables and notes, not only the first
    explain: bool = False  # markdown: the definition of each column
    label: str | None = None  # LaTeX: of the first table; by default, it has a number made of the runs
    long: bool = False  # csv, json and parquet: a row per run and number


def render(rows: Sequence[ReportRow], fmt: str = "markdown", **options: object) -> str | bytes:
    """Format the rows of `report_rows` in one of `FORMATS`; `options` as of `ReportOptions`."""
    fmt, shown = read_name("format", fmt, FORMATS), ReportOptions(**options)
    if shown.columns and fmt not in ("markdown", "latex"):
        raise SpecbenchError(f"--columns: {fmt} has all of them", "choose columns of markdown or latex")
    return FORMATS[fmt](rows, shown)


def _chosen(rows: Sequence[ReportRow], options: ReportOptions) -> list[Section]:
    return with_columns(sections(rows), options.columns) if options.columns else sections(rows)


def markdown(rows: Sequence[ReportRow], options: ReportOptions) -> str:
    """Format as markdown: by setting, what the runs say, the first table or all, and notes."""
    blocks, everything, grouped = [], options.everything, _chosen(rows, options)
    for section in grouped:
        blocks.append(f"### {_prose(section.heading)}")
        blocks.append("\n".join(f"- {_prose(text)}" for text in section.answer))
        for table in section.shown(everything):
            blocks += [f"{escape(table.title)}:"] if table.title else []
            columns, cells = _used(section, table)
            blocks.append(markdown_lines(plain_table([column.title for column in columns], cells)))
            blocks += [_prose(table.remark)] if table.remark else []
        below = [*section.notes, *([f"Measured on {section.machines}."] if section.machines else [])]
        blocks += [_prose(text) for text in below] if not everything else []
    said = definitions(grouped, everything) if options.explain else ()
    blocks.append("\n".join(f"- {_prose(text)}" for text in said))
    blocks.append("\n".join(_prose(text) for text in circumstances(rows)) if everything else "")
    return "\n\n".join(block for block in blocks if block) + "\n"


def _used(section: Section, table: ReportTable) -> tuple[list[ReportColumn], list[list[str]]]:
    """The columns that are not empty, or all that were chosen, and their cells."""
    cells = [[column.cell(row) for column in table.columns] for row in section.runs]
    every = range(len(table.columns))
    used = used_columns(cells, every) if section.tables else every
    return [table.columns[place] for place in used], [[line[place] for place in used] for line in cells]


class TextLine(NamedTuple):
    """A line of a table of texts: its cells, and the places of the bold ones."""

    cells: Sequence[str]
    bold: Container[int] = ()


@dataclass(frozen=True)
class TextTable:
    """A table of texts, whatever its format: lines in groups with a name or none. `labels`: how many columns at the
    left name a line."""

    headings: Sequence[str]
    groups: Sequence[tuple[str | None, Sequence[TextLine]]]
    labels: int = 1

    @property
    def lines(self) -> list[TextLine]:
        """The lines of all groups."""
        return [line for _, lines in self.groups for line in lines]


def plain_table(
    headings: Sequence[str], cells: Sequence[Sequence[str]], bold: Sequence[Container[int]] = ()
) -> TextTable:
    """A table of one group. `bold`: by line, the places of its bold cells; of none, if empty."""
    return TextTable(headings, [(None, list(map(TextLine, cells, bold or [()] * len(cells))))])


def markdown_lines(table: TextTable) -> str:
    """The table as markdown: labels left, the others right, names of groups bold."""
    rows = [list(map(escape, table.headings))]
    rows.append(["---" if place < table.labels else "---:" for place in range(len(table.headings))])
    for group, lines in table.groups:
        if group:
            rows.append([f"**{escape(group)}**", *[""] * (len(table.headings) - 1)])
        for cells, bold in lines:
            rows.append([f"**{escape(cell)}**" if at in bold else escape(cell) for at, cell in enumerate(cells)])
    return "\n".join(f"| {' | '.join(row)} |" for row in rows)


def to_csv(rows: Sequence[ReportRow], options: ReportOptions) -> str:
    """Format as CSV: one line per run, one column per score, nested values as JSON."""
    return csv_text(long_rows(rows) if options.long else [_flat(row) for row in _records(rows)])


def csv_text(rows: Sequence[Mapping]) -> str:
    """Rows as CSV, with a column for each key."""
    text = io.StringIO()
    names = list(dict.fromkeys(name for row in rows for name in row))
    writer = csv.DictWriter(text, names, restval="", lineterminator="\n")
    writer.writeheader()
    writer.writerows(rows)
    return text.getvalue()


def to_json(rows: Sequence[ReportRow], options: ReportOptions) -> str:
    """Format as one JSON array of objects that carry `schema`, the version of their keys; missing and non-finite
    numbers are null."""
    return json_text(long_rows(rows) if options.long else [{"schema": REPORT_SCHEMA, **row} for row in _records(rows)])


def to_parquet(rows: Sequence[ReportRow], options: ReportOptions) -> bytes:
    """Format as parquet, see `report_arrow`."""
    return parquet_bytes(report_arrow(rows, options.long))


def to_html(rows: Sequence[ReportRow], options: ReportOptions) -> bytes:
    """Format as a page, see `specbench.reporting.html`."""
    from specbench.reporting.html import page  # brings jinja2 and matplotlib

    return page(rows).encode("utf-8", "backslashreplace")


def _records(rows: Sequence[ReportRow]) -> list[dict[str, object]]:
    """The rows as plain values, with the verdicts that tables and sentences show, under `real`."""
    real = (sorted(real_differences(row.run_id, row.folder, row.over_ar)) for row in rows)
    return [record(replace(row, real=names)) for row, names in zip(rows, real, strict=True)]


def to_latex(rows: Sequence[ReportRow], options: ReportOptions) -> str:
    """Format as LaTeX: a booktabs `table` for the first table of each section, or for all, with notes after them; bold
    as of `BOLD_RULE`."""
    grouped = _chosen(rows, options)
    tables = [(section, table) for section in grouped for table in section.shown(options.everything)]
    floats, marked = [], False
    label = latex_label(options.label, *(row.run_id for row in rows))
    for place, (section, table) in enumerate(tables, 1):
        heading = options.caption or section.heading
        columns, cells = _used(section, table)
        bold = bold_cells(section.runs, columns, cells)
        marked = marked or any(bold)
        shown = plain_table([column.title for column in columns], cells, bold)
        caption = f"{table.title}; {heading}" if table.title else heading
        floats.append(latex_table(shown, caption, label if place == 1 else f"{label}-{place}"))
    answers = "".join(f"{tex(sentence)}\n\n" for section in grouped for sentence in section.answer)
    below = answers + "\n\n".join(map(tex, (*definitions(grouped), *circumstances(rows, load=False)))) + "\n"
    said = f"% {BOLD_RULE}\n" if marked else ""
    notes = f"\n{{\\footnotesize\n{below}\n}}\n" if options.notes else ""
    return LATEX_NEEDS + said + "\n".join(floats) + notes


def latex_label(name: str | None, *content: str) -> str:
    """Label of a table by its name, else by a number of its content: two tables of a paper have different ones."""
    number = int(hashlib.sha256("\n".join(content).encode()).hexdigest(), 16) % 10**6
    return "tab:" + (re.sub(r"[^\w-]+", "-", name) if name else f"specbench-{number:06d}")


def comparison_latex(rows: Sequence[Compared], a: str, b: str, label: str | None = None) -> str:
    """The compared numbers as a booktabs `table`, with the verdict as its caption."""
    caption = f"{b} (B) compared with {a} (A). {verdict(rows)}"
    table = plain_table(HEADINGS, comparison_lines(rows))
    return LATEX_NEEDS + latex_table(table, caption, latex_label(label, a, b))


_COLUMN, _PAGE, _CHARACTER, _GAP = 229, 469, 4.5, 8
"""Points: width of a column and of the text of a two-column article, of a character of \\small, and between columns."""


def latex_table(table: TextTable, caption: str, label: str, wide: bool = False) -> str:
    """A float with a booktabs `tabular`: labels left, the others right. Its environment and the size of its letters are
    those in which it fits a two-column page; the environment is that of two columns if `wide`."""
    widths = [max(map(len, texts)) for texts in zip(table.headings, *(line.cells for line in table.lines), strict=True)]
    points = sum(widths) * _CHARACTER + (len(widths) - 1) * _GAP
    kind, size = "table*" if wide or points > _COLUMN else "table", r"\small" if points <= _PAGE else r"\footnotesize"
    body = []
    for group, lines in table.groups:
        body.append(r"\midrule")
        if group:
            body.append(rf"\multicolumn{{{len(widths)}}}{{l}}{{\textit{{{tex(group)}}}}} \\")
        for cells, bold in lines:
            texts = (rf"\textbf{{{tex(cell)}}}" if at in bold else tex(cell) for at, cell in enumerate(cells))
            body.append(" & ".join(texts) + r" \\")
    return "\n".join(
        (
            rf"\begin{{{kind}}}",
            rf"\caption{{{tex(caption)}}}",
            rf"\label{{{label}}}",
            rf"\centering{size}\setlength{{\tabcolsep}}{{4pt}}",
            rf"\begin{{tabular}}{{@{{}}{'l' * table.labels}{'r' * (len(widths) - table.labels)}@{{}}}}",
            r"\toprule",
            " & ".join(map(tex, table.headings)) + r" \\",
            *body,
            r"\bottomrule",
            r"\end{tabular}",
            rf"\end{{{kind}}}",
            "",
        )
    )


FORMATS: dict[str, Callable[[Sequence[ReportRow], ReportOptions], str | bytes]] = {
    "markdown": markdown,
    "csv": to_csv,
    "latex": to_latex,
    "json": to_json,
    "html": to_html,
    "parquet": to_parquet,
}
"""Writer of each format."""


def report_arrow(rows: Sequence[ReportRow], long: bool = False) -> pa.Table:
    """Report rows as a table of `specbench.store.schema.REPORT`, or of `LONG_REPORT`, a row per run and number."""
    if long:
        return pa.Table.from_pylist(long_rows(rows), schema=LONG_REPORT)
    rows = _records(rows)
    texts = [field.name for field in REPORT if pa.types.is_string(field.type)]
    nested = [{name: _json(row.get(name)) for name in texts} for row in rows]
    return pa.Table.from_pylist([{**row, **made} for row, made in zip(rows, nested, strict=True)], schema=REPORT)


def _json(value: object) -> object:
    if not isinstance(value, Mapping | list):
        return value
    return json.dumps(nonfinite_as_null(value), sort_keys=True, ensure_ascii=False)


def long_rows(rows: Sequence[ReportRow]) -> list[dict[str, object]]:
    """The numbers and scores of report rows, a row for each, with the columns of `LONG_REPORT`."""
    units = {name: known["unit"] for name, known in column_facts(REPORT).items()}
    names = [field.name for field in REPORT if pa.types.is_floating(field.type)]
    numbers = []
    for row in rows:
        about = {name: getattr(row, name) for name in ("label", *OWNER)}
        for name in (name for name in names if not name.endswith(("_low", "_high"))):
            bounds = vars(row.number(name) or Estimate(None))
            n = row.over_ar.pairs if name in vars(row.over_ar) else row.n
            numbers.append({**about, "number": name, **bounds, "n": n, "unit": units[name]})
        for score in row.scores:
            kept = {name: score.stored[name] for name in ("fingerprint", "value", "low", "high", "n")}
            numbers.append({**about, "number": score.metric, **kept, "unit": ""})
    return numbers


def _flat(row: Mapping) -> dict[str, object]:
    flat = {}
    for name, value in nonfinite_as_null(row).items():
        if name == "scores":
            flat |= {f"score {score['metric']} {score['fingerprint']}": score["value"] for score in value}
        elif isinstance(value, dict | list):
            flat[name] = json.dumps(value, sort_keys=True, ensure_ascii=False)
        else:
            flat[name] = inert(value)
    return flat


def escape(text: str) -> str:
    """Escape text for a cell of a markdown table."""
    return _prose(str(text).replace("\\", "\\\\").replace("|", "\\|"))


def _prose(text: str) -> str:
    """Escape text for one line of markdown outside tables, HTML tags included."""
    return " ".join(printable(str(text)).split()).replace("<", "&lt;")


_TEX = {character: f"\\{character}" for character in "&%$#_{}"} | {
    "\\": r"\textbackslash{}",
    "~": r"\textasciitilde{}",
    "^": r"\textasciicircum{}",
    "[": "{[}",
    "]": "{]}",
    "<": r"\textless{}",
    ">": r"\textgreater{}",
    "|": r"\textbar{}",
    "↑": r"$\uparrow$",
    "↓": r"$\downarrow$",
    "–": "--",
    **{sign: rf"\textsuperscript{{{digit}}}" for digit, sign in enumerate("⁰¹²³⁴⁵⁶⁷⁸⁹")},
    "†": r"\textsuperscript{\dag}",
    "±": r"$\pm$",
    "≥": r"$\geq$",
    "×": r"$\times$",
}


def tex(text: str) -> str:
    """Escape text for LaTeX."""
    return "".join(_TEX.get(character, character) for character in one_line(text))


def inert(value: object) -> object:
    """Quote text that a spreadsheet would evaluate as a formula."""
    return f"'{value}" if isinstance(value, str) and value[:1] in ("=", "+", "-", "@", "\t") else value
