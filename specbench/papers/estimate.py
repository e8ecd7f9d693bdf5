"""What running a table would take: images to make, time by recorded rows, disk at most. Nothing is decoded."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from pathlib import Path

from specbench import stats
from specbench.errors import SpecbenchError
from specbench.papers.reproduce import Planned
from specbench.papers.table import Case, Table
from specbench.runs.plan import Plan
from specbench.store.run_folders import read_info, runs_in

_BYTES_PER_PIXEL, _BYTES_PER_TOKEN, _BYTES_PER_ROW = 3, 32, 4096
"""A PNG that does not compress, and a row's lists: an upper bound."""


def outlook(table: Table, planned: Sequence[Planned]) -> list[dict[str, object]]:
    """One dict per case: `rows` (labels of the table's rows), `model, decoder, prompts, run_id, images, done, seconds`
    (for what is not done, by recorded rows of the same run, or else of the same model, decoder and device; None
    without any), `megabytes` (at most), `on_disk` (whether the weights are) and `problem`."""
    labels = _labels(table)
    weights: dict[str, str | None] = {}
    return [_row(one, labels[one.case], weights) for one in planned]


def total(rows: Sequence[Mapping]) -> str:
    """The sum in a sentence; rows of one run count once."""
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


def _labels(table: Table) -> dict[Case, str]:
    labels: dict[Case, list[str]] = {}
    for row in table.rows:
        for column in table.columns:
            case = table.case(row, column)
            if case is not None and row.label not in labels.setdefault(case, []):
                labels[case].append(row.label)
    return {case: ", ".join(found) for case, found in labels.items()}


def _row(one: Planned, label: str, weights: dict[str, str | None]) -> dict[str, object]:
    case, plan = one.case, one.plan
    row = {"rows": label, "model": case.model, "decoder": case.decoder, "prompts": case.prompts, "run_id": None}
    row |= dict.fromkeys(("images", "done", "seconds", "megabytes", "on_disk"))
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
    """The run's name, where weights and draft head are on this disk to be named after."""
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
    """Seconds per image of the run itself so far, or else of all runs of its model, decoder and device."""
    if run_id and (own := _pace([plan.out / run_id])) is not None:
        return own
    alike = []
    for folder in runs_in(plan.out):
        spec = read_info(folder)["spec"]
        there = (spec["model"], spec["decoder"]["name"], spec["device"])
        if there == (plan.model.name, plan.decoders[0].spec.name, plan.device):
            alike.append(folder)
    return _pace(alike)


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
