"""Tables of texts: one data structure, and writers for markdown, LaTeX and terminals."""

import hashlib
import re
from collections.abc import Container, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

from rich.cells import cell_len, set_cell_size
from rich.console import Group
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from specbench.system.console import one_line, printable

LATEX_NEEDS = "% needs \\usepackage{booktabs}\n"
_NO_CELL = "-"
COLUMN_GAP = 2
_WHOLE = 28  # Cells up to this width are not wrapped if columns can move to another panel


class TextCell(NamedTuple):
    """A cell of a table of texts."""

    text: str
    bold: bool = False


@dataclass(frozen=True)
class TextTable:
    """Table of texts, independent of the format: rows of cells in groups (with or without a name), and notes below.
    `labels`: number of leftmost columns that name a row."""

    headings: Sequence[str]
    groups: Sequence[tuple[str | None, Sequence[Sequence[TextCell]]]]
    labels: int = 1
    title: str = ""
    notes: Sequence[str] = ()

    @property
    def rows(self) -> list[Sequence[TextCell]]:
        """The rows of all groups."""
        return [row for _, rows in self.groups for row in rows]

    @property
    def marked(self) -> bool:
        """Return whether a cell is bold."""
        return any(cell.bold for row in self.rows for cell in row)


def plain_table(
    headings: Sequence[str], rows: Iterable[Iterable[str | TextCell]], title: str = "", notes: Sequence[str] = ()
) -> TextTable:
    """Make a table with a single group."""
    cells = [[cell if isinstance(cell, TextCell) else TextCell(cell) for cell in row] for row in rows]
    return TextTable(headings, [(None, cells)], title=title, notes=notes)


def distinct_columns(table: TextTable, kept: Container[str]) -> TextTable:
    """Remove empty columns from a table with a single group. If there are several rows, also move values that all rows
    share to the first note. `kept`: headings of columns that stay even if they are constant."""
    rows, used, shared = table.rows, [], []
    if not rows:
        return table
    for place, heading in enumerate(table.headings):
        texts = {row[place].text for row in rows}
        if texts in ({_NO_CELL}, {""}):
            continue
        if len(texts) > 1 or len(rows) == 1 or heading in kept:
            used.append(place)
        else:
            shared.append(f"{heading} {rows[0][place].text}")
    return replace(
        table,
        headings=[table.headings[place] for place in used],
        groups=[(None, [[row[place] for place in used] for row in rows])],
        notes=[*([f"In every row: {', '.join(shared)}"] if shared else ()), *table.notes],
    )


def markdown_table(table: TextTable, aligned: bool = False) -> str:
    """Format the rows as markdown: labels aligned left, other columns right, names of groups bold. `aligned`: pad
    columns, so that the source text is readable."""
    write = (lambda text: one_line(text).replace("|", "\\|")) if aligned else escape
    rows = [list(map(write, table.headings))]
    for group, lines in table.groups:
        rows += [[f"**{write(group)}**", *[""] * (len(table.headings) - 1)]] if group else []
        rows += [[f"**{write(cell.text)}**" if cell.bold else write(cell.text) for cell in line] for line in lines]
    if aligned:
        widths = [max(map(cell_len, texts)) for texts in zip(*rows, strict=True)]
        rows = [[set_cell_size(text, width) for text, width in zip(row, widths, strict=True)] for row in rows]
        rule = f"|{'|'.join('-' * (width + 2) for width in widths)}|"
    else:
        rule = f"| {' | '.join('---' if at < table.labels else '---:' for at in range(len(table.headings)))} |"
    first, *others = (f"| {' | '.join(row)} |" for row in rows)
    return "\n".join((first, rule, *others))


def escape(text: str) -> str:
    """Escape text for a cell of a markdown table."""
    return prose(str(text).replace("\\", "\\\\").replace("|", "\\|"))


def prose(text: str) -> str:
    """Escape a line of text, including HTML tags, for markdown outside tables."""
    return " ".join(printable(str(text)).split()).replace("<", "&lt;")


_COLUMN, _PAGE, _CHARACTER, _POINTS = 229, 469, 4.5, 8
"""Widths in points: column and page text of a two-column article, character in \\small, space between table columns."""


def latex_table(table: TextTable, label: str, wide: bool = False) -> str:
    """Format as a LaTeX float: a booktabs `tabular` (labels aligned left, other columns right) with the title as
    caption. Environment and font size fit a two-column page; `wide`: the table spans both columns."""
    texts = [table.headings, *([cell.text for cell in row] for row in table.rows)]
    widths = [max(map(len, column)) for column in zip(*texts, strict=True)]
    points = sum(widths) * _CHARACTER + (len(widths) - 1) * _POINTS
    kind, size = "table*" if wide or points > _COLUMN else "table", r"\small" if points <= _PAGE else r"\footnotesize"
    body = []
    for group, rows in table.groups:
        body.append(r"\midrule")
        if group:
            body.append(rf"\multicolumn{{{len(widths)}}}{{l}}{{\textit{{{tex(group)}}}}} \\")
        for row in rows:
            body.append(" & ".join(rf"\textbf{{{tex(text)}}}" if bold else tex(text) for text, bold in row) + r" \\")
    return "\n".join(
        (
            rf"\begin{{{kind}}}",
            rf"\caption{{{tex(table.title)}}}",
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


def latex_label(name: str | None, *content: str) -> str:
    """Make the label of a table from its name, or else from a digest of its content, so that labels differ."""
    number = int(hashlib.sha256("\n".join(content).encode()).hexdigest(), 16) % 10**6
    return "tab:" + (re.sub(r"[^\w-]+", "-", name) if name else f"specbench-{number:06d}")


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


def terminal_table(table: TextTable, width: int, left: Container[str] = (), dim: Container[int] = ()) -> Group:
    """Lay out for a terminal of `width` characters: cells wrap only between words, and columns that do not fit follow
    in a panel below. Each panel repeats the labels; rows that have only labels are in the first panel. `left`: headings
    of columns aligned left, in addition to the labels; `dim`: indices of dimmed columns."""
    headings = [one_line(text) for text in table.headings]
    rows = [
        [cell._replace(text=one_line(cell.text)) for cell in row]
        for group, lines in table.groups
        for row in ([[TextCell(group)]] if group else []) + list(lines)
    ]
    widths = _widths(headings, rows, width, table.labels)
    panels: list[Table] = []
    for run in _panels(widths, width, table.labels) or [[]]:
        drawn = Table(box=None, header_style="bold", padding=(0, COLUMN_GAP, 0, 0), pad_edge=False)
        for place in (*range(table.labels), *run):
            fits, at_left = len(headings[place]) <= widths[place], place < table.labels or headings[place] in left
            drawn.add_column(
                Text(headings[place] if fits else headings[place].replace(" [", "\n[")),
                width=widths[place],
                justify="left" if at_left else "right",
                overflow="fold",
                style="dim" if place in dim else "",
            )
        for row in rows:
            cells = [row[place] for place in (*range(table.labels), *run) if place < len(row)]
            if not panels or len(row) == 1 or any(row[place].text not in ("", _NO_CELL) for place in run):
                style = "italic" if len(row) == 1 else None
                drawn.add_row(*(Text(text, style="bold" if bold else "") for text, bold in cells), style=style)
        panels.append(drawn)
    spaced = (Padding(panel, (0, 0, 0 if panel is panels[-1] else 1, 0)) for panel in panels)
    notes = (Text(one_line(text), style="dim") for text in table.notes)
    return Group(*([Text(f"{one_line(table.title)}:")] if table.title else ()), *spaced, *notes)


def panel_count(table: TextTable, width: int) -> int:
    """Number of panels into which `terminal_table` divides the table."""
    return len(_panels(_widths(table.headings, table.rows, width, table.labels), width, table.labels))


def _panels(widths: Sequence[int], width: int, labels: int) -> list[list[int]]:
    """Return the indices of the columns of each panel. A column that is too wide gets a separate panel."""
    room = width - sum(wide + COLUMN_GAP for wide in widths[:labels])
    panels: list[list[int]] = []
    for place, wide in enumerate(widths[labels:], labels):
        if panels and sum(widths[other] + COLUMN_GAP for other in panels[-1]) + wide <= room:
            panels[-1].append(place)
        else:
            panels.append([place])
    return panels


def _widths(headings: Sequence[str], rows: Sequence[Sequence[TextCell]], width: int, labels: int) -> list[int]:
    """Return the width of each column: of its unwrapped cells if all columns fit, else at most `_WHOLE`, or more for a
    longer word. Labels take at most half of the terminal."""
    columns = [[heading, *(row[place].text for row in rows if len(row) > 1)] for place, heading in enumerate(headings)]
    least = [min(width, max(len(word) for text in column for word in (*text.split(), ""))) for column in columns]
    most = [max(small, *map(len, (*column[1:], ""))) for small, column in zip(least, columns, strict=True)]
    if sum(most) + COLUMN_GAP * (len(most) - 1) <= width:
        return most
    ideal = [max(small, min(large, _WHOLE)) for small, large in zip(least, most, strict=True)]
    return [min(ideal[0], max(least[0], width // 2)), *ideal[1:]] if labels == 1 else ideal
