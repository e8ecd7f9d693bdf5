"""Cost estimate of running a paper's table: images, time (from recorded rows) and disk space."""

from __future__ import annotations

import math
import shlex
from collections.abc import Mapping, Sequence

from specbench.errors import SpecbenchError
from specbench.papers.reproduce import PlannedCell, one_row_per_run, without_replaced_choices
from specbench.papers.table import CellSettings, Row, Table
from specbench.runs.dry_run import ON_DISK, ROW, outlooks
from specbench.runs.plan import Shared
from specbench.specs.options import plain
from specbench.system.console import duration


def estimate(table: Table, planned: Sequence[PlannedCell], model: str | None = None) -> list[dict[str, object]]:
    """Estimate the cost of running a table, without decoding anything.

    Args:
        model: in the place of the paper's, see `specbench.papers.reproduce.one_row_per_run`.

    Returns:
        One dict per run: `rows` (labels of the table's rows), `chosen` (settings about which the paper is silent, each
        with its reason), the keys of `specbench.runs.dry_run.Outlook.row`, `on_disk` (whether the weights are) and
        `problem` (the first obstacle).
    """
    table = without_replaced_choices(table, planned)
    rows = _rows_of(one_row_per_run(table, planned, model) if model else table)
    shared = Shared()
    found: dict[object, dict[str, object]] = {}
    cells = {one.settings: one for one in planned}
    for place, settings in enumerate(rows):
        row = _row(cells[settings], rows[settings], shared)
        same = found.setdefault(row["run_id"] or place, row)
        if same is not row:  # cells of several columns or groups are one run
            same["rows"] = ", ".join(dict.fromkeys((*str(same["rows"]).split(", "), *str(row["rows"]).split(", "))))
    return list(found.values())


def run_lines(planned: Sequence[PlannedCell]) -> list[str]:
    """The `specbench run` lines that decode the cells of a table; cells that share all but the decoder share a line."""
    lines: dict[tuple[str, ...], dict[str, None]] = {}
    for one in planned:
        given = {name: held for name, held in one.values.items() if held.given and name not in _ELSEWHERE}
        words = tuple(word for name, held in given.items() for word in _words(name, held.value))
        if one.values:
            lines.setdefault(words, {})[",".join(one.values["decoder"].value)] = None
    return [shlex.join(["specbench", "run", "--decoder", ",".join(found), *words]) for words, found in lines.items()]


_ELSEWHERE = ("decoder", "quiet", "json")


def _words(name: str, value: object) -> list[str]:
    """A setting as it is typed; a switch that is off is not."""
    if isinstance(value, bool):
        return [f"--{name}"] * value
    return [f"--{name}", ",".join(map(str, value)) if isinstance(value, list) else plain(value)]


def scoring_needs(table: Table) -> list[str]:
    """What the metrics of a table lack on this disk, networks and reference images, a line each."""
    from specbench.metrics import catalog  # brings pandas

    lines = []
    for name in table.metrics():
        try:
            missing = ", ".join(one.name for one in catalog.downloads([name]))
        except SpecbenchError as problem:
            missing = str(problem)
        lines += [f"{name} lacks {missing}"] if missing else []
    return lines


def total(rows: Sequence[Mapping]) -> str:
    """Total cost in one sentence; rows of one run count once."""
    blocked = sum(row["problem"] is not None for row in rows)
    rest = f"{blocked} of {len(rows)} rows cannot run here"
    if blocked == len(rows):
        return rest
    once = {row["run_id"] or number: row for number, row in enumerate(rows) if row["problem"] is None}.values()
    images = sum((row["images"] or 0) - row["done"] for row in once)
    more = " and those of prompts that are not here" * any(row["images"] is None for row in once)
    known = [row["seconds"] for row in once if row["seconds"] is not None]
    time = f"about {duration(sum(known))}" if len(known) == len(once) else "time unknown before a first image"
    if known and len(known) < len(once):
        unknown = len(once) - len(known)
        time = f"about {duration(sum(known))}, and {unknown} run{'s' if unknown > 1 else ''} of unknown time"
    disk = math.ceil(sum(row["megabytes"] or 0 for row in once))
    return f"{images} image{'s' * (images != 1)}{more} to make, {time}, at most {disk:,} MB" + (
        f"; {rest}" if blocked else ""
    )


def _rows_of(table: Table) -> dict[CellSettings, list[Row]]:
    """The rows of the table that each run serves."""
    found: dict[CellSettings, list[Row]] = {}
    for row in table.rows:
        for column in table.columns:
            settings = table.cell_settings(row, column)
            if settings is not None and row not in found.setdefault(settings, []):
                found[settings].append(row)
    return found


def _row(one: PlannedCell, rows: Sequence[Row], shared: Shared) -> dict[str, object]:
    about = {"rows": ", ".join(dict.fromkeys(row.label for row in rows))}
    about |= {"chosen": list(dict.fromkeys(text for row in rows for text in row.chosen))}
    problem, found = one.problem, None
    try:
        found = outlooks(one.values, shared)[0].row if one.values else None
    except SpecbenchError as error:
        problem = error
    if found is None:  # refused settings: little more than the reason
        known = {name: getattr(one.settings, name) for name in ("model", "decoder", "prompts")}
        found = dict.fromkeys(ROW) | known | {"obstacles": [str(problem)]}
    first = next(iter(found["obstacles"]), None)
    return about | dict(found) | {"on_disk": found["weights"] == ON_DISK, "problem": first}
