"""Tables fitted to the width of a terminal: cells wrap between words only, the columns that do not fit stand below."""

from __future__ import annotations

from collections.abc import Sequence

from rich.console import Group
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from specbench.system.console import one_line

_MISSING = "-"
_GAP = 2
_WHOLE = 28
"""Cells up to this width are not wrapped while another panel can be opened."""


def fitted(headings: Sequence[str], rows: Sequence[Sequence[str]], width: int, right: Sequence[int] = ()) -> Group:
    """Lay out rows of texts; each panel repeats the first column; rows without a further text stand in the first.

    Args:
        width: of the terminal, in characters.
        right: indices of the columns aligned right.
    """
    headings = [one_line(text) for text in headings]
    cells = [[one_line(text) for text in row] for row in rows]
    columns = [[heading, *(row[place] for row in cells)] for place, heading in enumerate(headings)]
    least = [min(width, max(len(word) for text in column for word in (*text.split(), ""))) for column in columns]
    most = [max(map(len, (*column[1:], *column[0].split()))) for column in columns]
    most = [max(pair) for pair in zip(least, most, strict=True)]
    wanted = [max(small, min(large, _WHOLE)) for small, large in zip(least, most, strict=True)]
    first = min(wanted[0], max(least[0], width // 2))
    first = max(first, min(most[0], width - sum(most[1:]) - _GAP * (len(most) - 1)))
    panels = []
    for chosen in _packed(wanted, width - first - _GAP):
        widths = _widened(chosen, least, most, wanted, width - first - _GAP)
        panels.append(_panel(headings, cells, [0, *chosen], [first, *widths], right))
    if len(headings) == 1:
        panels = [_panel(headings, cells, [0], [first], right)]
    return Group(*(Padding(panel, (0, 0, 0 if panel is panels[-1] else 1, 0)) for panel in panels))


def fitted_distinct(
    headings: Sequence[str], rows: Sequence[Sequence[str]], width: int, kept: Sequence[int], right: Sequence[int]
) -> Group:
    """`fitted` without the columns that are empty; what all of several rows share stands in one line below.

    Args:
        kept: indices of columns that stay if they are constant.
    """
    shown = used_columns(rows, kept)
    alike = [
        f"{heading} {rows[0][place]}"
        for place, heading in enumerate(headings)
        if rows and place not in shown and rows[0][place] != _MISSING
    ]
    table = fitted(
        [headings[place] for place in shown],
        [[row[place] for place in shown] for row in rows],
        width,
        right=[index for index, place in enumerate(shown) if place in right],
    )
    return Group(table, *([Text(f"in every row: {', '.join(alike)}", style="dim")] if alike else []))


def used_columns(rows: Sequence[Sequence[str]], kept: Sequence[int]) -> list[int]:
    """Indices of the columns that say something: not empty in every row, nor the same in all of several rows.

    Args:
        kept: indices of columns that stay if they are constant.
    """
    found = []
    for place in range(len(rows[0]) if rows else 0):
        texts = {row[place] for row in rows}
        constant = len(texts) == 1 and len(rows) > 1 and place not in kept
        if texts != {_MISSING} and not constant:
            found.append(place)
    return found


def _packed(wanted: Sequence[int], room: int) -> list[list[int]]:
    """Columns after the first in runs whose widths fit into `room`; a column that is too wide stands alone."""
    runs: list[list[int]] = []
    for place in range(1, len(wanted)):
        if runs and sum(wanted[other] + _GAP for other in runs[-1]) + wanted[place] <= room:
            runs[-1].append(place)
        else:
            runs.append([place])
    return runs


def _widened(
    chosen: Sequence[int], least: Sequence[int], most: Sequence[int], wanted: Sequence[int], room: int
) -> list[int]:
    """Widths of one panel's columns: unused `room` goes to the columns that would otherwise wrap."""
    widths = {place: min(wanted[place], max(room, least[place])) for place in chosen}
    spare = room - sum(widths.values()) - _GAP * (len(chosen) - 1)
    for place in sorted(chosen, key=lambda place: most[place]):
        more = min(max(spare, 0), most[place] - widths[place])
        widths[place] += more
        spare -= more
    return [widths[place] for place in chosen]


def _panel(
    headings: Sequence[str], rows: Sequence[Sequence[str]], chosen: Sequence[int], widths: Sequence[int], right
) -> Table:
    table = Table(box=None, header_style="bold", padding=(0, _GAP, 0, 0), pad_edge=False)
    for place, width in zip(chosen, widths, strict=True):
        justify = "right" if place in right else "left"
        table.add_column(Text(headings[place]), width=width, justify=justify, overflow="fold", vertical="top")
    first_panel = len(chosen) == 1 or 1 in chosen
    for row in rows:
        if first_panel or any(row[place] not in ("", _MISSING) for place in chosen[1:]):
            table.add_row(*(Text(row[place]) for place in chosen))
    return table
