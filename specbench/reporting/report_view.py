"""The report on a terminal: the answer in sentences, then one short table per section, fitted to the width."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

from rich.console import Group, RenderableType
from rich.text import Text

from specbench.reporting.columns import AUDIT, MISSING, SUMMARY, ReportColumn, score_columns
from specbench.reporting.sections import Section, circumstances, sections
from specbench.system.console import one_line
from specbench.system.terminal_tables import fitted_distinct

_MORE = "specbench report --explain defines the columns; specbench report | less shows all of them"
_LEFT = ("decoder", "lossless", "audit")
_KEPT = ("decoder", "speed-up [95 %]")
"""Columns that are shown even if all rows agree."""


def report_view(rows: Sequence[Mapping], width: int, explain: bool = False) -> Group:
    """Lay out the rows of `report_rows`.

    Args:
        width: of the terminal, in characters.
        explain: add the definition of each column.
    """
    parts: list[RenderableType] = []
    definitions: dict[str, None] = {}
    for section in sections(rows):
        columns = [
            one for one in summary_columns(section.runs) if any(one.cell(row) != MISSING for row in section.runs)
        ]
        parts += [Text(one_line(section.heading), style="bold"), *_answer(section), summary_table(section.runs, width)]
        parts += [Text(remark, style="dim") for table in section.tables if (remark := table.remark)]
        parts.append(Text())
        definitions |= dict.fromkeys(text for column in columns if (text := column.definition()))
    around = circumstances(rows, parts=False)
    below = [*definitions, *around] if explain else [*around, _MORE]
    return Group(*parts, *(Text(one_line(text), style="dim") for text in below))


def summary_table(runs: Sequence[Mapping], width: int) -> Group:
    """One line per run with what a first look needs; what all runs share stands in one line below."""
    columns = summary_columns(runs)
    cells = [[column.cell(row) for column in columns] for row in runs]
    headings = [column.heading for column in columns]
    kept = [place for place, heading in enumerate(headings) if heading in _KEPT]
    return fitted_distinct(
        headings, cells, width, kept, right=[place for place, heading in enumerate(headings) if heading not in _LEFT]
    )


def summary_columns(runs: Sequence[Mapping]) -> list[ReportColumn]:
    """The columns of `summary_table`, before empty and constant ones are dropped."""
    return [*SUMMARY, *(AUDIT if any(row.get("audit") for row in runs) else ()), *score_columns(runs)]


def _answer(section: Section) -> Iterator[RenderableType]:
    if section.answer:
        yield from (Text(), *(Text(one_line(sentence)) for sentence in section.answer), Text())
