"""Progress of downloads and scoring, on stderr."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

from specbench.system import console

if TYPE_CHECKING:
    from specbench.system.downloads import Progress

# Imports inside functions: each command waits only for what it needs, `--help` and completion for nothing.


@contextmanager
def transfer(what: str) -> Iterator[Progress]:
    """Show the progress of a download: a bar on a terminal, a line every few seconds elsewhere."""
    terminal = console.stderr()
    if not console.progress_shown() or not terminal.is_terminal or terminal.is_dumb_terminal:
        yield TransferLines(what)
        return
    from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn, TransferSpeedColumn

    columns = (TextColumn("{task.description}"), BarColumn(), DownloadColumn(), TransferSpeedColumn())
    with Progress(*columns, TimeRemainingColumn(), console=terminal, transient=True) as bar:
        task = bar.add_task(what, total=None)
        yield lambda done, total: bar.update(task, completed=done, total=total)


class TransferLines:
    """Download progress as a line every few seconds."""

    def __init__(self, what: str):
        self._what, self._last_line = what, time.monotonic()

    def __call__(self, done: int, total: int | None) -> None:
        if console.progress_shown() and time.monotonic() - self._last_line > console.LINE_EVERY_S:
            self._last_line = time.monotonic()
            console.say(f"{self._what}: {done / 1e6:.1f}{f' of {total / 1e6:.1f}' if total else ''} MB")


class ScoreProgress:
    """Progress of scoring (`specbench.metrics.scoring.ScoreReporter`) by run.

    The metrics go through the images together, so the one with the most images left tells how far they all are.
    """

    def __init__(self) -> None:
        self._printed: set[str] = set()
        self._left: dict[str, int] = {}
        self._reporter: console.ProgressReporter | None = None

    def start(self, name: str, metric: str, total: int, done: int) -> None:
        if 0 < done < total:
            console.say(f"{done} of {total} images of {name} by {metric} already done")
        self._left[metric] = total - done

    def image(self, name: str, metric: str) -> None:
        if self._reporter is None:
            self._slowest = max(self._left, key=self._left.__getitem__)
            busy = ", ".join(one for one, left in self._left.items() if left)
            self._reporter = console.ProgressReporter(f"images of {name} by {busy}", quick_s=1.0)
            self._reporter.start(self._left[self._slowest], 0)
        if metric == self._slowest:
            self._reporter.row(f"{name}-", {})

    def finish(self, name: str, metric: str) -> None:
        self._left.pop(metric, None)
        if self._reporter is not None and not self._left:
            self._reporter.finish()
            self._reporter = None

    def left_out(self, name: str, metric: str, why: str) -> None:
        if why not in self._printed:
            console.say(why)
        self._printed.add(why)
