"""Reproduce a paper's table: plan, run, score and join its cells (`specbench bench`), or join the runs that a results
folder already holds, without planning or running anything.

A cell's settings come from the table; flags win over it, as for a small model in the place of the paper's. With such a
model, rows that run the same here are merged, headings say only what is still true, and bundled metrics are added.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from copy import copy
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING

from specbench.errors import BAD_INPUT, MISSING_PREREQUISITE, PARTIAL, SpecbenchError
from specbench.metrics import catalog as metric_catalog
from specbench.papers.join import PaperTable, join
from specbench.papers.other_model import as_run_here
from specbench.papers.planned_cells import PlannedCell, find_measured, plan_table, resolve_cells
from specbench.papers.table import CellSettings, Table, with_runs
from specbench.prompts import load_prompts
from specbench.prompts.public import missing_set
from specbench.runs.plan import Plan, together
from specbench.store.run_folders import run_folder
from specbench.system.downloads import Download, fetch_all, fetch_what_can_be_had, offline

if TYPE_CHECKING:
    from specbench.metrics.base import Settings
    from specbench.metrics.scoring import ScoreReporter
    from specbench.runs.run_progress import Reporter

Warn = Callable[[str], None]


def bench_table(
    table: Table,
    flags: Mapping[str, object],
    out: Path | str,
    scoring: Settings,
    env: Mapping[str, str] | None = None,
    reporter: Reporter | None = None,
    score_reporter: ScoreReporter | None = None,
    warn: Warn = lambda text: None,
    runs: Sequence[Path] = (),
) -> PaperTable:
    """A table with what was measured for it here; what the results folder already holds is not run again.

    Args:
        flags: by the name of a setting of `specbench run`, None means not given; a model replaces the table's own.
        scoring: how to score, see `score_table`.
        env: the environment; the process's own if None.
        warn: called with a line for each row that cannot run and each metric that cannot score.
        runs: stored runs that get a row each.
    """
    model = flags.get("model")
    _fetch_prompts(resolve_cells(table, flags, env), warn)
    planned = plan_table(table, flags, env)
    planned, problems = _fetch(planned, () if model is not None or scoring.offline else table.metrics())
    done = run_table(planned, reporter, warn)
    if not flags.get("shard") and not done.stopped:  # what a part scores is not what the run does
        score_table(table, done, scoring, model is not None, score_reporter, warn, problems)
    table = as_run_here(table, planned, model, done.folders.values())
    elsewhere = find_measured([cell for cell in planned if cell.settings in done.problems], out)
    found = {cell: folder for cell, folder in elsewhere.items() if isinstance(folder, Path)}
    return replace(join(with_runs(table, runs), done.found | found), problem=done.trouble)


def measured_table(
    table: Table,
    model: str | None = None,
    prompts: str | None = None,
    out: Path | str = "results",
    runs: Sequence[Path] = (),
) -> PaperTable:
    """A table joined with the runs of a results folder.

    Args:
        model, prompts: used in place of the table's own.
        runs: stored runs that get a row each.
    """
    if prompts is not None:
        try:
            load_prompts(prompts)
        except SpecbenchError as error:
            if error.exit_code == BAD_INPUT:  # a prompt set that is not on this disk may still have runs
                raise
    cells = resolve_cells(table, {"model": model, "prompts": prompts, "out": str(out)}, env={})
    found = find_measured(cells, out)
    folders = [folder for folder in found.values() if isinstance(folder, Path)]
    table = as_run_here(table, cells, model, folders)
    return join(with_runs(table, runs), found)


@dataclass
class TableRun:
    """The outcome of running a table."""

    folders: dict[CellSettings, Path] = field(default_factory=dict)  # run folder by cell settings
    problems: dict[CellSettings, SpecbenchError] = field(default_factory=dict)  # by cell settings, why there is no run
    # an error that ends the command after the table was shown, such as failed images
    trouble: SpecbenchError | None = None

    @property
    def stopped(self) -> bool:
        """Whether a signal ended it."""
        return self.trouble is not None and self.trouble.exit_code > 128

    @property
    def found(self) -> dict[CellSettings, Path | str]:
        """As `specbench.papers.join.join` takes it."""
        return {**{cell: problem.what for cell, problem in self.problems.items()}, **self.folders}


def _fetch_prompts(cells: Iterable[PlannedCell], warn: Warn) -> None:
    """Download the prompts of cells; those that cannot be had are missing when their cells are planned."""
    for name in dict.fromkeys(str(cell.values["prompts"].value) for cell in cells if cell.values):
        try:
            fetch_all(() if offline() else missing_set(name))
        except SpecbenchError as problem:
            warn(str(problem))


def _fetch(planned: Sequence[PlannedCell], metrics: Iterable[str]) -> tuple[list[PlannedCell], dict]:
    """Download all that cells and metrics need, before the first image. A cell whose model or head cannot be had gets
    the problem; also returns the problems of metrics."""
    plans = {cell.settings: cell.plan for cell in planned if cell.plan is not None}
    needs: dict[object, Callable[[], Sequence[Download]]] = {
        name: partial(metric_catalog.downloads, [name]) for name in (metrics if plans else ())
    }
    needs |= {plan.model: plan.model.downloads for plan in plans.values()}
    needs |= {cell: plan.missing_heads for cell, plan in plans.items()}
    problems = fetch_what_can_be_had(needs)

    def settled(cell: PlannedCell) -> PlannedCell:
        problem = problems.get(cell.settings) or (cell.plan and problems.get(cell.plan.model))
        return replace(cell, plan=None, problem=problem) if problem else cell

    return [settled(cell) for cell in planned], problems


def run_table(planned: Sequence[PlannedCell], reporter=None, warn: Warn = lambda text: None) -> TableRun:
    """Decode the missing images; cells that share model and prompts take turns. Cells that cannot run are left out."""
    done = TableRun(problems={one.settings: one.problem for one in planned if one.problem is not None})
    by_plan = {id(one.plan): one.settings for one in planned if one.plan is not None}
    waiting = together(one.plan for one in planned if one.plan is not None)
    while waiting and not done.stopped:
        waiting += _run_together(waiting.pop(0), by_plan, done, reporter)
    stopped = None
    if not done.folders:  # the first problem that an installation or download solves, or else the first problem
        problems = done.problems.values()
        stopped = min(problems, key=lambda problem: problem.exit_code != MISSING_PREREQUISITE, default=None)
    left_out: dict[tuple[str, str], dict[str, None]] = {}
    for cell, problem in done.problems.items():
        if str(problem) != str(stopped):
            left_out.setdefault((cell.model, str(problem)), {})[cell.decoder] = None
    for (model, problem), decoders in left_out.items():
        warn(f"{model} ({', '.join(decoders)}) not run: {problem}")
    if stopped:
        raise stopped
    return done


def _run_together(plans: list[Plan], by_plan: Mapping[int, CellSettings], done: TableRun, reporter) -> list[list[Plan]]:
    """Run plans that share their work; if one of them is refused, return each as a group of its own."""
    from specbench.runs.runner import run_plans  # brings torch, which plans and estimates do without

    try:
        summary = run_plans(plans, reporter)
    except SpecbenchError as error:
        if error.exit_code == BAD_INPUT and len(plans) > 1:
            return [[plan] for plan in plans]
        if error.exit_code not in (BAD_INPUT, MISSING_PREREQUISITE):
            raise
        # A copy: the error's own traceback holds the model, whose memory the next one may need.
        done.problems |= {by_plan[id(plan)]: copy(error) for plan in plans}
        return []
    weights = plans[0].model.weights_sha256()
    for plan in plans:
        decoder, *_ = plan.decoders
        done.folders[by_plan[id(plan)]] = run_folder(plan.out, plan.spec(decoder.spec, weights))
    done.trouble = summary.problem() or done.trouble
    return []


def score_table(
    table: Table,
    done: TableRun,
    settings: Settings,
    trial: bool = False,
    reporter: ScoreReporter | None = None,
    warn: Warn = lambda text: None,
    problems: Mapping[str, SpecbenchError] = MappingProxyType({}),
) -> None:
    """Score the runs with the metrics of the table's columns that are available and apply to their prompts.

    Args:
        trial: the paper's model was substituted: nothing is downloaded, and the bundled metrics are added.
        problems: why metrics cannot be had, by name.
    """
    from specbench.metrics import scoring  # brings pandas and the metrics

    settings, fitting = replace(settings, offline=settings.offline or trial), []
    for name in dict.fromkeys([*table.metrics(), *(metric_catalog.bundled_metrics() if trial else ())]):
        try:
            metric = metric_catalog.metric(name)(settings)
            missing = metric.missing() if settings.offline else ()
            if problem := problems.get(name) or (SpecbenchError(*missing[0]) if missing else None):
                raise problem
            fitting.append(name)
        except SpecbenchError as error:
            warn(f"{name}: not scored: {error}")
    try:
        scoring.score(dict.fromkeys(done.folders.values()), (), settings, reporter, where_they_fit=fitting).check()
    except SpecbenchError as error:
        if error.exit_code not in (BAD_INPUT, MISSING_PREREQUISITE, PARTIAL):
            raise
        warn(f"not scored: {error}")
