"""CPU threads of a run that names none."""

from __future__ import annotations

import os
from pathlib import Path

from specbench.store.run_folders import find_runs_like
from specbench.system.console import counted
from specbench.system.limits import available_cores
from specbench.system.monitor import cores_in_use


def available_threads() -> int:
    """CPU cores of this process, limited by OMP_NUM_THREADS."""
    cores, asked = available_cores(), os.environ.get("OMP_NUM_THREADS", "")
    return min(cores, int(asked)) if asked.isdigit() and int(asked) else cores


def free_threads(out: Path, model: str, device: str) -> tuple[int, list[str]]:
    """The threads of stored runs that this one may resume or be compared with, else one for each core that other
    processes leave, because more make a step many times slower; and a line where these are not all."""
    most = available_threads()
    if most == 1 or device != "cpu" or os.environ.get("OMP_NUM_THREADS"):
        return most, []
    there = find_runs_like(out, model=model, device=device).values()
    unnamed = [one.spec.threads for one in there if (one.origins or {}).get("threads", "").startswith("default")]
    if unnamed and 0 < unnamed[-1] <= most:
        found, why = unnamed[-1], f"as the runs in {out} had"
    else:
        found = min(most, max(1, round(most - cores_in_use())))
        why = f"because other processes use {cores_in_use():.1f} of {most} cores"
    return found, [f"{counted(found, 'thread')}, {why}; --threads {most}: all"] if found < most else []
