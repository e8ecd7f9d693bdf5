"""Progress and outcome of a run, and warnings on disturbed latencies: a latency is valid only on an idle machine with
steady clocks."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from specbench.errors import PARTIAL, SpecbenchError
from specbench.system import signals
from specbench.system.monitor import BUSY_CORES, gpu_disturbances, taken_cores

STEADY_CLOCK = 0.9  # Smallest ratio of lowest to highest GPU clock that counts as steady


class Reporter:
    """Progress callbacks of a run; no-ops by default. Implementations must be fast and must not raise."""

    def start(self, total: int, done: int, folders: Sequence[Path] = ()) -> None:
        """Decoding starts. `total`: number of images over all decoders; `done`: images already in the run folders."""

    def row(self, run_id: str, row: Mapping[str, object]) -> None:
        """A further row of a run is on disk."""

    def part(self, what: str, done: int, total: int, images: int = 0) -> None:
        """Progress within a row or a preparation: steps of a warm-up, compiled forms, windows tried, or tokens of the
        `images` in progress."""

    def stopping(self, within_s: float | None) -> None:
        """A signal requested the end; images in progress may take `within_s` seconds. Called from a signal handler."""

    def note(self, text: str) -> None:
        """Show a line to the user."""

    def finish(self) -> None:
        """Decoding ended, or it never started."""


@dataclass
class RunSummary:
    """Outcome of one call of `run`."""

    folders: list[Path]  # run folders, in the order of the specs
    # total, resumed: number of requested images over all decoders, and of images stored by earlier calls
    total: int
    resumed: int
    # done, failed: rows written by this call
    done: int = 0
    failed: int = 0
    errors: list[str] = field(default_factory=list)  # distinct errors of the failed rows
    interrupted: int = 0  # number of the signal that stopped the run; 0 if it was not stopped

    def problem(self) -> SpecbenchError | None:
        """Return the error of an incomplete run, with its exit code; None if the run is complete."""
        if self.interrupted:
            return signals.stopped(f" with {self.resumed + self.done} of {self.total} images done", self.interrupted)
        if self.failed:
            return SpecbenchError(
                f"{self.failed} of {self.total} images failed; the first one: {self.errors[0]}",
                "the rows of these images contain their errors; run the same command again to retry",
                PARTIAL,
            )
        return None

    def add(self, other: RunSummary) -> None:
        self.folders = [*dict.fromkeys([*self.folders, *other.folders])]
        self.total, self.resumed = self.total + other.total, self.resumed + other.resumed
        self.done, self.failed = self.done + other.done, self.failed + other.failed
        self.errors += [error for error in other.errors if error not in self.errors]
        self.interrupted = self.interrupted or other.interrupted

    def count(self, row: Mapping[str, object]) -> None:
        """Count a row that this call wrote."""
        if row["status"] == "ok":
            self.done += 1
            return
        self.failed += 1
        if row["error"] not in self.errors:
            self.errors.append(str(row["error"]))


def machine_warnings(machines: Sequence[dict[str, Any]]) -> list[str]:
    """Describe disturbances of the latencies in readings of `MachineMonitor`, one sentence each."""
    others = [cores for state in machines if (cores := taken_cores(state)) is not None]
    busy = bool(others) and np.mean(others) > BUSY_CORES
    lines = [f"other processes took {np.mean(others):.1f} of the cores"] if busy else []
    lines += gpu_disturbances(machines)
    clocks = [float(state["gpu_mhz"]) for state in machines if state.get("gpu_mhz")]
    if clocks and min(clocks) < STEADY_CLOCK * max(clocks):
        lines.append(
            f"the GPU's clock varied from {min(clocks):.0f} to {max(clocks):.0f} MHz (nvidia-smi -lgc fixes it)"
        )
    return lines
