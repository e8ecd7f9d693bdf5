"""Formats of report rows: markdown and LaTeX with definitions, csv, json, parquet."""

from __future__ import annotations

import csv
import hashlib
import io
import json
import re
from collections.abc import Callable, Mapping, Sequence

import pyarrow as pa

from specbench.errors import SpecbenchError, read_name
from specbench.reporting.compare import HEADINGS, comparison_lines, real_differences, verdict
from specbench.reporting.sections import (
    BOLD_RULE,
    Section,
    bold_cells,
    circumstances,
    definitions,
    sections,
    with_columns,
)
from specbench.store.schema import LONG_REPORT, OWNER, REPORT, column_facts
from specbench.system.console import one_line, printable, used_columns
from specbench.system.json_values import nonfinite_as_null

REPORT_SCHEMA = 2  # Raised where a key of a report row is removed or changes its meaning; new keys do not raise it
LATEX_NEEDS = "% needs \\usepackage{booktabs}\n"


def render(
    rows: Sequence[Mapping],
    fmt: str = "markdown",
    columns: Sequence[str] = (),
    notes: bool = False,
    caption: str | None = None,
    everything: bool = False,
    explain: bool = False,
    label: str | None = None,
) -> str:
    """Format the rows of `report_rows` in one of `FORMATS`.

    Args:
        columns: of markdown and LaTeX, the only ones, see `specbench.reporting.sections.with_columns`.
        notes: whether LaTeX has the answer, definitions and machines below its tables.
        caption: of the tables in LaTeX, in place of the model and setting.
        everything: whether markdown and LaTeX have all tables and notes, not only the first.
        explain: whether markdown has the definition of each column.
        label: of the first table in LaTeX; by default, it has a number made of the runs.
    """
    fmt = read_name("format", fmt, FORMATS)
    if fmt in ("markdown", "latex"):
        found = with_columns(sections(rows), columns) if columns else sections(rows)
        if fmt == "markdown":
            return markdown(rows, found, everything, explain)
        return to_latex(rows, found, notes, caption, everything, label)
    if columns:
        raise SpecbenchError(f"--columns: {fmt} has all of them", "choose columns of markdown or latex")
    return FORMATS[fmt](rows)


def markdown(rows: Sequence[Mapping], found: Sequence[Section], everything: bool = False, explain: bool = False) -> str:
    """Format as markdown: by setting, what the runs say, the first table or all, and notes."""
    blocks = []
    for section in found:
        blocks.append(f"### {_prose(section.heading)}")
        blocks.append("\n".join(f"- {_prose(text)}" for text in section.answer))
        for table in section.shown(everything):
            blocks += [f"{escape(table.title)}:"] if table.title else []
            cells = [[column.cell(row) for column in table.columns] for row in section.runs]
            used = _used(section, cells)
            kept = [[row[place] for place in used] for row in cells]
            blocks.append(markdown_lines([table.columns[place].title for place in used], kept))
            blocks += [_prose(table.remark)] if table.remark else []
        below = [*section.notes, *([f"Measured on {section.machines}."] if section.machines else [])]
        blocks += [_prose(text) for text in below] if not everything else []
    blocks.append("\n".join(f"- {_prose(text)}" for text in definitions(found, everything)) if explain else "")
    blocks.append("\n".join(_prose(text) for text in circumstances(rows)) if everything else "")
    return "\n\n".join(block for block in blocks if block) + "\n"


def _used(section: Section, cells: Sequence[Sequence[str]]) -> Sequence[int]:
    """Places of the columns that are not empty, or of all that were chosen."""
    every = range(len(cells[0]))
    return used_columns(cells, every) if section.tables else every


def markdown_lines(headings: Sequence[str], cells: Sequence[Sequence[str]]) -> str:
    """A markdown table: the first column left, the others right."""
    lines = [
        " | ".join(map(escape, headings)),
        " | ".join("---" if index == 0 else "---:" for index in range(len(headings))),
        *(" | ".join(map(escape, row)) for row in cells),
    ]
    return "\n".join(f"| {line} |" for line in lines)


def to_csv(rows: Sequence[Mapping]) -> str:
    """Format as CSV: one line per run, one column per score, nested values as JSON."""
    return csv_text([_flat(row) for row in _judged(rows)])


def csv_text(rows: Sequence[Mapping]) -> str:
    """Rows as CSV, with a column for each key."""
    text = io.StringIO()
    names = list(dict.fromkeys(name for row in rows for name in row))
    writer = csv.DictWriter(text, names, restval="", lineterminator="\n")
    writer.writeheader()
    writer.writerows(rows)
    return text.getvalue()


def to_json(rows: Sequence[Mapping]) -> str:
    """Format as one JSON array of objects that carry `schema`, the version of their keys; missing and non-finite
    numbers are null."""
    return json_text([{"schema": REPORT_SCHEMA, **row} for row in _judged(rows)])


def _judged(rows: Sequence[Mapping]) -> list[dict]:
    """The rows with the verdicts that tables and sentences show, under `real`."""
    return [{**row, "real": sorted(real_differences(row))} for row in rows]


def json_text(rows: Sequence[Mapping]) -> str:
    """Rows as one JSON array; missing and non-finite numbers are null."""
    return json.dumps(nonfinite_as_null(list(rows)), indent=2, ensure_ascii=False, allow_nan=False) + "\n"


def to_latex(
    rows: Sequence[Mapping],
    found: Sequence[Section],
    notes: bool = False,
    caption: str | None = None,
    everything: bool = False,
    label: str | None = None,
) -> str:
    """Format as LaTeX: a booktabs `table` for the first table of each section, or for all, with `notes` definitions
    after them; bold as of `BOLD_RULE`."""
    tables = [(section, table) for section in found for table in section.shown(everything)]
    floats, marked = [], False
    label = latex_label(label, *(str(row["run_id"]) for row in rows))
    for place, (section, table) in enumerate(tables, 1):
        heading = caption or section.heading
        cells = [[column.cell(row) for column in table.columns] for row in section.runs]
        columns = [table.columns[place] for place in _used(section, cells)]
        shown = [[column.cell(row) for row in section.runs] for column in columns]
        best = bold_cells(section.runs, columns, list(zip(*shown, strict=True)))
        marked = marked or any(best)
        headings, text = [column.title for column in columns], f"{table.title}; {heading}"
        lines = list(zip(*shown, strict=True))
        own = label if place == 1 else f"{label}-{place}"
        floats.append(latex_table(headings, lines, text if table.title else heading, own, best))
    answers = "".join(f"{tex(sentence)}\n\n" for section in found for sentence in section.answer)
    below = answers + "\n\n".join(map(tex, (*definitions(found), *circumstances(rows, load=False)))) + "\n"
    said = f"% {BOLD_RULE}\n" if marked else ""
    return LATEX_NEEDS + said + "\n".join(floats) + (f"\n{{\\footnotesize\n{below}\n}}\n" if notes else "")


def latex_label(name: str | None, *content: str) -> str:
    """Label of a table by its name, else by a number of its content: two tables of a paper have different ones."""
    number = int(hashlib.sha256("\n".join(content).encode()).hexdigest(), 16) % 10**6
    return "tab:" + (re.sub(r"[^\w-]+", "-", name) if name else f"specbench-{number:06d}")


def comparison_latex(rows: Sequence[Mapping], a: str, b: str, label: str | None = None) -> str:
    """The compared numbers as a booktabs `table`, with the verdict as its caption."""
    caption = f"{b} (B) compared with {a} (A). {verdict(rows)}"
    return LATEX_NEEDS + latex_table(HEADINGS, comparison_lines(rows), caption, latex_label(label, a, b))


_COLUMN, _PAGE, _CHARACTER, _GAP = 229, 469, 4.5, 8
"""Points: width of a column and of the text of a two-column article, of a character of \\small, and between columns."""


def latex_room(lines: Sequence[Sequence[str]]) -> tuple[str, str]:
    """The environment and the size of letters in which a table of these cells fits a two-column page."""
    widths = [max(map(len, cells)) for cells in zip(*lines, strict=True)]
    points = sum(widths) * _CHARACTER + (len(widths) - 1) * _GAP
    return ("table" if points <= _COLUMN else "table*"), (r"\small" if points <= _PAGE else r"\footnotesize")


def latex_table(
    headings: Sequence[str], lines: Sequence[Sequence[str]], caption: str, label: str, bold: Sequence[set[int]] = ()
) -> str:
    """A `table` with a booktabs `tabular`: texts left in the first column, right in the others. `bold`: by column, the
    places of its bold cells."""
    bold = bold or [set()] * len(headings)
    head = " & ".join(map(tex, headings)) + r" \\"
    body = [
        " & ".join(
            rf"\textbf{{{tex(cell)}}}" if place in best else tex(cell) for cell, best in zip(line, bold, strict=True)
        )
        + r" \\"
        for place, line in enumerate(lines)
    ]
    kind, size = latex_room([headings, *lines])
    return "\n".join(
        (
            rf"\begin{{{kind}}}",
            rf"\caption{{{tex(caption)}}}",
            rf"\label{{{label}}}",
            rf"\centering{size}\setlength{{\tabcolsep}}{{4pt}}",
            rf"\begin{{tabular}}{{@{{}}l{'r' * (len(headings) - 1)}@{{}}}}",
            r"\toprule",
            head,
            r"\midrule",
            *body,
            r"\bottomrule",
            r"\end{tabular}",
            rf"\end{{{kind}}}",
            "",
        )
    )


FORMATS: dict[str, Callable[..., str]] = {"markdown": markdown, "csv": to_csv, "json": to_json, "latex": to_latex}


def report_arrow(rows: Sequence[Mapping], long: bool = False) -> pa.Table:
    """Report rows as a table of `specbench.store.schema.REPORT`, or of `LONG_REPORT`, a row per run and number."""
    if long:
        return pa.Table.from_pylist(long_rows(rows), schema=LONG_REPORT)
    rows = _judged(rows)
    texts = [field.name for field in REPORT if pa.types.is_string(field.type)]
    nested = [{name: _json(row.get(name)) for name in texts} for row in rows]
    return pa.Table.from_pylist([{**row, **made} for row, made in zip(rows, nested, strict=True)], schema=REPORT)


def _json(value: object) -> object:
    if not isinstance(value, Mapping | list):
        return value
    return json.dumps(nonfinite_as_null(value), sort_keys=True, ensure_ascii=False)


_OVER_PAIRS = ("speedup", "speedup_p", "step_ratio", "window_cost", "overhead", "speedup_e2e")
"""Numbers over the images in common with AR."""


def long_rows(rows: Sequence[Mapping]) -> list[dict[str, object]]:
    """The numbers and scores of report rows, a row for each, with the columns of `LONG_REPORT`."""
    units = {name: known["unit"] for name, known in column_facts(REPORT).items()}
    names = [field.name for field in REPORT if pa.types.is_floating(field.type)]
    found = []
    for row in rows:
        about = {name: row[name] for name in ("label", *OWNER)}
        for name in (name for name in names if not name.endswith(("_low", "_high"))):
            low, high = row["intervals"].get(name) or (row.get(f"{name}_low"), row.get(f"{name}_high"))
            n = row["pairs"] if name in _OVER_PAIRS else row["n"]
            found.append({**about, "number": name, "value": row.get(name), "low": low, "high": high, "n": n,
                          "unit": units[name]})  # fmt: skip
        for score in row["scores"]:
            kept = {name: score[name] for name in ("fingerprint", "value", "low", "high", "n")}
            found.append({**about, "number": score["metric"], **kept, "unit": ""})
    return found


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
