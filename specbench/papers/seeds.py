"""Runs that differ in the seed alone read as one, for tables whose paper averages over seeds."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np
import pandas as pd

from specbench.metrics.score_store import scores_to_show
from specbench.reporting.compare import real_differences
from specbench.reporting.report_rows import Run, nearest_ar, report_row
from specbench.store.run_info import RunInfo
from specbench.store.run_store import read_audit

SEEDS = (
    "Rows of several seeds: numbers are over the images of all seeds, with prompts as the independent units, each with "
    "all its seeds; scores are means over the seeds, and so are their bounds, which makes these intervals too wide "
    "rather than too narrow."
)


@dataclass(eq=False)
class _Seeds(Run):
    """Runs that differ in the seed alone: their images are samples of the same prompts."""

    runs: Sequence[Run] = ()

    @cached_property
    def info(self) -> RunInfo:
        calls = [call for run in self.runs for call in run.info.invocations]
        return replace(self.runs[0].info, invocations=calls)

    @cached_property
    def _read(self) -> tuple[pd.DataFrame, int]:
        return self._together(lambda run: run.rows), sum(run.failed for run in self.runs)

    @cached_property
    def traced(self) -> pd.DataFrame:
        return self._together(lambda run: run.traced)

    def _together(self, read: Callable[[Run], pd.DataFrame]) -> pd.DataFrame:
        """Rows of all runs, each sample under its seed, so that it meets the same sample of another decoder."""
        parts = [(run.info.spec.seed, read(run)) for run in self.runs]
        named = [rows.assign(sample=[f"{seed}/{one}" for one in rows["sample"]]) for seed, rows in parts if len(rows)]
        return pd.concat(named, ignore_index=True) if named else parts[0][1]


def seeds_of(run: Run) -> Sequence[Run]:
    """The runs behind one that was read as one."""
    return run.runs if isinstance(run, _Seeds) else [run]


def runs_as_one(members: Sequence[tuple[Run, Sequence[Run]]]) -> tuple[Run, dict, Run | None]:
    """A run, or the runs of several seeds as one: with its report row, and the AR run nearest to it.

    Args:
        members: each run with the AR runs beside it.

    Returns:
        The row has `real`, the numbers that differ from AR's: of several seeds, those that do with each of them.
    """
    nearest = [nearest_ar(run, beside) for run, beside in members]
    run, beside = members[0]
    if len(members) == 1:
        row = report_row(run, beside)
        return run, row | {"real": real_differences(row)}, nearest[0] and nearest[0][1]
    run = _Seeds(run.folder, [run for run, _ in members])
    unlike = [found for found in nearest if found is None or found[0]]
    ar = (unlike[0] and unlike[0][1]) if unlike else _Seeds(nearest[0][1].folder, [found[1] for found in nearest])
    row = report_row(run, [ar] if ar else [])
    real = [
        real_differences({"run_id": one.info.run_id, "folder": one.folder, "baseline": found[1].info.run_id,
                          "speedup_p": row["speedup_p"]})
        for one, found in zip(run.runs, () if unlike else nearest, strict=not unlike)
    ]  # fmt: skip
    failed = [audit for one in run.runs if (audit := read_audit(one.folder)) and audit["failed"]]
    row |= {"scores": _mean_scores(run.runs), "real": set.intersection(*real) if real else set()}
    return run, row | ({"audit": failed[0]} if failed else {}), ar


def _mean_scores(runs: Sequence[Run]) -> list[Mapping]:
    """Scores that all runs have, as means over the runs; so are their bounds."""
    found = [
        {(one["metric"], one["fingerprint"]): one for one in scores_to_show(run.folder, run.rows["prompt_id"])}
        for run in runs
    ]
    means = []
    for key in (one for one in found[0] if all(one in seed for seed in found)):
        ones = pd.DataFrame([seed[key] for seed in found])
        low, high = (None if ones[end].isna().any() else float(np.mean(ones[end])) for end in ("low", "high"))
        value, n = float(ones["value"].mean()), int(ones["n"].sum())
        means.append({**found[0][key], "value": value, "low": low, "high": high, "n": n})
    return means
