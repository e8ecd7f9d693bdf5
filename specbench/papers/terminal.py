"""A joined table on a terminal: as many columns side by side as fit, the rest in further panels below."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from rich.console import Console, Group
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from specbench.papers.formats import HERE, OWN, PAPER, below, by_group, heading, texts
from specbench.papers.join import PaperTable

_GAP, _KIND, _LONGEST_LABEL = 2, 6, 32


def terminal(joined: PaperTable, console: Console) -> Group:
    """What to print on a console of any width."""
    rows = [
        (group if place == 0 else None, texts(joined, one, intervals_apart=True))
        for group, members in by_group(joined.lines)
        for place, one in enumerate(members)
    ]
    lines = [line for _, found in rows for line in found]
    headings = [heading(column) for column in joined.table.columns]
    widths = [
        max(*(len(line.texts[place]) for line in lines), *(len(word) for word in text.split()))
        for place, text in enumerate(headings)
    ]
    labels = [*(line.label for line in lines), *(group for group, _ in rows if group)]
    longest = max(map(len, labels))
    whole = longest + _KIND + 2 * _GAP + sum(width + _GAP for width in widths)
    label = longest if whole <= console.width else min(longest, _LONGEST_LABEL)
    panels = [
        _panel(rows, headings, chosen, widths, label)
        for chosen in _fitting(widths, console.width - label - _KIND - 2 * _GAP)
    ]
    return Group(Text(joined.heading, style="bold"), Text(), *panels, *map(Text, below(joined)))


def _fitting(widths: Sequence[int], room: int) -> Iterator[list[int]]:
    """Column places in runs whose widths fit into `room`; a column that is too wide stands alone."""
    chosen: list[int] = []
    for place, width in enumerate(widths):
        if chosen and sum(widths[other] + _GAP for other in chosen) + width > room:
            yield chosen
            chosen = []
        chosen.append(place)
    yield chosen


def _panel(
    rows: Sequence[tuple], headings: Sequence[str], chosen: Sequence[int], widths: Sequence[int], label: int
) -> Padding:
    table = Table(box=None, header_style="bold", padding=(0, _GAP, 0, 0), pad_edge=False)
    table.add_column("", width=label, overflow="fold")
    table.add_column("", width=_KIND, style="dim")
    for place in chosen:
        table.add_column(headings[place], width=widths[place], justify="right", overflow="fold")
    for group, lines in rows:
        if group:
            table.add_row(Text(group, style="italic"))
        for line in lines:
            if line.kind != PAPER and not any(line.texts[place] for place in chosen):
                continue
            cells = (
                Text(line.texts[place], style="bold" if line.best and line.best[place] else "") for place in chosen
            )
            table.add_row(Text(line.label), line.kind, *cells, style="cyan" if line.kind in (HERE, OWN) else None)
    return Padding(table, (0, 0, 1, 0))
