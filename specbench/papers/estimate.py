"""Cost estimate of running a paper's table: images, time (from recorded rows) and disk space."""

from __future__ import annotations

import json
import math
import shlex
from collections.abc import Mapping, Sequence

from specbench.errors import SpecbenchError
from specbench.papers.other_model import with_model, without_replaced_choices
from specbench.papers.planned_cells import PlannedCell
from specbench.papers.table import CellSettings, Row, Table
from specbench.runs.dry_run import ON_DISK, ROW, outlooks
from specbench.runs.plan import Shared
from specbench.specs.options import plain
from specbench.system.console import duration


def estimate(table: Table, planned: Sequence[PlannedCell], model: str | None = None) -> list[dict[str, object]]:
    """Estimate the cost of running a table, without decoding anything.

    Args:
        model: in the place of the paper's, see `specbench.papers.other_model.with_model`.

    Returns:
        One dict per run: `rows` (labels of the table's rows), `chosen` (settings about which the paper is silent, each
        with its reason), the keys of `specbench.runs.dry_run.Outlook.row`, `on_disk` (whether the weights are) and
        `problem` (the first obstacle).
    """
    table = without_replaced_choices(table, planned)
    rows = _rows_of(with_model(table, planned, model) if model else table)
    shared = Shared()
    found: dict[object, dict[str, object]] = {}
    cells = {one.settings: one for one in planned}
    for place, settings in enumerate(rows):
        row = _row(cells[settings], rows[settings], shared)
        same = found.setdefault(row["run_id"] or place, row)
        if same is not row:  # cells of several columns or groups are one run
            same["rows"] = ", ".join(dict.fromkeys((*str(same["rows"]).split(", "), *str(row["rows"]).split(", "))))
    return list(found.values())


def seeds_together(rows: Sequence[Mapping]) -> list[dict[str, object]]:
    """Rows that differ in the seed alone as one, with their sums, for a terminal."""
    found: dict[str, dict[str, object]] = {}
    for row in rows:
        alike = {name: value for name, value in row.items() if name not in (*_SUMS, "run_id", "seed")}
        one = found.setdefault(json.dumps(alike, default=str), {**row, "seed": []})
        if one["seed"]:
            one |= {name: None if None in (one[name], row[name]) else one[name] + row[name] for name in _SUMS}
        one["seed"] = [*one["seed"], row["seed"]]
    return [{**row, "seed": ", ".join(map(str, row["seed"]))} for row in found.values()]


def run_lines(planned: Sequence[PlannedCell]) -> list[str]:
    """The `specbench run` lines that decode the cells of a table; cells that share all but decoder and seed share a
    line."""
    seeds: dict[tuple[tuple[str, ...], str], dict[object, None]] = {}
    for one in (one for one in planned if one.values):
        given = {name: held for name, held in one.values.items() if held.given and name not in _ELSEWHERE}
        words = tuple(word for name, held in given.items() for word in _words(name, held.value))
        place = words, ",".join(one.values["decoder"].value)
        seeds.setdefault(place, {})[one.values["seed"].value if one.values["seed"].given else None] = None
    lines: dict[tuple[str, ...], list[str]] = {}
    for (words, decoder), own in seeds.items():
        text = ",".join(str(seed) for seed in own if seed is not None)
        drawn = ("--sweep", f"seed={text}") if len(own) > 1 else ("--seed", text) if text else ()
        lines.setdefault((*words, *drawn), []).append(decoder)
    return [shlex.join(["specbench", "run", "--decoder", ",".join(found), *words]) for words, found in lines.items()]


_ELSEWHERE, _SUMS = ("decoder", "seed", "quiet", "json"), ("images", "done", "seconds", "megabytes")


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
        for settings in table.runs_of_row(row):
            found.setdefault(settings, []).append(row)
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
