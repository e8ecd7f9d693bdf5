"""Console output: notes and errors on stderr, results alone on stdout, tables fitted to a terminal's width.

Colour follows the terminal and the variables NO_COLOR, FORCE_COLOR and TERM=dumb.
"""

from __future__ import annotations

import codecs
import io
import json
import os
import sys
import textwrap
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress

from rich.console import Console, Group
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from specbench.errors import SpecbenchError

LINE_EVERY_S = 10.0
_WARNING = "warning: "
_progress = {"shown": True}
_NO_CELL = "-"
_GAP = 2
_WHOLE, _NARROWEST = 28, 12  # Table cells up to this width are not wrapped while another panel can be opened


class _LossyStream(io.TextIOWrapper):
    """stderr that drops what its file does not take: a log on a full disk ends no run and changes no exit code."""

    def write(self, text: str) -> int:
        with suppress(OSError):
            super().write(text)
        return len(text)

    def flush(self) -> None:
        with suppress(OSError):
            super().flush()


def prepare_streams() -> None:
    """Let stdout and stderr take every text, and be closed: what an encoding lacks is written as in JSON, \\uXXXX."""
    codecs.register_error("specbench", _escaped)
    codecs.register_error("specbench+bytes", _as_given)
    instead = {"strict": "specbench", "backslashreplace": "specbench", "surrogateescape": "specbench+bytes"}
    for name in ("stdout", "stderr"):
        stream = getattr(sys, name)
        if stream is None:
            setattr(sys, name, open(os.devnull, "w"))  # noqa: SIM115 - for the rest of the process
            warn(f"{name} is closed: what belongs there is not printed")
        elif isinstance(stream, io.TextIOWrapper) and stream.errors in instead:
            stream.reconfigure(errors=instead[stream.errors])
    if (raw := sys.stderr) is sys.__stderr__ and isinstance(raw, io.TextIOWrapper):  # not that of a test
        sys.stderr = _LossyStream(raw.buffer, raw.encoding, raw.errors, line_buffering=True)


def _escaped(error: UnicodeError) -> tuple[str, int]:
    return json.dumps(error.object[error.start : error.end])[1:-1], error.end


def _as_given(error: UnicodeError) -> tuple[bytes | str, int]:
    try:
        return codecs.lookup_error("surrogateescape")(error)
    except UnicodeError:
        return _escaped(error)


def show_progress(shown: bool) -> None:
    """Choose whether progress of images, scores and downloads is printed; results and warnings are in any case."""
    _progress["shown"] = shown


def progress_shown() -> bool:
    return _progress["shown"]


def stderr() -> Console:
    return Console(stderr=True, highlight=False, soft_wrap=True)


def stdout() -> Console:
    """Console of results that are laid out for a terminal."""
    return Console(highlight=False)


def is_terminal() -> bool:
    return sys.stdout.isatty()


def has_bars(screen: Console) -> bool:
    """Whether progress is a bar on `screen` or in a notebook, as opposed to lines."""
    return progress_shown() and (in_notebook() or (screen.is_terminal and not screen.is_dumb_terminal))


def in_notebook() -> bool:
    """Whether this process runs the cells of a notebook."""
    shell = getattr(sys.modules.get("IPython"), "get_ipython", lambda: None)()
    return type(shell).__name__ == "ZMQInteractiveShell"


@contextmanager
def transfer(what: str) -> Iterator[Callable[[int, int | None], None]]:
    """Show the progress of downloads: a bar on a terminal, a line every few seconds elsewhere.

    Yields:
        a function of bytes received and bytes in all, None if unknown.
    """
    terminal = stderr()
    if not has_bars(terminal) or in_notebook():
        yield _transfer_lines(what)
        return
    from rich import progress  # only for progress bars

    columns = (progress.TextColumn("{task.description}"), progress.BarColumn(), progress.DownloadColumn())
    columns = (*columns, progress.TransferSpeedColumn(), progress.TimeRemainingColumn())
    with progress.Progress(*columns, console=terminal, transient=True) as bar:
        task = bar.add_task(what, total=None)
        yield lambda done, total: bar.update(task, completed=done, total=total or None)


def _transfer_lines(what: str) -> Callable[[int, int | None], None]:
    """Download progress as a line every few seconds."""
    last, first_bytes = [time.monotonic()], []

    def tell(done: int, total: int | None) -> None:
        first_bytes[:] = first_bytes or [done]
        now = time.monotonic()
        if progress_shown() and now - last[-1] > LINE_EVERY_S:
            last.append(now)
            rate = (done - first_bytes[0]) / (now - last[0]) / 1e6
            of = f" of {total / 1e6:.1f}" if total else ""
            left = f", {(total - done) / 6e7 / rate:.0f} min left" if total and rate else ""
            say(f"{what}: {done / 1e6:.1f}{of} MB, {rate:.1f} MB/s{left}")

    return tell


def counted(number: int, noun: str) -> str:
    """Format a number of things."""
    return f"{number:,} {noun}{'s' if number != 1 else ''}"


def say(text: str, screen: Console | None = None) -> None:
    """Print one line for the user; on `screen` where a progress bar is shown there."""
    _print_line(screen or stderr(), one_line(text))


def warn(text: str) -> None:
    _print_line(stderr(), f"{_WARNING}{one_line(text)}")


def show_error(error: SpecbenchError) -> None:
    """Print an error and its hint on one line."""
    hint = f" ({one_line(error.try_this)})" if error.try_this else ""
    stderr().print(Text.assemble(("error: ", "bold red"), one_line(error.what) + hint))


def printable(text: str) -> str:
    """Replace each control character of `text` by a space."""
    return "".join(character if character.isprintable() else " " for character in text)


def duration(seconds: float) -> str:
    """Format a time in the unit that people would use: "8 s", "12 min", "3.5 hours", "10 days"."""
    for unit, length in (("days", 86400), ("hours", 3600), ("min", 60)):
        if seconds >= 2 * length:
            count = seconds / length
            return f"{count:.1f} {unit}" if count < 10 and unit != "min" else f"{count:.0f} {unit}"
    return f"{seconds:.0f} s" if seconds >= 10 else f"{seconds:.1f} s"


def one_line(text: str, limit: int = 2000) -> str:
    """Join `text` to one line without control characters, truncated to `limit` characters."""
    clean = " ".join(printable(text).split())
    return clean if len(clean) <= limit else clean[: limit - 3] + "..."


def fitted(headings: Sequence[str], rows: Sequence[Sequence[str]], width: int, right: Sequence[int] = ()) -> Group:
    """Lay out rows of texts: cells wrap between words only, the columns that do not fit stand in a panel below.

    Each panel repeats the first column; rows without a further text stand in the first.

    Args:
        width: of the terminal, in characters.
        right: indices of the columns aligned right.
    """
    headings, cells = [one_line(text) for text in headings], [[one_line(text) for text in row] for row in rows]
    least, most, wanted, first = _measured(headings, cells, width)
    panels = []
    # A first column that wraps more may leave room for all others beside it.
    narrow = range(first, max(least[0], _NARROWEST) - 1, -1)
    first = min(narrow or [first], key=lambda wide: (len(packed(wanted[1:], width - wide - _GAP)), -wide))
    for run in packed(wanted[1:], width - first - _GAP):
        chosen = [1 + place for place in run]
        widths = _widened(chosen, least, most, wanted, width - first - _GAP, headings)
        panels.append(_panel(headings, cells, [0, *chosen], [first, *widths], right))
    if len(headings) == 1:
        panels = [_panel(headings, cells, [0], [first], right)]
    return Group(*(Padding(panel, (0, 0, 0 if panel is panels[-1] else 1, 0)) for panel in panels))


def panel_count(headings: Sequence[str], rows: Sequence[Sequence[str]], width: int) -> int:
    """Into how many panels `fitted` cuts these rows."""
    cells = [[one_line(text) for text in row] for row in rows]
    _, _, wanted, first = _measured(headings, cells, width)
    return len(packed(wanted[1:], width - first - _GAP))


def _measured(
    headings: Sequence[str], cells: Sequence[Sequence[str]], width: int
) -> tuple[list[int], list[int], list[int], int]:
    """Widths of each column: the least, that of unwrapped cells, the one wanted; and that of the first column."""
    columns = [[heading, *(row[place] for row in cells)] for place, heading in enumerate(headings)]
    least = [min(width, max(len(word) for text in column for word in (*text.split(), ""))) for column in columns]
    most = [max(map(len, (*column[1:], *column[0].split()))) for column in columns]
    most = [max(pair) for pair in zip(least, most, strict=True)]
    wanted = [max(small, min(large, _WHOLE)) for small, large in zip(least, most, strict=True)]
    first = min(wanted[0], max(least[0], width // 2))
    return least, most, wanted, max(first, min(most[0], width - sum(most[1:]) - _GAP * (len(most) - 1)))


def fitted_distinct(
    headings: Sequence[str], rows: Sequence[Sequence[str]], width: int, kept: Sequence[int], right: Sequence[int]
) -> Group:
    """`fitted` without the columns that are empty; what all of several rows share stands in one line below. `kept`:
    indices of columns that stay if they are constant."""
    shown = used_columns(rows, kept)
    alike = shared_cells(headings, rows, shown)
    table = fitted(
        [headings[place] for place in shown],
        [[row[place] for place in shown] for row in rows],
        width,
        right=[index for index, place in enumerate(shown) if place in right],
    )
    return Group(table, *([Text(alike, style="dim")] if alike else []))


def shared_cells(headings: Sequence[str], rows: Sequence[Sequence[str]], shown: Sequence[int]) -> str:
    """What all rows share in the columns that are not `shown`, in one line; "" if nothing."""
    alike = [
        f"{heading} {rows[0][place]}"
        for place, heading in enumerate(headings)
        if rows and place not in shown and rows[0][place] not in ("", _NO_CELL)
    ]
    return f"In every row: {', '.join(alike)}" if alike else ""


def used_columns(rows: Sequence[Sequence[str]], kept: Sequence[int]) -> list[int]:
    """Indices of the columns that say something: not empty in every row, nor the same in all of several rows. `kept`:
    indices of columns that stay if they are constant."""
    places = []
    for place in range(len(rows[0]) if rows else 0):
        texts = {row[place] for row in rows}
        constant = len(texts) == 1 and len(rows) > 1 and place not in kept
        if texts not in ({_NO_CELL}, {""}) and not constant:
            places.append(place)
    return places


def _print_line(console: Console, line: str) -> None:
    """Print a line, on a terminal broken between words.

    A word that is longer than the terminal is wide, and errors, are left to the terminal, so that an address or a
    command can be copied from it.
    """
    if console.is_terminal:
        line = textwrap.fill(line, console.width, break_long_words=False, break_on_hyphens=False)
    text = Text(line)
    text.stylize("yellow", 0, len(_WARNING) if line.startswith(_WARNING) else 0)
    console.print(text)


def packed(wanted: Sequence[int], room: int) -> list[list[int]]:
    """Columns in runs whose widths fit into `room`; a column that is too wide stands alone."""
    runs: list[list[int]] = []
    for place, width in enumerate(wanted):
        if runs and sum(wanted[other] + _GAP for other in runs[-1]) + width <= room:
            runs[-1].append(place)
        else:
            runs.append([place])
    return runs


def _widened(
    chosen: Sequence[int],
    least: Sequence[int],
    most: Sequence[int],
    wanted: Sequence[int],
    room: int,
    headings: Sequence[str],
) -> list[int]:
    """Widths of one panel's columns: unused `room` goes to the cells that would otherwise wrap, then to headings of
    more than two lines."""
    widths = {place: min(wanted[place], max(room, least[place])) for place in chosen}
    spare = room - sum(widths.values()) - _GAP * (len(chosen) - 1)
    for place in sorted(chosen, key=lambda place: most[place]):
        more = min(max(spare, 0), most[place] - widths[place])
        widths[place] += more
        spare -= more
    for place in chosen:
        more = max(0, _two_lines(headings[place]) - widths[place])
        widths[place] += more if more <= spare else 0
        spare -= more if more <= spare else 0
    return [widths[place] for place in chosen]


def _two_lines(heading: str) -> int:
    """Width at which a heading takes two lines."""
    words = heading.split()
    cuts = [(" ".join(words[:place]), " ".join(words[place:])) for place in range(len(words))]
    return min((max(map(len, cut)) for cut in cuts), default=0)


def _panel(
    headings: Sequence[str], rows: Sequence[Sequence[str]], chosen: Sequence[int], widths: Sequence[int], right
) -> Table:
    table = Table(box=None, header_style="bold", padding=(0, _GAP, 0, 0), pad_edge=False)
    for place, width in zip(chosen, widths, strict=True):
        justify = "right" if place in right else "left"
        heading = headings[place] if len(headings[place]) <= width else headings[place].replace(" [", "\n[")
        table.add_column(Text(heading), width=width, justify=justify, overflow="fold", vertical="top")
    first_panel = len(chosen) == 1 or 1 in chosen
    for row in rows:
        if first_panel or any(row[place] not in ("", _NO_CELL) for place in chosen[1:]):
            table.add_row(*(Text(row[place]) for place in chosen))
    return table
