"""Progress of downloads and of scoring, on stderr."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

from specbench.system import console

if TYPE_CHECKING:
    from specbench.system.downloads import Progress


@contextmanager
def transfer(what: str) -> Iterator[Progress]:
    """Progress of a download: a bar on a terminal, a line now and then elsewhere."""
    terminal = console.stderr()
    if not terminal.is_terminal or terminal.is_dumb_terminal:
        yield TransferLines(what)
        return
    from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn, TransferSpeedColumn

    columns = (TextColumn("{task.description}"), BarColumn(), DownloadColumn(), TransferSpeedColumn())
    with Progress(*columns, TimeRemainingColumn(), console=terminal, transient=True) as bar:
        task = bar.add_task(what, total=None)
        yield lambda done, total: bar.update(task, completed=done, total=total)


class TransferLines:
    """Tells a download's progress as a line now and then."""

    def __init__(self, what: str):
        self._what, self._told = what, time.monotonic()

    def __call__(self, done: int, total: int | None) -> None:
        if time.monotonic() - self._told > console.LINE_EVERY_S:
            self._told = time.monotonic()
            console.say(f"{self._what}: {done / 1e6:.1f}{f' of {total / 1e6:.1f}' if total else ''} MB")


class ScoreProgress:
    """Tells a scorer's progress (`specbench.metrics.scoring.Reporter`), run by run and metric by metric."""

    def __init__(self) -> None:
        self._told: set[str] = set()

    def start(self, name: str, metric: str, total: int, done: int) -> None:
        self._reporter = console.ProgressReporter(f"images of {name} by {metric}")
        self._reporter.start(total, done)

    def image(self, name: str, metric: str) -> None:
        self._reporter.row(f"{name}-", {})

    def finish(self, name: str, metric: str) -> None:
        self._reporter.finish()

    def left_out(self, name: str, metric: str, why: str) -> None:
        if why not in self._told:
            console.say(why)
        self._told.add(why)
