"""Runs that differ in the seed alone read as one, for tables whose paper averages over seeds."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np
import pandas as pd

from specbench.metrics.score_store import scores_to_show
from specbench.reporting.columns import failed_audit
from specbench.reporting.compare import real_differences
from specbench.reporting.report_rows import Run, nearest_ar, report_row
from specbench.store.run_info import RunInfo

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
    (first, beside), *others = members
    rows = [report_row(run, ars) for run, ars in members]
    if not others:
        nearest = nearest_ar(first, beside)
        return first, rows[0] | {"real": real_differences(rows[0])}, nearest and nearest[1]
    run, nearest = _Seeds(first.folder, [run for run, _ in members]), [nearest_ar(*one) for one in members]
    unlike = next((ar for ar in nearest if ar is None or ar[0]), nearest[0])
    ar = unlike and unlike[1]
    if ar and not unlike[0]:
        ar = _Seeds(ar.folder, [found[1] for found in nearest])
    row = report_row(run, [ar] if ar else [])
    real = set.intersection(*map(real_differences, rows))
    failed = [{"audit": one["audit"]} for one in rows if failed_audit(one)]
    return run, row | {"scores": _mean_scores(run.runs), "real": real} | (failed[0] if failed else {}), ar


def _mean_scores(runs: Sequence[Run]) -> list[Mapping]:
    """Scores that all runs have, as means over the runs; so are their bounds."""
    found = [
        {(one["metric"], one["fingerprint"]): one for one in scores_to_show(run.folder, run.rows["prompt_id"])}
        for run in runs
    ]
    means = []
    for key in set.intersection(*map(set, found)):
        ones = pd.DataFrame([seed[key] for seed in found])
        low, high = (None if ones[end].isna().any() else float(np.mean(ones[end])) for end in ("low", "high"))
        value, n = float(ones["value"].mean()), int(ones["n"].sum())
        means.append({**found[0][key], "value": value, "low": low, "high": high, "n": n})
    return means
