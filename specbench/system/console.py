"""Console output: notes and errors on stderr, results alone on stdout.

Colour follows the terminal and the variables NO_COLOR, FORCE_COLOR and TERM=dumb.
"""

import codecs
import io
import json
import os
import sys
import textwrap
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import Any

from rich.console import Console
from rich.text import Text

from specbench.errors import SpecbenchError

LINE_EVERY_S = 10.0
_progress = {"shown": True}


class _LossyStream(io.TextIOWrapper):
    """stderr that ignores write errors, so that a log on a full disk neither ends a run nor changes its exit code."""

    def write(self, text: str) -> int:
        with suppress(OSError):
            super().write(text)
        return len(text)

    def flush(self) -> None:
        with suppress(OSError):
            super().flush()


def prepare_streams() -> None:
    r"""Make stdout and stderr accept every text, even if they are closed. Characters outside the encoding become
    \uXXXX. Bytes of file names that are not UTF-8 are written unchanged if the stream's error handler allows it."""
    codecs.register_error("specbench", _escaped)
    codecs.register_error("specbench+bytes", _as_given)
    instead = {"strict": "specbench", "backslashreplace": "specbench", "surrogateescape": "specbench+bytes"}
    for name in ("stdout", "stderr"):
        if (stream := getattr(sys, name)) is None:
            setattr(sys, name, open(os.devnull, "w"))  # noqa: SIM115 - for the rest of the process
            warn(f"{name} is closed, so output to it is not printed")
        elif isinstance(stream, io.TextIOWrapper) and stream.errors in instead:
            stream.reconfigure(errors=instead[stream.errors])
    if (raw := sys.stderr) is sys.__stderr__ and isinstance(raw, io.TextIOWrapper):  # not replaced by a test
        sys.stderr = _LossyStream(raw.buffer, raw.encoding, raw.errors, line_buffering=True)


def _escaped(error: Any) -> tuple[str, int]:
    return json.dumps(error.object[error.start : error.end])[1:-1], error.end


def _as_given(error: UnicodeError) -> tuple[bytes | str, int]:
    try:
        return codecs.lookup_error("surrogateescape")(error)
    except UnicodeError:
        return _escaped(error)


def show_progress(shown: bool) -> None:
    """Set whether progress of images, scores and downloads is printed. Results and warnings are always printed."""
    _progress["shown"] = shown


def progress_shown() -> bool:
    return _progress["shown"]


def stderr() -> Console:
    return Console(stderr=True, highlight=False, soft_wrap=True)


def stdout() -> Console:
    """Return the console for results that are laid out for a terminal."""
    return Console(highlight=False)


def is_terminal() -> bool:
    return sys.stdout.isatty()


def has_bars(screen: Console) -> bool:
    """Return whether progress is shown as a bar on `screen` instead of lines."""
    return progress_shown() and screen.is_terminal and not screen.is_dumb_terminal


@contextmanager
def transfer(what: str) -> Iterator[Callable[[int, int | None], None]]:
    """Show the progress of downloads: a bar on a terminal, otherwise a line every few seconds. Yield a function to be
    called with the bytes received and the total bytes (None if unknown)."""
    terminal = stderr()
    if not has_bars(terminal):
        yield _transfer_lines(what)
        return
    from rich import progress  # only for progress bars

    kinds = (progress.BarColumn, progress.DownloadColumn, progress.TransferSpeedColumn, progress.TimeRemainingColumn)
    columns = (progress.TextColumn("{task.description}"), *(kind() for kind in kinds))
    with progress.Progress(*columns, console=terminal, transient=True) as bar:
        task = bar.add_task(what, total=None)
        yield lambda done, total: bar.update(task, completed=done, total=total or None)


def _transfer_lines(what: str) -> Callable[[int, int | None], None]:
    """Show the progress of downloads as a line every few seconds, see `transfer`."""
    began = last = time.monotonic()
    first: int | None = None

    def tell(done: int, total: int | None) -> None:
        nonlocal first, last
        first, now = done if first is None else first, time.monotonic()
        if progress_shown() and now - last > LINE_EVERY_S:
            last, rate = now, (done - first) / (now - began) / 1e6
            of = f" of {total / 1e6:.1f}" if total else ""
            left = f", {(total - done) / 6e7 / rate:.0f} min left" if total and rate else ""
            say(f"{what}: {done / 1e6:.1f}{of} MB, {rate:.1f} MB/s{left}")

    return tell


def counted(number: int, noun: str) -> str:
    """Format a count with its noun: "1 image", "2 images"."""
    return f"{number:,} {noun}{'s' if number != 1 else ''}"


def say(text: str, screen: Console | None = None) -> None:
    """Print one line for the user; `screen`: the console whose progress bar is shown, if any."""
    _print_line(screen or stderr(), one_line(text))


def warn(text: str) -> None:
    _print_line(stderr(), one_line(text), "warning: ")


def show_error(error: SpecbenchError) -> None:
    """Print an error and its hint on one line."""
    hint = f" ({one_line(error.try_this)})" if error.try_this else ""
    stderr().print(Text.assemble(("error: ", "bold red"), one_line(error.what) + hint))


def printable(text: str) -> str:
    """Replace each control character of `text` by a space."""
    return "".join(character if character.isprintable() else " " for character in text)


def duration(seconds: float) -> str:
    """Format a time in a suitable unit: "8 s", "12 min", "3.5 hours", "10 days"."""
    for unit, length in (("days", 86400), ("hours", 3600), ("min", 60)):
        if seconds >= 2 * length:
            count = seconds / length
            return f"{count:.1f} {unit}" if count < 10 and unit != "min" else f"{count:.0f} {unit}"
    return f"{seconds:.0f} s" if seconds >= 10 else f"{seconds:.1f} s"


def one_line(text: str, limit: int = 2000) -> str:
    """Join `text` to one line without control characters, truncated to `limit` characters."""
    clean = " ".join(printable(text).split())
    return clean if len(clean) <= limit else clean[: limit - 3] + "..."


def _print_line(console: Console, line: str, mark: str = "") -> None:
    """Print a line after a coloured `mark`. On a terminal it wraps between words; long words and errors are not
    wrapped, so that they can be copied."""
    line = mark + line
    if console.is_terminal:
        line = textwrap.fill(line, console.width, break_long_words=False, break_on_hyphens=False)
    text = Text(line)
    text.stylize("yellow", 0, len(mark))
    console.print(text)
