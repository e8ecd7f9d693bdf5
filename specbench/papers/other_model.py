"""A table with another model in the place of the paper's: its distinct runs, without printed values."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import product
from pathlib import Path

from specbench.metrics import catalog as metric_catalog
from specbench.metrics.score_store import read_scores
from specbench.papers.planned_cells import PlannedCell, replaced_settings
from specbench.papers.table import SCORE, Column, Row, Table, chosen_setting
from specbench.reporting.marks import label, natural
from specbench.reporting.plot_data import lower_is_better
from specbench.runs.decoder_args import plan_decoders
from specbench.specs.options import plain
from specbench.specs.presets import decoder_name, resolve


def as_run_here(table: Table, cells: Sequence[PlannedCell], model: object, folders: Iterable[Path]) -> Table:
    """The table without replaced choices, and with another model, if one is named, in the place of the paper's."""
    table = without_replaced_choices(table, cells)
    return table if model is None else with_bundled_scores(with_model(table, cells, str(model)), folders)


def without_replaced_choices(table: Table, cells: Sequence[PlannedCell]) -> Table:
    """The table without the choices of settings for which a flag or another model brings another value here."""
    replaced = {cell.settings: replaced_settings(cell) for cell in cells}

    def kept(row: Row) -> tuple[str, ...]:
        gone = set().union(*(replaced[one] for one in table.runs_of_row(row)))
        gone |= {"head"} if "model" in gone else set()  # each model has its own
        return tuple(line for line in row.chosen if chosen_setting(line) not in gone)

    return replace(table, rows=tuple(replace(row, chosen=kept(row)) for row in table.rows))


def with_model(table: Table, cells: Sequence[PlannedCell], model: str) -> Table:
    """The table of the distinct runs that another model has here, each named by its decoder, without values of the
    paper. Rows of this model itself, run as printed, keep their values; what cannot be run is left out."""
    by_settings = {cell.settings: cell for cell in cells}
    printed = [row for row in table.rows if table.runs_of_row(row)]
    alike: dict[str, list[Row]] = {}
    for row in printed:
        values = [by_settings[one].values for one in table.runs_of_row(row)]
        alike.setdefault(repr([{name: held.value for name, held in one.items()} for one in values]), []).append(row)
    runs = [by_settings[table.runs_of_row(rows[0])[0]] for rows in alike.values()]
    labels, sets = _labels(runs), {run.values["prompts"].value for run in runs if run.values}

    def replaced(row: Row) -> bool:
        return any(replaced_settings(by_settings[one]) for one in table.runs_of_row(row))

    rows = []
    for members, run, named in zip(alike.values(), runs, labels, strict=True):
        group = run.settings.decoder if table.axes else str(run.values["prompts"].value) if len(sets) > 1 else None
        shared = tuple(text for text in members[0].chosen if all(text in row.chosen for row in members))
        named = members[0].label if members[0].own else named
        own = Row(named, group, members[0].settings, {}, {}, {}, None, None, shared, members[0].own)
        rows.append(next((row for row in members if row.settings["model"] == model and not replaced(row)), own))
    groups = list(dict.fromkeys(row.group for row in rows))
    first = {row.settings["decoder"]: place for place, row in reversed(list(enumerate(rows)))}

    def place(row: Row) -> tuple:
        decoder, options = row.settings["decoder"], sorted(row.settings["options"].items())
        return groups.index(row.group), row.own, first[decoder], natural(str(options)), natural(row.label)

    rows.sort(key=place)
    if all(row.paper for row in rows):
        return replace(table, rows=tuple(rows))
    models = " and ".join(dict.fromkeys(name for row in printed if (name := row.settings["model"]) != model))
    left_out, own = len(table.rows) - len(printed), sum(row.own for row in printed)
    note = (
        f"With {model} in the place of {models or 'the model as printed'}, no value of the paper is comparable, so its "
        f"rows have none; {len(printed) - own} rows of the paper are {len(rows) - sum(row.own for row in rows)} here"
        + (f", and {left_out} that cannot be run are left out." if left_out else ".")
    )
    return replace(table, rows=tuple(rows), notes=(note,), hardware=None, whole=False)


def _labels(runs: Sequence[PlannedCell]) -> list[str]:
    """A name for each run: its decoder with its options, and the settings in which others of that name differ."""
    names, facts = [], []
    for run in runs:
        if run.values:
            (planned,) = plan_decoders(run.values["decoder"].value, run.values)
            spec, origins = planned.spec, planned.origins
        else:
            spec, origins = resolve(decoder_name(run.settings.decoder), dict(run.settings.options)), {}
        names.append(label(spec, origins, run.settings.model))
        values = {name: held.value for name, held in run.values.items() if name not in ("decoder", "seed")}
        facts.append(values | dict(spec.options))
    found = []
    for name, own in zip(names, facts, strict=True):
        others = [fact for other, fact in zip(names, facts, strict=True) if other == name]
        differing = [key for key in own if any(fact.get(key) != own[key] for fact in others)]
        found.append(" ".join([name, *(f"{key}={plain(own[key])}" for key in differing if f" {key}=" not in name)]))
    return found


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
