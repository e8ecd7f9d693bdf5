"""LaTeX of report tables: booktabs, as wide as the text, definitions after the floats."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from specbench.reporting.sections import ReportTable, circumstances, definitions, sections
from specbench.system.console import one_line


def to_latex(rows: Sequence[Mapping]) -> str:
    """Format the rows of `report_rows` as one `table` per table of the report."""
    found = sections(rows)
    tables = [(section, table) for section in found for table in section.tables]
    floats = [
        _float(table, section.runs, section.heading, f"tab:specbench-{place}")
        for place, (section, table) in enumerate(tables, 1)
    ]
    sentences = [sentence for section in found for sentence in section.answer]
    notes = "\n\n".join(map(tex, (*sentences, *definitions(found), *circumstances(rows))))
    return "% needs \\usepackage{booktabs,graphicx}\n" + "\n".join(floats) + f"\n{{\\footnotesize\n{notes}\n\n}}\n"


def _float(table: ReportTable, runs: Sequence[Mapping], heading: str, name: str) -> str:
    lines = [[column.heading for column in table.columns], *([c.cell(row) for c in table.columns] for row in runs)]
    head, *body = (" & ".join(map(tex, line)) + r" \\" for line in lines)
    caption = f"{table.title}; {heading}" if table.title else heading
    return "\n".join(
        (
            r"\begin{table}",
            rf"\caption{{{tex(caption)}}}",
            rf"\label{{{name}}}",
            r"\resizebox{\textwidth}{!}{%",
            rf"\begin{{tabular}}{{l{'r' * (len(table.columns) - 1)}}}",
            r"\toprule",
            head,
            r"\midrule",
            *body,
            r"\bottomrule",
            r"\end{tabular}}",
            r"\end{table}",
            "",
        )
    )


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
    "±": r"$\pm$",
    "≥": r"$\geq$",
    "×": r"$\times$",
}


def tex(text: str) -> str:
    """Escape text for LaTeX."""
    return "".join(_TEX.get(character, character) for character in one_line(text))
