"""Progress of runs and scoring, on stderr: a bar on a terminal, a plain line every few seconds elsewhere."""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import TYPE_CHECKING

from specbench.system import console

if TYPE_CHECKING:
    from rich.console import Console
    from rich.progress import Progress as Bar

# Imports inside functions: each command waits only for what it needs, `--help` and completion for nothing.


class ProgressReporter:
    """Progress of a runner (`specbench.runs.run_progress.Reporter`): a bar on a terminal, plain lines elsewhere.

    Args:
        what: what is counted.
        quick_s: work that took less is not mentioned at its end.
    """

    def __init__(self, what: str = "images", quick_s: float = 0.0):
        self.what, self._quick_s = what, quick_s
        self._console = console.stderr()
        self._bar: Bar | None = None
        self._failed = 0

    def start(self, total: int, done: int) -> None:
        self._total, self._done, self._resumed = total, done, done
        self._started = self._last_line = time.monotonic()
        if done:
            self.note(f"{done} of {total} {self.what} already done")
        if total > done and console.has_bars(self._console):
            self._bar = _bar(self._console)
            self._task = self._bar.add_task(self.what, total=total, completed=done)
            self._bar.start()

    def row(self, run_id: str, row: Mapping[str, object]) -> None:
        self._done += 1
        self._failed += row.get("status") == "failed"
        if self._bar is not None:
            failed = f" ({self._failed} failed)" if self._failed else ""
            self._bar.update(self._task, completed=self._done, description=run_id.rpartition("-")[0] + failed)
        elif console.progress_shown() and time.monotonic() - self._last_line > console.LINE_EVERY_S:
            self._last_line = time.monotonic()
            self.note(self._plain())

    def note(self, text: str) -> None:
        console.say(text, self._console)

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


def _bar(screen: Console) -> Bar:
    from rich import progress  # only for progress bars

    columns = (
        progress.TextColumn("{task.description}"),
        progress.BarColumn(),
        progress.MofNCompleteColumn(),
        progress.TimeElapsedColumn(),
        progress.TimeRemainingColumn(),
        progress.TextColumn("left"),
    )
    return progress.Progress(*columns, console=screen, transient=True)


class ScoreProgress:
    """Progress of scoring (`specbench.metrics.scoring.ScoreReporter`) by run.

    The metrics go through the images together, so the one with the most images left tells how far they all are.
    """

    def __init__(self) -> None:
        self._printed: set[str] = set()
        self._left: dict[str, int] = {}
        self._reporter: ProgressReporter | None = None

    def start(self, name: str, metric: str, total: int, done: int) -> None:
        if 0 < done < total:
            console.say(f"{done} of {total} images of {name} by {metric} already done")
        self._left[metric] = total - done

    def image(self, name: str, metric: str) -> None:
        if self._reporter is None:
            self._slowest = max(self._left, key=self._left.__getitem__)
            busy = ", ".join(one for one, left in self._left.items() if left)
            self._reporter = ProgressReporter(f"images of {name} by {busy}", quick_s=1.0)
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
