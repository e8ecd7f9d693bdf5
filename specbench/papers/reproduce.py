"""Reproduce a paper's table: plan, run, score and join its cells (`specbench bench`), or only join the stored runs of a
results folder. For settings see `specbench.papers.planned_cells`."""

from __future__ import annotations

import json
import math
import shlex
from collections.abc import Callable, Iterable, Mapping, Sequence
from copy import copy
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

from specbench.errors import BAD_INPUT, MISSING_PREREQUISITE, PARTIAL, SpecbenchError, unknown_name
from specbench.metrics import catalog as metric_catalog
from specbench.papers.join import PaperTable, join, several_seeds
from specbench.papers.planned_cells import (
    PlannedCell,
    as_run_here,
    find_measured,
    plan_table,
    resolve_cells,
    with_model,
    without_replaced_choices,
)
from specbench.papers.table import Row, Table, with_runs
from specbench.prompts import load_prompts
from specbench.prompts.public import missing_set
from specbench.runs.dry_run import ON_DISK, Costs, outlooks, row_of
from specbench.runs.plan import Plan, together
from specbench.runs.settings import RunSettings
from specbench.specs.options import plain
from specbench.store.run_folders import run_folder
from specbench.system.console import duration
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
    """Measure and join a table, see `specbench.bench`; stored images are not decoded again. `env`: environment
    variables, by default of the process. `runs`: stored runs to add as rows."""
    model = flags.get("model")
    _fetch_prompts(resolve_cells(table, flags, env), warn)
    planned = plan_table(table, flags, env)
    planned, problems = _fetch(planned, () if model is not None or scoring.offline else table.metrics())
    done = run_table(planned, reporter, warn)
    if not flags.get("shard") and not done.stopped:  # scores need the images of all shards
        score_table(table, done, scoring, model is not None, score_reporter, warn, problems)
    table = as_run_here(table, planned, model, done.folders.values())
    elsewhere = find_measured([cell for cell in planned if cell.settings in done.problems], out)
    measured = {cell: folder for cell, folder in elsewhere.items() if isinstance(folder, Path)}
    return replace(join(with_runs(table, runs), done.found | measured), problem=done.trouble)


def check_baseline(table: Table, flags: Mapping[str, Any], name: str, runs: Sequence[Path]) -> None:
    """Reject a baseline that `specbench.papers.join.with_baseline` will not find after the table is measured. `runs`:
    stored runs that are added as rows. The start of a run id may name a run that is not yet decoded."""
    cells = resolve_cells(table, flags)
    resolved = {cell.settings: cell.values for cell in cells if cell.values}
    table = with_runs(as_run_here(table, cells, flags.get("model"), ()), runs)
    names = {text for row in table.rows for text in (row.label, str(row.decoder))}
    ids = (*(folder.name for folder in runs), *(f"{values.model}-" for values in resolved.values()))
    if name.lower() not in map(str.lower, names) and not any(name.startswith(i) or i.startswith(name) for i in ids):
        raise unknown_name("baseline", name, names)
    cells_of_rows = (table.runs_of(row, column) for row in table.rows for column in table.columns)
    if any(len({resolved[part].seed for part in cell if part in resolved}) > 1 for cell in cells_of_rows):
        raise several_seeds(table, name)


def measured_table(
    table: Table,
    model: str | None = None,
    prompts: str | None = None,
    out: Path | str = "results",
    runs: Sequence[Path] = (),
) -> PaperTable:
    """Join a table with the runs of a results folder. `model` and `prompts` replace the table's. Each of `runs`, from
    any folder, is added as a row."""
    if prompts is not None:
        try:
            load_prompts(prompts)
        except SpecbenchError as error:
            if error.exit_code == BAD_INPUT:  # runs may be stored although the prompt set is missing
                raise
    cells = resolve_cells(table, {"model": model, "prompts": prompts, "out": str(out)}, env={})
    measured = find_measured(cells, out)
    table = as_run_here(table, cells, model, [folder for folder in measured.values() if isinstance(folder, Path)])
    return join(with_runs(table, runs), measured)


@dataclass
class TableRun:
    """The outcome of running a table."""

    folders: dict[RunSettings, Path] = field(default_factory=dict)  # {cell settings: run folder}
    # {cell settings: reason for a missing run}
    problems: dict[RunSettings, SpecbenchError] = field(default_factory=dict)
    # an error to raise after the table is shown, such as failed images
    trouble: SpecbenchError | None = None

    @property
    def stopped(self) -> bool:
        """Whether a signal ended the command."""
        return self.trouble is not None and self.trouble.exit_code > 128

    @property
    def found(self) -> dict[RunSettings, Path | str]:
        """{cell settings: run folder, or reason for a missing run}; argument of `specbench.papers.join.join`."""
        return {**{cell: problem.what for cell, problem in self.problems.items()}, **self.folders}


def _fetch_prompts(cells: Iterable[PlannedCell], warn: Warn) -> None:
    """Download the prompts of cells. A failed download only gives a warning; planning reports it as a problem."""
    for name in dict.fromkeys(str(cell.values.prompts) for cell in cells if cell.values):
        try:
            fetch_all(() if offline() else missing_set(name))
        except SpecbenchError as problem:
            warn(str(problem))


def _fetch(
    planned: Sequence[PlannedCell], metrics: Iterable[str]
) -> tuple[list[PlannedCell], dict[Any, SpecbenchError]]:
    """Download all files of cells and metrics before the first image. Return the cells, and the errors by metric."""
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


def run_table(
    planned: Sequence[PlannedCell], reporter: Reporter | None = None, warn: Warn = lambda text: None
) -> TableRun:
    """Decode the missing images; decoders that share model and prompts alternate. Cells that cannot run are skipped."""
    done = TableRun(problems={cell.settings: cell.problem for cell in planned if cell.problem is not None})
    by_plan = {id(cell.plan): cell.settings for cell in planned if cell.plan is not None}
    waiting = together(cell.plan for cell in planned if cell.plan is not None)
    while waiting and not done.stopped:
        waiting += _run_together(waiting.pop(0), by_plan, done, reporter)
    stopped = None
    if not done.folders:  # raise a problem, if possible one that an installation or a download solves
        problems = done.problems.values()
        stopped = min(problems, key=lambda problem: problem.exit_code != MISSING_PREREQUISITE, default=None)
    left_out: dict[tuple[str, str], dict[str, None]] = {}
    for cell, problem in done.problems.items():
        if str(problem) != str(stopped):
            left_out.setdefault((cell.model, str(problem)), {})[cell.decoder[0]] = None
    for (model, reason), decoders in left_out.items():
        warn(f"{model} ({', '.join(decoders)}) not run: {reason}")
    if stopped:
        raise stopped
    return done


def _run_together(
    plans: list[Plan], by_plan: Mapping[int, RunSettings], done: TableRun, reporter: Reporter | None
) -> list[list[Plan]]:
    """Run plans that share model and prompts. If a plan is rejected, return each plan as a separate group."""
    from specbench.runs.runner import run_plans  # imports torch, which plans and estimates do not need

    try:
        summary = run_plans(plans, reporter)
    except SpecbenchError as error:
        if error.exit_code == BAD_INPUT and len(plans) > 1:
            return [[plan] for plan in plans]
        if error.exit_code not in (BAD_INPUT, MISSING_PREREQUISITE):
            raise
        # A copy without the traceback, which would keep the model in memory.
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
    """Score the runs with all metrics of the table's columns that are available and apply to the prompts. `trial`:
    whether another model replaced the paper's; then nothing is downloaded, and bundled metrics are added. `problems`:
    {metric: reason why it is unavailable}."""
    from specbench.metrics import scoring  # imports pandas and the metrics

    settings, fitting = replace(settings, offline=settings.offline or trial), []
    for name in dict.fromkeys([*table.metrics(), *(metric_catalog.bundled_metrics() if trial else ())]):
        try:
            missing = metric_catalog.metric(name)(settings).missing() if settings.offline else ()
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


def estimate(table: Table, planned: Sequence[PlannedCell], model: str | None = None) -> list[dict[str, object]]:
    """Estimate the cost of running a table; decode nothing.

    Args:
        model: replaces the paper's model, see `specbench.papers.planned_cells.with_model`.

    Returns:
        One dict per run: `rows` (labels of the table's rows), `chosen` (settings that the paper does not state, each
        with its reason), the keys of `specbench.runs.dry_run.Outlook.row`, `on_disk` (whether the weights are) and
        `problem` (the first obstacle).
    """
    table = without_replaced_choices(table, planned)
    table, rows = with_model(table, planned, model) if model else table, dict[RunSettings, list[Row]]()
    for shown in table.rows:
        for settings in table.runs_of_row(shown):
            rows.setdefault(settings, []).append(shown)
    shared = Costs()
    by_run: dict[object, dict[str, object]] = {}
    cells = {cell.settings: cell for cell in planned}
    for place, settings in enumerate(rows):
        row = _row(cells[settings], rows[settings], shared)
        same = by_run.setdefault(row["run_id"] or place, row)
        if same is not row:  # a run may be shared by cells of several columns or groups
            same["rows"] = ", ".join(dict.fromkeys((*str(same["rows"]).split(", "), *str(row["rows"]).split(", "))))
    return list(by_run.values())


def seeds_together(rows: Sequence[Mapping[str, Any]]) -> list[dict[str, object]]:
    """Merge rows that differ only in the seed, and add up their costs, for a terminal."""
    merged: dict[str, dict[str, Any]] = {}
    for row in rows:
        alike = {name: value for name, value in row.items() if name not in (*_SUMS, "run_id", "seed")}
        whole = merged.setdefault(json.dumps(alike, default=str), {**row, "seed": []})
        if whole["seed"]:
            whole |= {name: None if None in (whole[name], row[name]) else whole[name] + row[name] for name in _SUMS}
        whole["seed"] = [*whole["seed"], row["seed"]]
    return [{**row, "seed": ", ".join(map(str, row["seed"]))} for row in merged.values()]


def run_lines(planned: Sequence[PlannedCell]) -> list[str]:
    """Return `specbench run` commands for the cells of a table, one for cells that differ only in decoder and seed."""
    seeds: dict[tuple[tuple[str, ...], str], dict[object, None]] = {}
    for values in (cell.values for cell in planned if cell.values):
        given = values.given
        words = tuple(word for name in given if name not in _ELSEWHERE for word in _words(name, given[name]))
        seeds.setdefault((words, ",".join(values.decoder)), {})[given.get("seed")] = None
    lines: dict[tuple[str, ...], list[str]] = {}
    for (words, decoder), drawn_seeds in seeds.items():
        text = ",".join(str(seed) for seed in drawn_seeds if seed is not None)
        drawn = ("--sweep", f"seed={text}") if len(drawn_seeds) > 1 else ("--seed", text) if text else ()
        lines.setdefault((*words, *drawn), []).append(decoder)
    return [
        shlex.join(["specbench", "run", "--decoder", ",".join(decoders), *words]) for words, decoders in lines.items()
    ]


_ELSEWHERE, _SUMS = ("decoder", "seed", "quiet", "json"), ("images", "done", "seconds", "megabytes")


def _words(name: str, value: object) -> list[str]:
    """Format a setting as words of the command line; empty for a flag that is off."""
    if isinstance(value, bool):
        return [f"--{name}"] * value
    return [f"--{name}", ",".join(map(str, value)) if isinstance(value, tuple) else plain(value)]


def scoring_needs(table: Table) -> list[str]:
    """List the metrics of a table whose networks or reference images are not on this disk, one line each."""
    lines = []
    for name in table.metrics():
        try:
            missing = ", ".join(download.name for download in metric_catalog.downloads([name]))
        except SpecbenchError as problem:
            missing = str(problem)
        lines += [f"{name} lacks {missing}"] if missing else []
    return lines


def total(rows: Sequence[Mapping[str, Any]]) -> str:
    """Return the total cost in one sentence, counting a run that rows share once."""
    blocked = sum(row["problem"] is not None for row in rows)
    rest = f"{blocked} of {len(rows)} rows cannot run here"
    if blocked == len(rows):
        return rest
    once = {row["run_id"] or number: row for number, row in enumerate(rows) if row["problem"] is None}.values()
    images = sum((row["images"] or 0) - row["done"] for row in once)
    more = " (without prompt sets that are not on this disk)" * any(row["images"] is None for row in once)
    seconds = [row["seconds"] for row in once if row["seconds"] is not None]
    time = f"about {duration(sum(seconds))}" if len(seconds) == len(once) else "time unknown before the first image"
    if seconds and len(seconds) < len(once):
        unknown = len(once) - len(seconds)
        time = f"about {duration(sum(seconds))}, plus {unknown} run{'s' if unknown > 1 else ''} of unknown time"
    disk = math.ceil(sum(row["megabytes"] or 0 for row in once))
    return f"{images} image{'s' * (images != 1)}{more} to decode, {time}, at most {disk:,} MB" + (
        f"; {rest}" if blocked else ""
    )


def _row(cell: PlannedCell, rows: Sequence[Row], shared: Costs) -> dict[str, object]:
    about: dict[str, object] = {"rows": ", ".join(dict.fromkeys(row.label for row in rows))}
    about |= {"chosen": list(dict.fromkeys(text for row in rows for text in row.chosen))}
    stated = cell.settings
    named = {"model": stated.model, "decoder": stated.decoder[0], "prompts": stated.prompts}
    try:
        row = outlooks(cell.values, shared)[0].row if cell.values else row_of(filter(None, [cell.problem]), **named)
    except SpecbenchError as error:  # settings were rejected: only the reason is known
        row = row_of([error], **named)
    return about | row | {"on_disk": row["weights"] == ON_DISK, "problem": next(iter(row["obstacles"]), None)}
