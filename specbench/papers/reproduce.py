"""Plan, run and score the cells of a paper's table.

A cell's settings come from the table; flags win over it, as for a small model in the place of the paper's.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from specbench import prompts
from specbench.errors import BAD_INPUT, INTERRUPTED, MISSING_PREREQUISITE, SpecbenchError
from specbench.metrics import catalog as metric_catalog
from specbench.models.catalog import find_model
from specbench.papers.table import CellSettings, Row, Table, chosen_setting, takes
from specbench.runs.plan import SAMPLING_SETTINGS, Plan, make_plan, together
from specbench.runs.settings import OPEN_IN_TABLES, Setting, Value, merge, run_settings

_TRACED = ("draft_tv", "draft_top1")
Warn = Callable[[str], None]


@dataclass(frozen=True)
class PlannedCell:
    """The settings of one or more cells, with the plan of their run or the problem that prevents one.

    Attributes:
        settings: as the table states them.
        values: by setting name, with flags and environment applied; empty where they are refused.
    """

    settings: CellSettings
    values: Mapping[str, Value]
    plan: Plan | None = None
    problem: SpecbenchError | None = None


@dataclass
class TableRun:
    """The outcome of running a table.

    Attributes:
        folders: run folder by cell settings.
        problems: by cell settings, why there is no run.
        trouble: an error that ends the command after the table was shown, such as failed images.
    """

    folders: dict[CellSettings, Path] = field(default_factory=dict)
    problems: dict[CellSettings, SpecbenchError] = field(default_factory=dict)
    trouble: SpecbenchError | None = None

    @property
    def found(self) -> dict[CellSettings, Path | str]:
        """As `specbench.papers.join.join` takes it."""
        return {**{cell: problem.what for cell, problem in self.problems.items()}, **self.folders}


def resolve_cells(table: Table, flags: Mapping[str, object], env: Mapping[str, str] | None = None) -> list[PlannedCell]:
    """The distinct cells of a table with their settings, without plans.

    Args:
        flags: by the name of a setting of `specbench run`; None means not given.
        env: the environment; the process's own if None. What the table says wins over it.

    Raises:
        SpecbenchError: settings that are refused for every cell.
    """
    settings, env = run_settings(), os.environ if env is None else env
    cells = [_resolve(asked, table, settings, flags, env) for asked in table.all_settings()]
    _raise_if_all_refused(cells)
    return cells


def plan_table(table: Table, flags: Mapping[str, object], env: Mapping[str, str] | None = None) -> list[PlannedCell]:
    """The distinct cells of a table, each with its plan or the problem that prevents one; see `resolve_cells`."""
    planned = [_plan(cell) for cell in resolve_cells(table, flags, env)]
    _raise_if_all_refused(planned)
    return planned


def without_replaced_choices(table: Table, cells: Sequence[PlannedCell]) -> Table:
    """The table without the choices of settings for which a flag or another model brings another value here."""
    replaced = {cell.settings: _replaced(cell) for cell in cells}

    def kept(row: Row) -> tuple[str, ...]:
        asked = (table.cell_settings(row, column) for column in table.columns)
        gone = set().union(*(replaced.get(one, set()) for one in asked if one is not None))
        return tuple(line for line in row.chosen if chosen_setting(line) not in gone)

    return replace(table, rows=tuple(replace(row, chosen=kept(row)) for row in table.rows))


def _replaced(cell: PlannedCell) -> set[str]:
    """Names of the settings whose values are not those that the table states."""
    stated = _settings(cell.settings, None)
    return {name for name, held in cell.values.items() if name in stated and held.value != stated[name]} - {"decoder"}


def run_table(planned: Sequence[PlannedCell], reporter=None, warn: Warn = lambda text: None) -> TableRun:
    """Decode the missing images; cells that share model and prompts take turns. Cells that cannot run are left out.

    Raises:
        SpecbenchError: nothing could be run; exit code 5 where something is missing.
    """
    done = TableRun(problems={one.settings: one.problem for one in planned if one.problem is not None})
    by_plan = {id(one.plan): one.settings for one in planned if one.plan is not None}
    waiting = together(one.plan for one in planned if one.plan is not None)
    while waiting and (done.trouble is None or done.trouble.exit_code != INTERRUPTED):
        waiting += _run_together(waiting.pop(0), by_plan, done, reporter)
    stopped = None if done.folders else most_actionable(list(done.problems.values()))
    left_out: dict[tuple[str, str], dict[str, None]] = {}
    for cell, problem in done.problems.items():
        if str(problem) != str(stopped):
            left_out.setdefault((cell.model, str(problem)), {})[cell.decoder] = None
    for (model, problem), decoders in left_out.items():
        warn(f"{model} ({', '.join(decoders)}) not run: {problem}")
    if stopped:
        raise stopped
    return done


def score_table(
    table: Table, done: TableRun, settings, trial: bool = False, reporter=None, warn: Warn = lambda text: None
) -> None:
    """Score the runs with the metrics of the table's columns that are available and apply to their prompts.

    Args:
        trial: the paper's model was substituted: nothing is downloaded, and the bundled metrics are added.
    """
    from specbench.metrics import scoring  # brings pandas and the metrics

    for name in dict.fromkeys([*table.metrics(), *(metric_catalog.bundled_metrics() if trial else ())]):
        problem = _unready(name, settings, trial or settings.offline)
        for folder in () if problem else dict.fromkeys(done.folders.values()):
            try:
                scoring.score([folder], (), settings, reporter, where_they_fit=[name])
            except SpecbenchError as error:
                if error.exit_code not in (BAD_INPUT, MISSING_PREREQUISITE):
                    raise
                problem = error
                break
        if problem:
            warn(f"{name}: not scored: {problem}")


def _resolve(
    asked: CellSettings,
    table: Table,
    settings: Sequence[Setting],
    flags: Mapping[str, object],
    env: Mapping[str, str],
) -> PlannedCell:
    try:
        given = _settings(asked, flags.get("model")) | {"trace": any(c.key in _TRACED for c in table.columns)}
        unused = {"head"} - takes(asked.decoder, dict(asked.options))
        flags = {name: value for name, value in flags.items() if name not in unused}
        open_here = {one.env for one in settings if one.name in OPEN_IN_TABLES - unused and one.name not in given}
        free = {name: value for name, value in env.items() if name in open_here}
        return PlannedCell(asked, merge(settings, flags, free, given, f"{table.name}.toml"))
    except SpecbenchError as problem:
        return PlannedCell(asked, {}, problem=problem)


def _plan(cell: PlannedCell) -> PlannedCell:
    if cell.problem is not None:
        return cell
    try:
        return replace(cell, plan=make_plan(cell.values))
    except SpecbenchError as problem:
        return replace(cell, problem=problem)


def _raise_if_all_refused(cells: Sequence[PlannedCell]) -> None:
    refused = [cell.problem for cell in cells if cell.problem is not None]
    if refused and len(refused) == len(cells) and all(problem.exit_code == BAD_INPUT for problem in refused):
        raise refused[0]


def _settings(asked: CellSettings, model: object) -> dict[str, object]:
    """The cell's values by setting name. A substituted model brings prompts it can read, and its vocabulary."""
    inline = ",".join(f"{name}={value}" for name, value in asked.options)
    settings = {
        name: getattr(asked, name) for name in ("model", "prompts", "limit", "samples", "seed", "batch", "dtype")
    }
    settings["decoder"] = [f"{asked.decoder}:{inline}" if inline else asked.decoder]
    settings |= {SAMPLING_SETTINGS[name]: value for name, value in asked.sampling}
    if model is None or model == asked.model:
        settings |= {"guidance-rows": asked.guidance_rows, "prompt-form": asked.prompt_form}
    else:
        own = find_model(str(model))
        settings["prompts"] = own.name if own.name in prompts.prompt_set_names() else asked.prompts
        settings["top-k"] = settings.get("top-k") if (settings.get("top-k") or 0) <= own.v_image else 0
    return {name: value for name, value in settings.items() if value is not None}


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
        done.problems |= {by_plan[id(plan)]: error for plan in plans}
        return []
    weights = plans[0].model.weights_sha256()
    for plan in plans:
        (decoder,) = plan.decoders
        done.folders[by_plan[id(plan)]] = plan.out / plan.spec(decoder.spec, weights).run_id
    done.trouble = summary.problem() or done.trouble
    return []


def most_actionable(problems: Sequence[SpecbenchError]) -> SpecbenchError | None:
    """The first problem that an installation or download solves, or else the first problem."""
    return min(problems, key=lambda problem: problem.exit_code != MISSING_PREREQUISITE, default=None)


def _unready(name: str, settings, no_download: bool) -> SpecbenchError | None:
    """Why a metric cannot be computed here."""
    try:
        missing = metric_catalog.metric(name)(settings).missing() if no_download else []
    except SpecbenchError as error:
        return error
    return SpecbenchError(*missing[0], MISSING_PREREQUISITE) if missing else None
