"""A paper's table with another model in the place of the paper's: what its rows, headings and scores are then."""

from __future__ import annotations

import re
from collections.abc import Container, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from specbench.metrics import catalog as metric_catalog
from specbench.metrics.score_store import read_scores
from specbench.models.catalog import find_model
from specbench.papers.reproduce import PlannedCell
from specbench.papers.table import SCORE, Column, Row, Table
from specbench.reporting.pareto import lower_is_better


def with_bundled_scores(table: Table, folders: Iterable[Path]) -> Table:
    """The table with a column for each bundled metric that scored any of the runs: for a substituted model. Where the
    columns sweep a setting, a metric has a column for each of its values; a figure has panels with them, too."""
    scored = {score["metric"] for folder in folders for score in read_scores(folder)}
    names = [name for name in metric_catalog.bundled_metrics() if name in scored and name not in table.metrics()]
    swept: dict[str, Column] = {}
    for column in table.columns:
        if column.measurable:
            swept.setdefault(repr(sorted(column.settings.items())), column)
    columns = [_score_column(name, like, len(swept) > 1) for name in names for like in swept.values()]
    return replace(table, columns=(*table.columns, *columns), axes=(*table.axes, *_panels(table, columns)))


def _panels(table: Table, columns: Sequence[Column]) -> Iterator[Mapping[str, str]]:
    """For each panel of a figure with a score as y, one with the first of `columns` that is better the same way."""
    own = {column.name: column for column in table.columns}
    for axes in table.axes:
        y = own[axes["y"]]
        stand_in = next((column.name for column in columns if y.score and column.better == y.better), None)
        if stand_in:
            yield {**axes, "y": stand_in}


def _score_column(metric: str, like: Column, swept: bool) -> Column:
    """A column for a metric over the runs of another column."""
    better = "lower" if lower_is_better(metric) else "higher"
    header = metric.replace("-", " ") + (f", {like.header}" if swept else "")
    name = f"{SCORE}{metric}" + (f" {like.name}" if swept else "")
    return Column(name, SCORE + metric, header, metric, 2, better, 1.0, like.settings)


def one_row_per_run(table: Table, cells: Sequence[PlannedCell], model: str) -> Table:
    """The table with rows that run the same here merged, and all rows under the name of the model that replaces the
    paper's."""
    plans = {cell.settings: repr(sorted((name, held.value) for name, held in cell.values.items())) for cell in cells}

    def runs(row: Row) -> tuple[str | None, ...]:
        settings = (table.cell_settings(row, column) for column in table.columns)
        return tuple(plans.get(one) for one in settings if one is not None)

    alike: dict[object, list[Row]] = {}
    for place, row in enumerate(_renamed(row, model) for row in table.rows):
        alike.setdefault(runs(row) if row.not_runnable_reason is None else place, []).append(row)
    replaced = _replaced(table, cells)
    repeated = [rows for rows in alike.values() if len(rows) > 1]
    headings = [(_group(rows, model, replaced), _label(rows)) for rows in alike.values()]
    rows = tuple(
        _in_place(rows, model, group, label if headings.count((group, label)) == 1 else f"{label} ({_groups(rows)})")
        for rows, (group, label) in zip(alike.values(), headings, strict=True)
    )
    if not repeated:
        return replace(table, rows=rows)
    note = (
        f"With {model}, {sum(map(len, repeated))} rows of the paper are {len(repeated)} runs; each stands here once, "
        "without the paper's values, which are of several models or prompt sets."
    )
    return replace(table, rows=rows, notes=(*table.notes, note))


def _in_place(rows: Sequence[Row], model: str, group: str | None, label: str) -> Row:
    """A row for the rows of the paper that run the same here; one that cannot be run is unchanged."""
    first = rows[0]
    if first.not_runnable_reason is not None:
        return first
    if len(rows) == 1:
        mine = group == first.group or first.settings["model"] == model
        return first if mine else replace(first, group=group, label=f"{first.group}: {first.label}")
    shared = tuple(text for text in first.chosen if all(text in row.chosen for row in rows))
    return Row(label, group, first.settings, {}, {}, {}, None, None, shared)


def _renamed(row: Row, model: str) -> Row:
    """A row whose label names the paper's model with the name of the one in its place."""
    own = row.settings.get("model")
    if own == model or row.not_runnable_reason is not None:
        return row
    family = re.escape(re.split(r"[ -]", find_model(str(own)).summary, maxsplit=1)[0])
    return replace(row, label=re.sub(rf"\b{family}[\w-]*( \([\d.]+B\))?", lambda _: model, row.label))


def _group(rows: Sequence[Row], model: str, replaced: Container[str]) -> str | None:
    """Heading of rows that run the same here: the model in place of the paper's, and what else is true of all."""
    if len(rows) == 1 and not any(part in replaced for part in _parts(rows[0])):
        return rows[0].group
    shared = [part for part in _parts(rows[0]) if part not in replaced and all(part in _parts(row) for row in rows)]
    return ", ".join((model, *shared))


def _replaced(table: Table, cells: Sequence[PlannedCell]) -> set[str]:
    """Parts of the rows' headings that are no longer true: names of one of several models, and of one of several prompt
    sets where all rows now run on the same one."""
    prompts = {cell.values["prompts"].value for cell in cells if cell.values}
    return _names(table, "model") | (_names(table, "prompts") if len(prompts) == 1 else set())


def _names(table: Table, setting: str) -> set[str]:
    """Parts of the rows' headings that go with one value of a setting each, in a table of several values."""
    values: dict[str, set[object]] = {}
    for row in table.rows:
        for part in _parts(row):
            values.setdefault(part, set()).add(row.settings.get(setting))
    several = len(set().union(*values.values())) > 1
    return {part for part, found in values.items() if several and len(found) == 1}


def _parts(row: Row) -> list[str]:
    """What a row's heading says: "LlamaGen-XL, Cool-SD" names a model and a decoder."""
    return row.group.split(", ") if row.group else []


def _label(rows: Sequence[Row]) -> str:
    labels = {row.label for row in rows}
    return labels.pop() if len(labels) == 1 else str(rows[0].settings["decoder"])


def _groups(rows: Sequence[Row]) -> str:
    return ", ".join(dict.fromkeys(str(row.group) for row in rows))
