"""Console output on stderr: progress, notes, errors. Results alone go to stdout.

Progress is a bar on a terminal, and a plain line every few seconds elsewhere. Colour follows the terminal and the
variables NO_COLOR, FORCE_COLOR and TERM=dumb.
"""

from __future__ import annotations

import sys
import textwrap
import time
from collections.abc import Mapping
from typing import TYPE_CHECKING

from rich.console import Console
from rich.text import Text

from specbench.errors import SpecbenchError

if TYPE_CHECKING:
    from rich.progress import Progress

LINE_EVERY_S = 10.0
_WARNING = "warning: "
_progress = {"shown": True}


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


def say(text: str) -> None:
    """Print one line for the user."""
    _print_line(stderr(), one_line(text))


def warn(text: str) -> None:
    _print_line(stderr(), f"{_WARNING}{one_line(text)}")


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


def show_error(error: SpecbenchError) -> None:
    """Print an error and its hint on one line."""
    hint = f" ({one_line(error.try_this)})" if error.try_this else ""
    stderr().print(Text.assemble(("error: ", "bold red"), one_line(error.what) + hint))


def printable(text: str) -> str:
    """Replace each control character of `text` by a space."""
    return "".join(character if character.isprintable() else " " for character in text)


def one_line(text: str, limit: int = 2000) -> str:
    """Join `text` to one line without control characters, truncated to `limit` characters."""
    clean = " ".join(printable(text).split())
    return clean if len(clean) <= limit else clean[: limit - 3] + "..."


class ProgressReporter:
    """Progress of a runner (`specbench.runs.run_progress.Reporter`): a bar on a terminal, plain lines elsewhere.

    Args:
        what: what is counted.
        quick_s: work that took less is not mentioned at its end.
    """

    def __init__(self, what: str = "images", quick_s: float = 0.0):
        self.what, self._quick_s = what, quick_s
        self._console = stderr()
        self._bar: Progress | None = None
        self._failed = 0

    def start(self, total: int, done: int) -> None:
        self._total, self._done, self._resumed = total, done, done
        self._started = self._last_line = time.monotonic()
        if done:
            self.note(f"{done} of {total} {self.what} already done")
        if progress_shown() and self._console.is_terminal and not self._console.is_dumb_terminal and total > done:
            self._bar = _bar(self._console)
            self._task = self._bar.add_task(self.what, total=total, completed=done)
            self._bar.start()

    def row(self, run_id: str, row: Mapping[str, object]) -> None:
        self._done += 1
        self._failed += row.get("status") == "failed"
        if self._bar is not None:
            failed = f" ({self._failed} failed)" if self._failed else ""
            self._bar.update(self._task, completed=self._done, description=run_id.rpartition("-")[0] + failed)
        elif progress_shown() and time.monotonic() - self._last_line > LINE_EVERY_S:
            self._last_line = time.monotonic()
            self.note(self._plain())

    def note(self, text: str) -> None:
        _print_line(self._console, one_line(text))

    def finish(self) -> None:
        if self._bar is not None:
            self._bar.stop()
            self._bar = None
        seconds = time.monotonic() - self._started
        if self._done > self._resumed and seconds >= self._quick_s:
            self.note(f"{self._done - self._resumed} {self.what} in {seconds:.0f} s")

    def _plain(self) -> str:
        seconds = time.monotonic() - self._started
        rate = (self._done - self._resumed) / seconds
        failed = f", {self._failed} failed" if self._failed else ""
        left = (self._total - self._done) / rate
        return f"{self._done}/{self._total} {self.what}{failed}, {rate:.1f} a second, {left:.0f} s left"


def _bar(console: Console) -> Progress:
    from rich import progress  # only for progress bars

    columns = (
        progress.TextColumn("{task.description}"),
        progress.BarColumn(),
        progress.MofNCompleteColumn(),
        progress.TimeElapsedColumn(),
        progress.TimeRemainingColumn(),
        progress.TextColumn("left"),
    )
    return progress.Progress(*columns, console=console, transient=True)


def is_terminal() -> bool:
    return sys.stdout.isatty()
