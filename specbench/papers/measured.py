"""Find the runs in a results folder that belong to a paper's table, without planning or running anything."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from specbench.errors import BAD_INPUT, SpecbenchError
from specbench.metrics import catalog as metric_catalog
from specbench.metrics.score_store import read_scores
from specbench.papers.join import PaperTable, join
from specbench.papers.reproduce import PlannedCell, resolve_cells
from specbench.papers.table import SCORE, CellSettings, Column, Row, Table
from specbench.prompts import load_prompts
from specbench.reporting.pareto import lower_is_better
from specbench.runs.decoder_args import plan_decoders
from specbench.runs.plan import plan_model, plan_sampling
from specbench.runs.settings import Value
from specbench.store.find import find_runs_like, read_infos, without_options
from specbench.store.run_store import RunStore

NOT_FOUND = "not in the results"


def measured_table(
    table: Table, model: str | None = None, prompts: str | None = None, out: Path | str = "results"
) -> PaperTable:
    """A table joined with the runs of a results folder.

    Args:
        model, prompts: used in place of the table's own.

    Raises:
        SpecbenchError: an unknown model or prompt set, or a damaged run folder.
    """
    if Path(out).is_file():
        raise SpecbenchError(f"--out {out}: is a file", "name a folder")
    if prompts is not None:
        _check_prompts(prompts)
    cells = resolve_cells(table, {"model": model, "prompts": prompts, "out": str(out)}, env={})
    found = find_measured(cells, out)
    if model is not None:
        table = one_row_per_run(table, cells, model)
        table = with_bundled_scores(table, [folder for folder in found.values() if isinstance(folder, Path)])
    return join(table, found)


def find_measured(cells: Sequence[PlannedCell], out: Path | str) -> dict[CellSettings, Path | str]:
    """The run folder of each cell in `out`, whatever machine it was measured on: most images first, then the newest."""
    infos = read_infos(out)
    found: dict[CellSettings, Path | str] = {}
    for cell in cells:
        alike = find_runs_like(infos, **wanted_fields(cell.values)) if infos and cell.values else {}
        order = {folder: (_images(folder), info.invocations[-1].started_at) for folder, info in alike.items()}
        found[cell.settings] = sorted(order, key=order.__getitem__)[-1] if order else NOT_FOUND
    return found


def wanted_fields(values: Mapping[str, Value]) -> dict[str, object]:
    """The fields of the `RunSpec` that the settings ask for; dtype, device and threads only where they were given, and
    whatever draft head.
    """
    value = {name: held.value for name, held in values.items()}
    model, (planned,) = plan_model(values), plan_decoders(value["decoder"], values)
    fields = {"model": model.name, "prompts": value["prompts"], "seed": value["seed"], "batch": value["batch"]}
    fields |= {"sampling": plan_sampling(model, values), "decoder": without_options(planned.spec, "head")}
    return fields | {name: value[name] for name in ("dtype", "device", "threads") if values[name].given}


def with_bundled_scores(table: Table, folders: Iterable[Path]) -> Table:
    """The table with a column for each bundled metric that scored any of the runs: for a substituted model. Where the
    columns sweep a setting, a metric has a column for each of its values."""
    scored = {score["metric"] for folder in folders for score in read_scores(folder)}
    names = [name for name in metric_catalog.bundled_metrics() if name in scored and name not in table.metrics()]
    swept: dict[str, Column] = {}
    for column in table.columns:
        if column.measurable:
            swept.setdefault(repr(sorted(column.settings.items())), column)
    columns = [_score_column(name, like, len(swept) > 1) for name in names for like in swept.values()]
    return replace(table, columns=(*table.columns, *columns))


def _score_column(metric: str, like: Column, swept: bool) -> Column:
    """A column for a metric over the runs of another column."""
    better = "lower" if lower_is_better(metric) else "higher"
    header = metric.replace("-", " ") + (f", {like.header}" if swept else "")
    name = f"{SCORE}{metric}" + (f" {like.name}" if swept else "")
    return Column(name, SCORE + metric, header, metric, 2, better, 1.0, like.settings)


def one_row_per_run(table: Table, cells: Sequence[PlannedCell], model: str) -> Table:
    """The table with rows that run the same here merged, under the name of the model that replaces the paper's."""
    plans = {cell.settings: repr(sorted((name, held.value) for name, held in cell.values.items())) for cell in cells}

    def runs(row: Row) -> tuple[str | None, ...]:
        settings = (table.cell_settings(row, column) for column in table.columns)
        return tuple(plans.get(one) for one in settings if one is not None)

    alike: dict[object, list[Row]] = {}
    for place, row in enumerate(table.rows):
        alike.setdefault(runs(row) if row.not_runnable_reason is None else place, []).append(row)
    if len(alike) == len(table.rows):
        return table
    repeated = [rows for rows in alike.values() if len(rows) > 1]
    labels = [_label(rows) for rows in alike.values()]
    rows = tuple(
        _in_place(rows, model, label if labels.count(label) == 1 else f"{label} ({_groups(rows)})")
        for rows, label in zip(alike.values(), labels, strict=True)
    )
    note = (
        f"With {model}, {sum(map(len, repeated))} rows of the paper are {len(repeated)} runs; each stands here once, "
        "without the paper's values, which are of several models or prompt sets."
    )
    return replace(table, rows=rows, notes=(*table.notes, note))


def _in_place(rows: Sequence[Row], model: str, label: str) -> Row:
    """A row for the rows of the paper that run the same here; one that cannot be run is unchanged."""
    first = rows[0]
    if first.not_runnable_reason is not None:
        return first
    if len(rows) == 1:
        return replace(first, group=model, label=f"{first.group}: {first.label}" if first.group else first.label)
    shared = tuple(text for text in first.chosen if all(text in row.chosen for row in rows))
    return Row(label, model, first.settings, {}, {}, {}, None, None, shared)


def _label(rows: Sequence[Row]) -> str:
    labels = {row.label for row in rows}
    return labels.pop() if len(labels) == 1 else str(rows[0].settings["decoder"])


def _groups(rows: Sequence[Row]) -> str:
    return ", ".join(dict.fromkeys(str(row.group) for row in rows))


def _check_prompts(name: str) -> None:
    """Refuse an unknown prompt set; one that is not on this disk may still have runs."""
    try:
        load_prompts(name)
    except SpecbenchError as error:
        if error.exit_code == BAD_INPUT:
            raise


def _images(folder: Path) -> int:
    return len(RunStore(folder).completed())
