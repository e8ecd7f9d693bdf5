"""Reproduce a paper's table: plan, run, score and join its cells (`specbench bench`), or join the runs that a results
folder already holds, without planning or running anything.

A cell's settings come from the table; flags win over it, as for a small model in the place of the paper's. With such a
model, rows that run the same here are merged, headings say only what is still true, and bundled metrics are added.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Container, Iterable, Iterator, Mapping, Sequence
from copy import copy
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import product
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING

from specbench import prompts
from specbench.errors import BAD_INPUT, MISSING_PREREQUISITE, SpecbenchError
from specbench.metrics import catalog as metric_catalog
from specbench.metrics.score_store import read_scores
from specbench.models.catalog import find_model
from specbench.models.facts import EIGHT_BITS
from specbench.papers.cells import RATIOS_TO_AR
from specbench.papers.join import PaperTable, join
from specbench.papers.table import SCORE, CellSettings, Column, Row, Table, chosen_setting, takes, with_runs
from specbench.prompts import load_prompts
from specbench.prompts.public import missing_set
from specbench.reporting.plot_data import lower_is_better
from specbench.reporting.report_rows import natural
from specbench.runs.decoder_args import plan_decoders
from specbench.runs.plan import SAMPLING_SETTINGS, Plan, make_plan, plan_model, plan_sampling, together
from specbench.runs.settings import OPEN_IN_TABLES, Setting, Value, merge, run_settings
from specbench.specs.presets import PRESETS
from specbench.store.run_folders import find_runs_like, read_infos, run_folder, without_options
from specbench.store.run_store import RunStore
from specbench.system.downloads import Download, fetch_all, fetch_what_can_be_had, offline

if TYPE_CHECKING:
    from specbench.metrics.base import Settings
    from specbench.metrics.scoring import ScoreReporter
    from specbench.runs.run_progress import Reporter

_TRACED = ("draft_tv", "draft_top1")
_NOT_FOUND = "not in the results"
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

    Raises:
        SpecbenchError: bad settings, or nothing could be run. An error after which the table can still be shown, such
            as failed images, is its `problem` instead.
    """
    model = flags.get("model")
    _fetch_prompts(resolve_cells(table, flags, env), warn)
    planned = plan_table(table, flags, env)
    planned, problems = _fetch(planned, () if model is not None or scoring.offline else table.metrics())
    done = run_table(planned, reporter, warn)
    if not flags.get("shard") and not done.stopped:  # what a part scores is not what the run does
        score_table(table, done, scoring, model is not None, score_reporter, warn, problems)
    table = _as_run_here(table, planned, model, done.folders.values())
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

    Raises:
        SpecbenchError: an unknown model or prompt set, or a damaged run folder.
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
    table = _as_run_here(table, cells, model, folders)
    return join(with_runs(table, runs), found)


def _as_run_here(table: Table, cells: Sequence[PlannedCell], model: object, folders: Iterable[Path]) -> Table:
    """The table without replaced choices, and with another model, if one is named, in the place of the paper's."""
    table = without_replaced_choices(table, cells)
    return table if model is None else with_bundled_scores(one_row_per_run(table, cells, str(model)), folders)


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
    def stopped(self) -> bool:
        """Whether a signal ended it."""
        return self.trouble is not None and self.trouble.exit_code > 128

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
    head_of(str(flags.get("head") or ""), "")
    cells = [_resolve(asked, table, settings, flags, env) for asked in table.all_settings()]
    _raise_if_all_refused(cells)
    return cells


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
        if flags.get("head"):
            flags["head"] = head_of(str(flags["head"]), str(flags.get("model") or asked.model))
        open_here = {one.env for one in settings if one.name in OPEN_IN_TABLES - unused and one.name not in given}
        free = {name: value for name, value in env.items() if name in open_here}
        values = merge(settings, flags, free, given, f"{table.name}.toml")
        return PlannedCell(asked, values if _lacks_ar(table) else values | {"baseline": Value(0, "default of tables")})
    except SpecbenchError as problem:
        return PlannedCell(asked, {}, problem=problem)


def head_of(text: str, model: str) -> str | None:
    """The head that `--head` names for a model: a folder or hub id for all, or MODEL=PATH, several with commas.

    Raises:
        SpecbenchError: a name before the = that no model has.
    """
    if "=" not in text:
        return text
    named = dict(piece.partition("=")[::2] for piece in text.split(","))
    for name in named:
        find_model(name)
    return named.get(model)


def _lacks_ar(table: Table) -> bool:
    """Whether a table has speed-ups over AR, and no row of AR."""
    decoders = {one.decoder for one in table.all_settings()}
    over_ar = any(column.key in RATIOS_TO_AR for column in table.columns)
    return over_ar and not any(name in PRESETS and PRESETS[name].choices["drafter"] == "none" for name in decoders)


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


def _raise_if_all_refused(cells: Sequence[PlannedCell]) -> None:
    refused = [cell.problem for cell in cells if cell.problem is not None]
    if refused and len(refused) == len(cells) and all(problem.exit_code == BAD_INPUT for problem in refused):
        raise refused[0]


def plan_table(table: Table, flags: Mapping[str, object], env: Mapping[str, str] | None = None) -> list[PlannedCell]:
    """The distinct cells of a table, each with its plan or the problem that prevents one; see `resolve_cells`."""
    planned = []
    for cell in resolve_cells(table, flags, env):
        try:
            planned.append(cell if cell.problem is not None else replace(cell, plan=make_plan(cell.values)))
        except SpecbenchError as problem:
            planned.append(replace(cell, problem=problem))
    _raise_if_all_refused(planned)
    return planned


def _fetch_prompts(cells: Iterable[PlannedCell], warn: Warn) -> None:
    """Download the prompts of cells; those that cannot be had are missing when their cells are planned."""
    for name in dict.fromkeys(str(cell.values["prompts"].value) for cell in cells if cell.values):
        try:
            fetch_all(() if offline() else missing_set(name))
        except SpecbenchError as problem:
            warn(str(problem))


def _fetch(planned: Sequence[PlannedCell], metrics: Iterable[str]) -> tuple[list[PlannedCell], dict]:
    """Download all that cells and metrics need, before the first image. A cell whose model or head cannot be had gets
    the problem; also returns the problems of metrics.
    """
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
    """Decode the missing images; cells that share model and prompts take turns. Cells that cannot run are left out.

    Raises:
        SpecbenchError: nothing could be run; exit code 5 where something is missing.
    """
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
    settings,
    trial: bool = False,
    reporter=None,
    warn: Warn = lambda text: None,
    problems: Mapping[str, SpecbenchError] = MappingProxyType({}),
) -> None:
    """Score the runs with the metrics of the table's columns that are available and apply to their prompts.

    Args:
        trial: the paper's model was substituted: nothing is downloaded, and the bundled metrics are added.
        problems: why metrics cannot be had, by name.
    """
    from specbench.metrics import scoring  # brings pandas and the metrics

    for name in dict.fromkeys([*table.metrics(), *(metric_catalog.bundled_metrics() if trial else ())]):
        problem = problems.get(name) or _unready(name, settings, trial or settings.offline)
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


def _unready(name: str, settings, no_download: bool) -> SpecbenchError | None:
    """Why a metric cannot be computed here."""
    try:
        missing = metric_catalog.metric(name)(settings).missing() if no_download else []
    except SpecbenchError as error:
        return error
    return SpecbenchError(*missing[0], MISSING_PREREQUISITE) if missing else None


def find_measured(cells: Sequence[PlannedCell], out: Path | str) -> dict[CellSettings, Path | str]:
    """The run folder of each cell in `out`, whatever machine it was measured on: most images first, then the newest."""
    infos = read_infos(out)
    found: dict[CellSettings, Path | str] = {}
    for cell in cells:
        alike = find_runs_like(infos, **wanted_fields(cell.values)) if infos and cell.values else {}
        order = {
            folder: (len(RunStore(folder).completed()), info.invocations[-1].started_at)
            for folder, info in alike.items()
        }
        found[cell.settings] = sorted(order, key=order.__getitem__)[-1] if order else _NOT_FOUND
    return found


def wanted_fields(values: Mapping[str, Value]) -> dict[str, object]:
    """The fields of the `RunSpec` that the settings ask for; dtype, device and threads only where they were given, and
    whatever draft head.
    """
    value = {name: held.value for name, held in values.items()}
    model, (planned,) = plan_model(values), plan_decoders(value["decoder"], values)
    fields = {"model": model.name, "prompts": value["prompts"], "seed": value["seed"], "batch": value["batch"]}
    fields |= {"sampling": plan_sampling(model, values), "decoder": without_options(planned.spec, "head")}
    value["dtype"] = model.dtype if value["dtype"] == EIGHT_BITS else value["dtype"]
    return fields | {name: value[name] for name in ("dtype", "device", "threads") if values[name].given}


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


def one_row_per_run(table: Table, cells: Sequence[PlannedCell], model: str) -> Table:
    """The table with another model in the place of the paper's: rows that run the same are merged, and no row but those
    of this model itself, run as printed, has values of the paper. What cannot be run is left out."""
    plans = {cell.settings: repr(sorted((name, held.value) for name, held in cell.values.items())) for cell in cells}
    as_printed = {cell.settings for cell in cells if not _replaced(cell)}

    def asked(row: Row) -> list[CellSettings]:
        return [one for column in table.columns if (one := table.cell_settings(row, column)) is not None]

    runnable = [row for row in table.rows if row.not_runnable_reason is None]
    alike: dict[tuple, list[Row]] = {}
    for row in runnable:
        alike.setdefault(tuple(plans.get(one) for one in asked(row)), []).append(row)
    replaced, rows = _no_longer_true(table, cells), []
    for members in alike.values():
        own = next((one for one in members if one.settings.get("model") == model and {*asked(one)} <= as_printed), None)
        rows.append(own or _stripped(members, model, replaced))
    headings = [(row.group, row.label) for row in rows]
    groups = [next(iter(members)).group for members in alike.values()]
    rows = [
        replace(row, label=f"{row.label} ({group})") if headings.count((row.group, row.label)) > 1 else row
        for row, group in zip(rows, groups, strict=True)
    ]
    order = list(dict.fromkeys(row.group for row in rows))
    decoders = list(dict.fromkeys(row.settings["decoder"] for row in rows))
    merged = len({*groups}) > len(order)  # rows of several groups stand in one: by decoder, as in the first

    def place(row: Row) -> tuple:
        within = (row.own, decoders.index(row.settings["decoder"]), natural(row.label)) if merged else ()
        return order.index(row.group), *within

    rows.sort(key=place)
    if all(row.paper for row in rows):
        return replace(table, rows=tuple(rows))
    models = " and ".join(dict.fromkeys(str(one) for row in runnable if (one := row.settings["model"]) != model))
    left_out, own = len(table.rows) - len(runnable), sum(row.own for row in runnable)
    kept = len(rows) - sum(row.own for row in rows)
    note = (
        f"With {model} in the place of {models or 'the model as printed'}, no value of the paper is comparable, so its "
        f"rows have none; {len(runnable) - own} rows of the paper are {kept} runs here"
        + (f", and {left_out} that cannot be run are left out." if left_out else ".")
    )
    return replace(table, rows=tuple(rows), notes=(note,), hardware=None, whole=False)


def _no_longer_true(table: Table, cells: Sequence[PlannedCell]) -> set[str]:
    """Parts of the rows' headings that are no longer true: names of one of several models, and of one of several prompt
    sets where all rows now run on the same one."""
    replaced: set[str] = set()
    one_set = len({cell.values["prompts"].value for cell in cells if cell.values}) == 1
    for setting in ("model", "prompts") if one_set else ("model",):
        values: dict[str, set[object]] = {}
        for row in table.rows:
            for part in _parts(row):
                values.setdefault(part, set()).add(row.settings.get(setting))
        if len(set().union(*values.values())) > 1:
            replaced |= {part for part, found in values.items() if len(found) == 1}
    return replaced


def _parts(row: Row) -> list[str]:
    """What a row's heading says: "LlamaGen-XL, Cool-SD" names a model and a decoder."""
    return row.group.split(", ") if row.group else []


def _stripped(rows: Sequence[Row], model: str, replaced: Container[str]) -> Row:
    """One row for those of the paper that run the same here: what is still true of all, and no printed value. Labels
    that name the paper's model name the one in its place."""
    first = rows[0]
    shared = [part for part in _parts(first) if part not in replaced and all(part in _parts(row) for row in rows)]
    labels = {}
    for row in rows:
        family = re.escape(re.split(r"[ -]", find_model(str(row.settings["model"])).summary, maxsplit=1)[0])
        named = re.sub(rf"\b{family}[\w-]*( \([\d.]+B\))?", lambda _: model, row.label)
        labels[row.label if row.settings["model"] == model else named] = None
    label = next(iter(labels)) if len(labels) == 1 else str(first.settings["decoder"])
    chosen = tuple(text for text in first.chosen if all(text in row.chosen for row in rows))
    return Row(label, ", ".join(shared) or None, first.settings, {}, {}, {}, None, None, chosen, first.own)


def with_bundled_scores(table: Table, folders: Iterable[Path]) -> Table:
    """The table with a column for each bundled metric that scored any of the runs: for a substituted model. Where the
    columns sweep a setting, a metric has a column for each of its values; a figure has panels with them, too."""
    scored = {score["metric"] for folder in folders for score in read_scores(folder)}
    names = [name for name in metric_catalog.bundled_metrics() if name in scored and name not in table.metrics()]
    swept: dict[str, Column] = {}
    for column in table.columns:
        if column.measurable:
            swept.setdefault(repr(sorted(column.settings.items())), column)
    columns = []
    for metric, like in product(names, swept.values()):
        better = "lower" if lower_is_better(metric) else "higher"
        name, header = f"{SCORE}{metric}", metric.replace("-", " ")
        if len(swept) > 1:
            name, header = f"{name} {like.name}", f"{header}, {like.header}"
        columns.append(Column(name, SCORE + metric, header, metric, 2, better, 1.0, like.settings))
    return replace(table, columns=(*table.columns, *columns), axes=(*table.axes, *_panels(table, columns)))


def _panels(table: Table, columns: Sequence[Column]) -> Iterator[Mapping[str, str]]:
    """For each panel of a figure with a score as y, one with the first of `columns` that is better the same way."""
    own = {column.name: column for column in table.columns}
    for axes in table.axes:
        y = own[axes["y"]]
        stand_in = next((column.name for column in columns if y.score and column.better == y.better), None)
        if stand_in:
            yield {**axes, "y": stand_in}
