"""Demonstration on the embedded model: decode, score and report a few prompts with several decoders."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from specbench.metrics import scoring
from specbench.reporting.picture_figures import write_pictures
from specbench.reporting.report_rows import report_rows
from specbench.reporting.row import record, unique_names
from specbench.reporting.text_formats import render
from specbench.runs.compiler import missing
from specbench.runs.plan import Plan, make_plan
from specbench.runs.preparation import shared_window
from specbench.runs.run_progress import Reporter
from specbench.runs.runner import run_plans
from specbench.runs.settings import merge, run_settings
from specbench.system.torch_device import AUTO, chosen_device

# The papers' distance threshold applies to another codebook; with this one it would leave clusters of one token.
_GSD = "gsd:G=10,d=inf"
SHOWN = ("ar", "jacobi", "sjd", _GSD)
_TUNED, _WINDOWS = "sjd", (4, 8, 16)
"""The decoder that chooses the window of all these, and the windows it chooses from."""
_WITH_HEAD = "vertical:siblings=1"
"""The decoder with a draft head, a chain as SJD's is. It chooses its own window: its drafts cost more."""
THREADS = 1  # a model this small gains little from more threads, and is slowed down when other processes use the cores
PICTURE, TABLES = "grid.png", "report.md"


def demo(
    out: str | Path = "results/demo",
    limit: int = 8,
    compile: str = AUTO,
    reporter: Reporter | None = None,
    score_reporter: scoring.ScoreReporter | None = None,
) -> list[dict]:
    """Compare decoders on the embedded model, with the windows that are the fastest here (`specbench demo`).

    Args:
        out: folder of the runs, `report.md` and `grid.png`.
        limit: number of prompts of the set `shapes`.
        compile: whether to compile the steps, "on" or "off"; "auto": where a compiler is there, because over an eager
            AR a speed-up says little.
        reporter, score_reporter: receive progress; silent if None.

    Returns:
        One dict per run, with the columns of `report`.

    Raises:
        SpecbenchError: an image failed, the run was interrupted, or `out` cannot be written.
    """
    out, reporter = Path(out), reporter or Reporter()
    steps = "on" if compile == AUTO and missing(chosen_device(AUTO)) is None else compile
    flags = {"threads": THREADS, "limit": limit, "compile": steps, "out": str(out)}
    window, head_window = (
        shared_window(_plan(flags | {"decoder": [name]}), _WINDOWS, reporter) for name in (_TUNED, _WITH_HEAD)
    )
    decoders = [*SHOWN, f"{_WITH_HEAD},window={head_window}"]
    summary = run_plans(_plan(flags | {"decoder": decoders, "window": window}), reporter)
    if problem := summary.problem():
        raise problem
    scoring.score(summary.folders, reporter=score_reporter).check()
    rows = report_rows(summary.folders)
    write_pictures({name: row.folder for name, row in unique_names(rows).items()}, out / PICTURE)
    (out / TABLES).write_text(render(rows, everything=True, explain=True))
    return [record(row) for row in rows]


def _plan(flags: Mapping[str, object]) -> Plan:
    return make_plan(merge(run_settings(), flags | {"baseline": 0}, env={}))
