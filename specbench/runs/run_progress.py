"""Progress and outcome of a run, for whoever started it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol

from specbench.errors import INTERRUPTED, PARTIAL, SpecbenchError


class Reporter(Protocol):
    """Progress callbacks of a run. Implementations must be fast and must not raise."""

    def start(self, total: int, done: int) -> None:
        """Decoding starts: `total` images over all decoders, `done` of which are stored already."""

    def row(self, run_id: str, row: Mapping[str, object]) -> None:
        """One more row of a run is on disk."""

    def note(self, text: str) -> None:
        """Show a line to the user."""

    def finish(self) -> None:
        """Decoding ended; no more calls follow."""


class SilentReporter:
    """No output."""

    def start(self, total: int, done: int) -> None: ...

    def row(self, run_id: str, row: Mapping[str, object]) -> None: ...

    def note(self, text: str) -> None: ...

    def finish(self) -> None: ...


@dataclass
class RunSummary:
    """Outcome of one call of `run`.

    Attributes:
        folders: run folders, in the order of the specs.
        total: images requested, over all decoders.
        resumed: images that were stored before.
        done, failed: rows written by this call.
        errors: distinct errors of the failed rows.
        interrupted: whether the user stopped it before the end.
    """

    folders: list[Path]
    total: int
    resumed: int
    done: int = 0
    failed: int = 0
    errors: list[str] = field(default_factory=list)
    interrupted: bool = False

    def problem(self) -> SpecbenchError | None:
        """Error with the exit code of an incomplete run; None if it is complete."""
        if self.interrupted:
            there = self.resumed + self.done
            return SpecbenchError(
                f"interrupted with {there} of {self.total} images done",
                "run the same command again to resume",
                INTERRUPTED,
            )
        if self.failed:
            return SpecbenchError(
                f"{self.failed} of {self.total} images failed; the first one: {self.errors[0]}",
                "failed images are rows with their error; run the same command again to retry them",
                PARTIAL,
            )
        return None

    def add(self, other: RunSummary) -> None:
        """Add the counts of another call."""
        self.folders += [folder for folder in other.folders if folder not in self.folders]
        self.total, self.resumed = self.total + other.total, self.resumed + other.resumed
        self.done, self.failed = self.done + other.done, self.failed + other.failed
        self.errors += [error for error in other.errors if error not in self.errors]
        self.interrupted |= other.interrupted

    def count(self, row: Mapping[str, object]) -> None:
        """Count a row that this call wrote."""
        if row["status"] == "ok":
            self.done += 1
            return
        self.failed += 1
        if row["error"] not in self.errors:
            self.errors.append(str(row["error"]))
