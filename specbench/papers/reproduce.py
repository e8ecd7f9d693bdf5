"""A paper's table, from its file to plans, runs, scores and the joined table.

A cell's settings come from the table; flags win over it, as for a small model in the place of the paper's.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path

from specbench import prompts
from specbench.errors import BAD_INPUT, INTERRUPTED, MISSING_PREREQUISITE, SpecbenchError
from specbench.metrics import catalog as metric_catalog
from specbench.models.catalog import find_model
from specbench.papers.table import SCORE, Case, Column, Table
from specbench.runs.decoder_args import plan_decoders
from specbench.runs.execute import execute
from specbench.runs.plan import SAMPLING_SETTINGS, Plan, make_plan, plan_model, plan_sampling, together
from specbench.runs.settings import OPEN_IN_TABLES, Value, decoder_settings, merge, run_settings
from specbench.store.run_folders import finite, read_info, runs_in

_TRACED = ("draft_tv", "draft_top1")
Warn = Callable[[str], None]


@dataclass(frozen=True)
class Planned:
    """A case with its plan, or with what keeps it from being run here."""

    case: Case
    values: Mapping[str, Value]
    plan: Plan | None = None
    problem: SpecbenchError | None = None


@dataclass
class Done:
    """What running a table came to.

    Attributes:
        folders: run folder by case.
        problems: why a case was not run.
        trouble: why the command should not exit with 0, though the table can be shown.
    """

    folders: dict[Case, Path] = field(default_factory=dict)
    problems: dict[Case, SpecbenchError] = field(default_factory=dict)
    trouble: SpecbenchError | None = None

    @property
    def found(self) -> dict[Case, Path | str]:
        """As `specbench.papers.join.join` takes it."""
        return {**{case: problem.what for case, problem in self.problems.items()}, **self.folders}


def plan_table(table: Table, flags: Mapping[str, object], env: Mapping[str, str] | None = None) -> list[Planned]:
    """Every case of a table with its plan.

    Args:
        flags: by the name of a setting of `specbench run`; None means not given.
        env: the environment; the process's own if None. What the table says wins over it.

    Raises:
        SpecbenchError: a flag that no case can be run with.
    """
    planned = [_plan(case, table, flags, os.environ if env is None else env) for case in table.cases()]
    refused = [one.problem for one in planned if one.problem is not None]
    if refused and len(refused) == len(planned) and all(problem.exit_code == BAD_INPUT for problem in refused):
        raise refused[0]
    return planned


def run_table(planned: Sequence[Planned], reporter=None, warn: Warn = lambda text: None) -> Done:
    """Decode what is missing; cases that share model and prompts take turns. What cannot run is left out.

    Raises:
        SpecbenchError: nothing could be run; exit code 5 where something is missing.
    """
    done = Done(problems={one.case: one.problem for one in planned if one.problem is not None})
    by_plan = {id(one.plan): one.case for one in planned if one.plan is not None}
    waiting = together(one.plan for one in planned if one.plan is not None)
    while waiting and (done.trouble is None or done.trouble.exit_code != INTERRUPTED):
        waiting += _run_together(waiting.pop(0), by_plan, done, reporter)
    stopped = None if done.folders else _gravest(list(done.problems.values()))
    left_out: dict[tuple[str, str], dict[str, None]] = {}
    for case, problem in done.problems.items():
        if str(problem) != str(stopped):
            left_out.setdefault((case.model, str(problem)), {})[case.decoder] = None
    for (model, problem), decoders in left_out.items():
        warn(f"{model} ({', '.join(decoders)}) not run: {problem}")
    if stopped:
        raise stopped
    return done


def score_table(
    table: Table, done: Done, settings, trial: bool = False, reporter=None, warn: Warn = lambda text: None
) -> None:
    """Score the runs with the metrics of the table's columns, where they can be had and fit.

    Args:
        trial: another model is in the place of the paper's: nothing is downloaded, and metrics that need nothing from
            outside are added.
    """
    from specbench.metrics import scoring

    for name in dict.fromkeys([*table.metrics(), *(metric_catalog.bundled_metrics() if trial else ())]):
        problem = _unready(name, settings, trial or settings.offline)
        for folder in () if problem else dict.fromkeys(done.folders.values()):
            try:
                scoring.score([folder], [name], settings, reporter, where_they_fit=True)
            except SpecbenchError as error:
                if error.exit_code not in (BAD_INPUT, MISSING_PREREQUISITE):
                    raise
                problem = error
                break
        if problem:
            warn(f"{name}: not scored: {problem}")


def find_measured(planned: Sequence[Planned], out: Path) -> dict[Case, Path | str]:
    """The run folder of each case in `out`, whatever machine it came from: the one of most images, then the newest."""
    infos = {folder: read_info(folder) for folder in runs_in(out)}
    found = {}
    for one in planned:
        known = [folder for folder, info in infos.items() if _matches(info["spec"], one.values)]
        ranked = sorted(known, key=lambda folder: (_images(folder), infos[folder]["invocations"][-1]["started_at"]))
        found[one.case] = ranked[-1] if ranked else "not in the results"
    return found


def with_scores_beside(table: Table, folders: Sequence[Path]) -> Table:
    """The table with a column for each metric that needs nothing from outside and scored any of the runs: for a
    model in the place of the paper's."""
    from specbench.metrics.score_store import read_scores
    from specbench.reporting.pareto import lower_is_better

    scored = {score["metric"] for folder in folders for score in read_scores(folder)}
    names = [name for name in metric_catalog.bundled_metrics() if name in scored and name not in table.metrics()]
    better = {name: "lower" if lower_is_better(name) else "higher" for name in names}
    columns = [Column(name, SCORE + name, name.replace("-", " "), name, 2, better[name], 1.0, {}) for name in names]
    return replace(table, columns=(*table.columns, *columns))


def _plan(case: Case, table: Table, flags: Mapping[str, object], env: Mapping[str, str]) -> Planned:
    values: dict[str, Value] = {}
    try:
        given = _settings(case, flags.get("model")) | {"trace": any(c.key in _TRACED for c in table.columns)}
        closed = {setting.env for setting in (*decoder_settings(), *run_settings()) if setting.name in given}
        closed |= {setting.env for setting in run_settings() if setting.name not in OPEN_IN_TABLES}
        free = {name: value for name, value in env.items() if name not in closed}
        values = merge(run_settings(), flags, free, given, f"{table.name}.toml")
        return Planned(case, values, plan=make_plan(values))
    except SpecbenchError as problem:
        return Planned(case, values, problem=problem)


def _settings(case: Case, model: object) -> dict[str, object]:
    """The case by setting name. A model in the place of the case's brings prompts it can read, and its vocabulary."""
    inline = ",".join(f"{name}={value}" for name, value in case.options)
    settings = {
        name: getattr(case, name) for name in ("model", "prompts", "limit", "samples", "seed", "batch", "dtype")
    }
    settings["decoder"] = [f"{case.decoder}:{inline}" if inline else case.decoder]
    settings |= {SAMPLING_SETTINGS[name]: value for name, value in case.sampling}
    if model is not None and model != case.model:
        own = find_model(str(model))
        settings["prompts"] = own.name if own.name in prompts.names() else case.prompts
        settings["top-k"] = settings.get("top-k") if (settings.get("top-k") or 0) <= own.v_image else 0
    return {name: value for name, value in settings.items() if value is not None}


def _run_together(plans: list[Plan], by_plan: Mapping[int, Case], done: Done, reporter) -> list[list[Plan]]:
    """Run plans that share their work. Plans that one of them kept from running are returned, each alone."""

    try:
        summary = execute(plans, reporter)
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


def _gravest(problems: Sequence[SpecbenchError]) -> SpecbenchError | None:
    """The first one for which something must be installed, or else the first."""
    return min(problems, key=lambda problem: problem.exit_code != MISSING_PREREQUISITE, default=None)


def _unready(name: str, settings, no_download: bool) -> SpecbenchError | None:
    """Why a metric cannot be computed here."""
    try:
        missing = metric_catalog.metric(name)(settings).missing() if no_download else []
    except SpecbenchError as error:
        return error
    return SpecbenchError(*missing[0], MISSING_PREREQUISITE) if missing else None


def _matches(spec: Mapping, values: Mapping[str, Value]) -> bool:
    """Whether a stored run is what the settings ask for; machine settings count where they were given."""
    if not values:
        return False
    value = {name: held.value for name, held in values.items()}
    model, (planned,) = plan_model(values), plan_decoders(value["decoder"], values)
    decoder = {**asdict(planned.spec), "options": dict(planned.spec.options)}
    asked = {"model": model.name, "prompts": value["prompts"], "seed": value["seed"], "batch": value["batch"]}
    asked |= {"sampling": asdict(plan_sampling(model, values)), "decoder": decoder}
    asked |= {name: value[name] for name in ("dtype", "device", "threads") if values[name].given}
    return all(spec[name] == wanted for name, wanted in finite(asked).items())


def _images(folder: Path) -> int:
    from specbench.store.run_store import RunStore

    return len(RunStore(folder).completed())
