"""Progress of runs and scoring: a bar on a terminal, otherwise a plain line every few seconds."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from specbench.system import console

if TYPE_CHECKING:
    from rich.progress import Progress as Bar

    from specbench.metrics.scoring import ScoreReporter
    from specbench.runs.run_progress import Reporter
else:
    Reporter = ScoreReporter = object  # not imported at run time, because their modules import pandas


class ProgressReporter(Reporter):
    """Shows progress of a runner (`specbench.runs.run_progress.Reporter`). `what`: name of the items; `quick_s`:
    shortest run, in seconds, whose end is reported; `notes`: whether the runner's notes are printed."""

    def __init__(self, what: str = "images", quick_s: float = 0.0, notes: bool = True):
        self.what, self._quick_s, self._notes = what, quick_s, notes
        self._console = console.stderr()
        self._bar: Bar | None = None
        self._failed, self._total, self._done, self._resumed = 0, 0, 0, 0
        self._part, self._started = _Part(), time.monotonic()
        self._last_line = self._started

    def start(self, total: int, done: int, folders: Sequence[Path] = ()) -> None:
        self._total, self._done, self._resumed = total, done, done
        self._started = self._last_line = time.monotonic()
        if done:
            self.note(f"{done} of {total} {self.what} already done")
        if total > done:
            self._show(description=self.what, total=total, completed=done, ahead="")

    def row(self, run_id: str, row: Mapping[str, object]) -> None:
        self._done += 1
        self._failed += row.get("status") == "failed"
        self._part = _Part()
        if self._bar is not None:
            failed = f" ({self._failed} failed)" if self._failed else ""
            name = run_id.rpartition("-")[0] + failed
            self._bar.update(self._task, completed=self._done, description=name, ahead=self._ahead().removeprefix(", "))
        else:
            self._line(self._plain)

    def part(self, what: str, done: int, total: int, images: int = 0) -> None:
        if what != self._part.what or total != self._part.total or done < self._part.done:
            self._part = _Part(what, total, done, time.monotonic())
        self._part.done, self._part.images = done, images
        if not self._total and console.has_bars(self._console):
            self._show(description=what, total=total, completed=done, ahead=self._part.ahead())
        elif self._bar is not None:
            left = self._ahead().rpartition(", ")[2]  # only the time left, because the bar's line is short
            ahead = f"{left}; {self._part}" if left else str(self._part)
            self._bar.update(self._task, completed=self._images_done(), ahead=ahead)
        else:
            self._line(lambda: f"{self._plain()}; {self._part}" if self._total else str(self._part))

    def stopping(self, within_s: float | None) -> None:
        limit = (
            f"images that take longer than {within_s:.0f} s are dropped" if within_s else "Ctrl-C again stops at once"
        )
        work = f"{console.counted(self._part.images or 1, 'image')} in progress"
        ends = f"{work}: {self._part}" if self._part.images else work
        self.note(f"ending after {ends} ({limit}; finished images are kept)")

    def note(self, text: str) -> None:
        if self._notes:
            console.say(text, self._console)

    def finish(self) -> None:
        if self._bar is not None:
            self._bar.stop()
            self._bar = None
        seconds = time.monotonic() - self._started
        if (done := self._done - self._resumed) and seconds >= self._quick_s:
            what = self.what.replace("images", "image", done == 1)
            self.note(f"{done} {what} in {console.duration(seconds)}")
        self._total, self._done, self._resumed, self._part = 0, 0, 0, _Part()

    def _show(self, **shown: Any) -> None:
        """Update the bar, which the first update opens; do nothing without a terminal."""
        if not console.has_bars(self._console):
            return
        if self._bar is None:
            from rich import progress  # only for progress bars

            columns = (
                progress.TextColumn("{task.description}"),
                progress.BarColumn(bar_width=None),
                progress.MofNCompleteColumn(),
                progress.TextColumn("{task.fields[ahead]}"),
            )
            shape: dict[str, Any] = {"transient": True, "expand": True, "refresh_per_second": 4}
            self._bar = progress.Progress(*columns, console=self._console, **shape)
            self._task = self._bar.add_task("", ahead="")
            self._bar.start()
        self._bar.update(self._task, **shown)

    def _line(self, text: Callable[[], str]) -> None:
        """Print a plain line if the last line was printed some seconds ago."""
        if console.progress_shown() and time.monotonic() - self._last_line > console.LINE_EVERY_S:
            self._last_line = time.monotonic()
            console.say(text(), self._console)

    def _images_done(self) -> float:
        """Number of images done, including fractions of the images in progress."""
        return self._done + self._part.images * self._part.done / max(self._part.total, 1)

    def _plain(self) -> str:
        failed = f", {self._failed} failed" if self._failed else ""
        return f"{self._done}/{self._total} {self.what}{failed}{self._ahead()}"

    def _ahead(self) -> str:
        """Format the pace of the images and the time left."""
        return _ahead(self._images_done() - self._resumed, self._total - self._images_done(), self._started)


@dataclass
class _Part:
    """Progress of the images that are being decoded, or of a warm-up, with its start time."""

    what: str = ""
    total: int = 0
    first: int = 0
    since: float = 0.0
    done: int = 0
    images: int = 0

    def __str__(self) -> str:
        ahead = self.ahead()
        return f"{self.done}/{self.total} {self.what}{f', {ahead}' if ahead else ''}"

    def ahead(self) -> str:
        """Format the pace and the time left."""
        return _ahead(self.done - self.first, self.total - self.done, self.since).removeprefix(", ")


def _ahead(done: float, left: float, since: float) -> str:
    """Format the pace of `done` items since a time, and the time left at this pace; empty if nothing is done."""
    if not done:
        return ""
    each = (time.monotonic() - since) / done
    pace = f"{1 / each:.3g} a second" if each <= 1 else f"{console.duration(each)} each"
    return f", {pace}, {console.duration(left * each)} left"


class ScoreProgress(ScoreReporter):
    """Shows the progress of scoring a run. All metrics share a pass; the metric with most images left is shown."""

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
            busy = ", ".join(name for name, left in self._left.items() if left)
            self._reporter = ProgressReporter(f"images of {name} by {busy}", quick_s=1.0)
            self._reporter.start(self._left[self._slowest], 0)
        if metric == self._slowest:
            self._reporter.row(f"{name}-", {})

    def finish(self, name: str, metric: str) -> None:
        self._left.pop(metric, None)
        if self._reporter is not None and not self._left:
            self._reporter.finish()
            self._reporter = None

    def note(self, text: str) -> None:
        if text not in self._printed:
            console.say(text)
        self._printed.add(text)
