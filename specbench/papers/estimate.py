"""Cost estimate of running a paper's table: images, time (from recorded rows) and disk space."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from pathlib import Path

from specbench import stats
from specbench.errors import SpecbenchError
from specbench.papers.reproduce import PlannedCell
from specbench.papers.table import CellSettings, Row, Table
from specbench.runs.plan import Plan
from specbench.store.find import find_runs_like

_BYTES_PER_PIXEL, _BYTES_PER_TOKEN, _BYTES_PER_ROW = 3, 32, 4096
"""Upper bound per image: an incompressible PNG and the lists of its row."""


def estimate(table: Table, planned: Sequence[PlannedCell]) -> list[dict[str, object]]:
    """Estimate the cost of running a table, without decoding anything.

    Returns:
        One dict per run: `rows` (labels of the table's rows), `model, decoder, prompts, run_id, images, done, seconds`
        (for the missing images, from recorded rows of the same run, else of the same model, decoder and device; None
        without any), `megabytes` (at most), `on_disk` (whether the weights are), `problem`, and `chosen` (settings
        about which the paper is silent, each with its reason).
    """
    rows = _rows_of(table)
    weights: dict[str, str | None] = {}
    return [_row(one, rows[one.settings], weights) for one in planned]


def total(rows: Sequence[Mapping]) -> str:
    """Total cost in one sentence; rows of one run count once."""
    once = {row["run_id"] or number: row for number, row in enumerate(rows) if row["problem"] is None}.values()
    images = sum(row["images"] - row["done"] for row in once)
    known = [row["seconds"] for row in once if row["seconds"] is not None]
    time = f"about {_duration(sum(known))}" if len(known) == len(once) else "time unknown before a first image"
    if known and len(known) < len(once):
        time = f"about {_duration(sum(known))}, and {len(once) - len(known)} runs of unknown time"
    disk = math.ceil(sum(row["megabytes"] for row in once))
    blocked = sum(row["problem"] is not None for row in rows)
    rest = f"; {blocked} of {len(rows)} rows cannot run here" if blocked else ""
    return f"{images} images to make, {time}, at most {disk:,} MB{rest}"


def _rows_of(table: Table) -> dict[CellSettings, list[Row]]:
    """The rows of the table that each run serves."""
    found: dict[CellSettings, list[Row]] = {}
    for row in table.rows:
        for column in table.columns:
            settings = table.cell_settings(row, column)
            if settings is not None and row not in found.setdefault(settings, []):
                found[settings].append(row)
    return found


def _row(one: PlannedCell, rows: Sequence[Row], weights: dict[str, str | None]) -> dict[str, object]:
    settings, plan = one.settings, one.plan
    row = {"rows": ", ".join(dict.fromkeys(row.label for row in rows))}
    row |= {"chosen": list(dict.fromkeys(text for row in rows for text in row.chosen))}
    row |= {name: getattr(settings, name) for name in ("model", "decoder", "prompts")}
    row |= dict.fromkeys(("run_id", "images", "done", "seconds", "megabytes", "on_disk"))
    if plan is None:
        return row | {"problem": str(one.problem)}
    if plan.model.name not in weights:
        weights[plan.model.name] = plan.model.weights_sha256() if plan.model.ready else None
    images = len(plan.chosen) * plan.samples
    run_id = _run_id(plan, weights[plan.model.name])
    done = len(_wanted(plan) & _completed(plan, run_id))
    seconds = _seconds(plan, run_id)
    height, width = plan.model.resolution
    size = height * width * _BYTES_PER_PIXEL + plan.model.tokens * _BYTES_PER_TOKEN + _BYTES_PER_ROW
    return row | {
        "model": plan.model.name,
        "prompts": plan.prompts.name,
        "run_id": run_id,
        "images": images,
        "done": done,
        "seconds": None if seconds is None else seconds * (images - done),
        "megabytes": size * (images - done) / 1e6,
        "on_disk": plan.model.ready,
        "problem": None,
    }


def _run_id(plan: Plan, weights: str | None) -> str | None:
    """Run id, if weights and draft head are on disk."""
    if weights is None:
        return None
    try:
        return plan.spec(plan.decoders[0].spec, weights).run_id
    except SpecbenchError:
        return None


def _wanted(plan: Plan) -> set[tuple[str, int]]:
    return {(prompt.id, sample) for prompt in plan.chosen for sample in range(plan.samples)}


def _completed(plan: Plan, run_id: str | None) -> set[tuple[str, int]]:
    from specbench.store.run_store import RunStore

    return RunStore(plan.out / run_id).completed(plan.trace) if run_id else set()


def _seconds(plan: Plan, run_id: str | None) -> float | None:
    """Mean seconds per image of the run, or else of all runs of its model, decoder and device."""
    if run_id and (own := _pace([plan.out / run_id])) is not None:
        return own
    decoder = {"name": plan.decoders[0].spec.name}
    return _pace(list(find_runs_like(plan.out, model=plan.model.name, decoder=decoder, device=plan.device)))


def _pace(folders: Sequence[Path]) -> float | None:
    from specbench.reporting.report_rows import Run

    rows = [run.rows for run in map(Run, folders) if run.folder.is_dir()]
    images = sum(map(len, rows))
    paces = [(len(one), pace) for one in rows if (pace := stats.throughput(one))]
    return sum(n / pace for n, pace in paces) / images if images and len(paces) == len(rows) else None


def _duration(seconds: float) -> str:
    if seconds < 100:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 6000 else f"{seconds / 3600:,.0f} h"
