"""Cells of a table as runs: their settings, plans and stored runs.

A cell's settings come from the table. Flags override the table, for example to use a smaller model.
"""

import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import product
from pathlib import Path

from specbench import prompts
from specbench.errors import BAD_INPUT, SpecbenchError
from specbench.metrics import catalog as metric_catalog
from specbench.metrics.score_store import stored_directions
from specbench.models.catalog import find_model
from specbench.models.facts import EIGHT_BITS
from specbench.papers.cells import RATIOS_TO_AR
from specbench.papers.table import SCORE, Column, Row, Table, chosen_setting, takes
from specbench.reporting.marks import label, natural
from specbench.runs.decoder_args import plan_decoders
from specbench.runs.plan import Plan, Shared, make_plan, plan_model, plan_sampling
from specbench.runs.settings import RunSettings, merge, run_settings
from specbench.specs.options import Setting, SettingOrigin, SettingSource, Use, plain
from specbench.specs.presets import decoder_name, named_ar, resolve
from specbench.stats import NUMBERS
from specbench.store.run_folders import find_runs_like, read_infos, without_options
from specbench.store.run_store import RunStore

_NOT_FOUND = "not in the results"


@dataclass(frozen=True)
class PlannedCell:
    """Settings that one or more cells share, with the plan of the run or the problem that prevents the run."""

    settings: RunSettings  # from the table
    values: RunSettings | None  # with flags and environment applied; None if the result is invalid
    plan: Plan | None = None
    problem: SpecbenchError | None = None


def resolve_cells(table: Table, flags: Mapping[str, object], env: Mapping[str, str] | None = None) -> list[PlannedCell]:
    """Return the distinct cells of a table with their settings, but no plans. `flags`: {setting of `specbench run`:
    value, None if not given}. `env`: environment variables, by default of the process; the table overrides them."""
    settings, env = run_settings(), os.environ if env is None else env
    head_of(str(flags.get("head") or ""), "")
    every = table.all_settings()
    shared = {"trace": any(column.key in NUMBERS and NUMBERS[column.key].of == "traces" for column in table.columns)}
    cells = [_resolve(asked, shared, f"{table.name}.toml", settings, flags, env) for asked in every]
    over_ar = any(column.key in RATIOS_TO_AR for column in table.columns)
    if not over_ar or any(named_ar(cell.decoder[0]) for cell in every):
        none = {"baseline": 0}, {"baseline": SettingOrigin(SettingSource.DEFAULT, "of tables")}
        cells = [replace(cell, values=cell.values and cell.values.changed(*none)) for cell in cells]
    _raise_if_all_refused(cells)
    return cells


def _resolve(
    asked: RunSettings,
    shared: Mapping[str, object],
    file: str,
    settings: Sequence[Setting],
    flags: Mapping[str, object],
    env: Mapping[str, str],
) -> PlannedCell:
    try:
        table = {**_settings(asked, flags.get("model")), **shared}
        unused = {"head"} - takes(asked.decoder[0], asked.options)
        flags = {name: value for name, value in flags.items() if name not in unused}
        if flags.get("head"):
            flags["head"] = head_of(str(flags["head"]), str(flags.get("model") or asked.model))
        closed = unused | table.keys()
        open_here = {setting.env for setting in settings if Use.TABLES in setting.uses and setting.name not in closed}
        free = {name: value for name, value in env.items() if name in open_here}
        return PlannedCell(asked, merge(settings, flags, free, table, file))
    except SpecbenchError as problem:
        return PlannedCell(asked, None, problem=problem)


def head_of(text: str, model: str) -> str | None:
    """Return a model's head from `--head`: a folder or hub id for all models, or a list MODEL=PATH,MODEL=PATH."""
    if "=" not in text:
        return text
    named = dict(piece.partition("=")[::2] for piece in text.split(","))
    for name in named:
        find_model(name)
    return named.get(model)


def _settings(asked: RunSettings, model: object) -> dict[str, object]:
    """Return {setting: value} of a cell. If `model` is another model, prompts, top-k and guidance also change."""
    inline = ",".join(f"{name}={value}" for name, value in sorted(asked.options.items()))
    values = {name: value for name, value in asked.by_name.items() if name not in asked.options}
    values |= {"decoder": [f"{asked.decoder[0]}:{inline}" if inline else asked.decoder[0]]}
    if model not in (None, asked.model):
        other = find_model(str(model))
        top_k, cfg = asked.value("top-k"), asked.value("cfg")
        values |= {
            **dict.fromkeys(("guidance-rows", "prompt-form")),
            "prompts": other.name if other.name in prompts.prompt_set_names() else asked.prompts,
            "top-k": top_k if (top_k or 0) <= other.v_image else 0,
            "cfg": cfg if other.guided else None,
        }
    return {name: value for name, value in values.items() if value is not None}


def _raise_if_all_refused(cells: Sequence[PlannedCell]) -> None:
    refused = [cell.problem for cell in cells if cell.problem is not None]
    if refused and len(refused) == len(cells) and all(problem.exit_code == BAD_INPUT for problem in refused):
        raise refused[0]


def plan_table(table: Table, flags: Mapping[str, object], env: Mapping[str, str] | None = None) -> list[PlannedCell]:
    """Return the distinct cells of a table, each with its plan or the problem that prevents it; see `resolve_cells`."""
    planned, shared = [], Shared()
    for cell in resolve_cells(table, flags, env):
        try:
            plan = make_plan(cell.values, shared=shared) if cell.values else None
            planned.append(replace(cell, plan=plan))
        except SpecbenchError as problem:
            planned.append(replace(cell, problem=problem))
    _raise_if_all_refused(planned)
    return planned


def find_measured(cells: Sequence[PlannedCell], out: Path | str) -> dict[RunSettings, Path | str]:
    """Find the run folder of each cell in `out`, from any machine: the run with the most images, then the newest."""
    infos = read_infos(out)
    folders: dict[RunSettings, Path | str] = {}
    for cell in cells:
        alike = find_runs_like(infos, **wanted_fields(cell.values)) if infos and cell.values else {}
        order = {
            folder: (len(RunStore(folder).completed()), info.invocations[-1].started_at)
            for folder, info in alike.items()
        }
        folders[cell.settings] = sorted(order, key=order.__getitem__)[-1] if order else _NOT_FOUND
    return folders


def wanted_fields(settings: RunSettings) -> dict[str, object]:
    """Return the fields of `RunSpec` that the settings determine. Dtype, device and threads are included only if given;
    the draft head is not included, because any head is accepted."""
    model, (planned,) = plan_model(settings), plan_decoders(settings)
    fields = {name: getattr(settings, name) for name in ("prompts", "seed", "batch")} | {"model": model.name}
    fields |= {"sampling": plan_sampling(model, settings), "decoder": without_options(planned.spec, "head")}
    machine: dict[str, object] = {"dtype": model.dtype if settings.dtype == EIGHT_BITS else settings.dtype}
    machine |= {"device": settings.device, "threads": settings.threads}
    return fields | {name: value for name, value in machine.items() if settings.is_given(name)}


def replaced_settings(cell: PlannedCell) -> set[str]:
    """Return the names of the settings in which a cell's run differs from the table."""
    stated = _settings(cell.settings, None)
    values = cell.values.by_name if cell.values else {}
    return {name for name, value in values.items() if name in stated and value != stated[name]} - {"decoder"}


def as_run_here(table: Table, cells: Sequence[PlannedCell], model: object, folders: Iterable[Path]) -> Table:
    """Return the table without replaced choices; if `model` is given, also for this model (see `with_model`)."""
    table = without_replaced_choices(table, cells)
    return table if model is None else with_bundled_scores(with_model(table, cells, str(model)), folders)


def without_replaced_choices(table: Table, cells: Sequence[PlannedCell]) -> Table:
    """Remove the choices of settings that a flag or another model replaces."""
    replaced = {cell.settings: replaced_settings(cell) for cell in cells}

    def kept(row: Row) -> tuple[str, ...]:
        gone = set().union(*(replaced[settings] for settings in table.runs_of_row(row)))
        gone |= {"head"} if "model" in gone else set()  # each model has a separate head
        return tuple(line for line in row.chosen if chosen_setting(line) not in gone)

    return replace(table, rows=tuple(replace(row, chosen=kept(row)) for row in table.rows))


def with_model(table: Table, cells: Sequence[PlannedCell], model: str) -> Table:
    """Return a table with a row per distinct run of another model, labelled by decoder and without the paper's values.
    Rows that the paper prints for this model keep their values. Rows that cannot be run are left out."""
    by_settings = {cell.settings: cell for cell in cells}
    alike: dict[str, list[tuple[Row, list[PlannedCell]]]] = {}
    planned = ((row, [by_settings[asked] for asked in table.runs_of_row(row)]) for row in table.rows)
    printed = [(row, runs) for row, runs in planned if runs]
    for row, runs in printed:
        values = [run.values.by_name if run.values else {} for run in runs]
        alike.setdefault(repr(values), []).append((row, runs))
    first_runs = [runs[0] for (_, runs), *_ in alike.values()]
    sets = {run.values.prompts for run in first_runs if run.values}
    rows = []
    for members, run, label_here in zip(alike.values(), first_runs, _labels(first_runs), strict=True):
        like = members[0][0]
        own_prompts = str(run.values and run.values.prompts) if len(sets) > 1 else None
        group = run.settings.decoder[0] if table.axes else own_prompts
        shared = tuple(text for text in like.chosen if all(text in row.chosen for row, _ in members))
        label_here = like.label if like.own else label_here
        silent = Row(label_here, group, like.settings, {}, {}, {}, None, None, shared, like.own, seeds=like.seeds)
        own_model = [(row, runs) for row, runs in members if row.model == model]
        as_printed = [row for row, runs in own_model if not any(map(replaced_settings, runs))]
        rows.append((*as_printed, silent)[0])
    groups = list(dict.fromkeys(row.group for row in rows))
    first = {row.decoder: place for place, row in reversed(list(enumerate(rows)))}

    def place(row: Row) -> tuple[object, ...]:
        options = sorted(row.settings.options.items())
        return groups.index(row.group), row.own, first[row.decoder], natural(str(options)), natural(row.label)

    rows.sort(key=place)
    if all(row.paper for row in rows):
        return replace(table, rows=tuple(rows))
    models = " and ".join(dict.fromkeys(row.model for row, _ in printed if row.model and row.model != model))
    left_out, added = len(table.rows) - len(printed), sum(row.own for row, _ in printed)
    note = (
        f"With {model} instead of {models or 'the model as printed'}, no value of the paper is comparable, so none is "
        f"printed; the {len(printed) - added} rows of the paper become "
        f"{len(rows) - sum(row.own for row in rows)} rows here"
        + (f", and {left_out} rows that cannot be run are omitted." if left_out else ".")
    )
    return replace(table, rows=tuple(rows), notes=(note,), hardware=None, whole=False)


def _labels(runs: Sequence[PlannedCell]) -> list[str]:
    """Label each run by its decoder and options, and if labels are equal, by the settings that differ."""
    names, facts = [], []
    for run in runs:
        if run.values:
            (planned,) = plan_decoders(run.values)
            spec, origins = planned.spec, planned.origins
        else:
            spec, origins = resolve(decoder_name(run.settings.decoder[0]), run.settings.options), {}
        names.append(label(spec, origins, run.settings.model))
        values = run.values.by_name if run.values else {}
        facts.append({name: values[name] for name in values if name not in ("decoder", "seed")} | spec.options)
    labels = []
    for name, facts_of_run in zip(names, facts, strict=True):
        others = [fact for other, fact in zip(names, facts, strict=True) if other == name]
        differing = [key for key in facts_of_run if any(fact.get(key) != facts_of_run[key] for fact in others)]
        labels.append(
            " ".join([name, *(f"{key}={plain(facts_of_run[key])}" for key in differing if f" {key}=" not in name)])
        )
    return labels


def with_bundled_scores(table: Table, folders: Iterable[Path]) -> Table:
    """Add a column for each bundled metric that scored any of the runs, to a table with another model. If the table's
    columns vary a setting, each metric gets a column per value. A figure also gets panels of these columns."""
    scored = stored_directions(folders)
    names = [name for name in metric_catalog.bundled_metrics() if name in scored and name not in table.metrics()]
    swept: dict[object, Column] = {}
    for column in table.columns:
        if column.measurable:
            swept.setdefault((column.settings, column.seeds), column)
    columns = []
    for metric, like in product(names, swept.values()):
        name, header = f"{SCORE}{metric}", metric.replace("-", " ")
        if len(swept) > 1:
            name, header = f"{name} {like.name}", f"{header}, {like.header}"
        columns.append(Column(name, SCORE + metric, header, metric, 2, scored[metric], 1.0, like.settings, like.seeds))
    return replace(table, columns=(*table.columns, *columns), axes=(*table.axes, *_panels(table, columns)))


def _panels(table: Table, columns: Sequence[Column]) -> Iterator[Mapping[str, str]]:
    """For each panel with a score as y, yield a panel whose y is the first of `columns` with the same direction."""
    columns_by_name = {column.name: column for column in table.columns}
    for axes in table.axes:
        y = columns_by_name[axes["y"]]
        if stand_in := next((column.name for column in columns if y.score and column.better == y.better), None):
            yield {**axes, "y": stand_in}
