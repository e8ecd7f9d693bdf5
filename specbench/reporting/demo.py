"""Demonstration on the embedded model: decode, score and report a few prompts with several decoders."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

from specbench.metrics import scoring
from specbench.reporting.picture_figures import write_pictures
from specbench.reporting.report_rows import report_rows
from specbench.reporting.row import record, unique_names
from specbench.reporting.text_formats import ReportOptions, report_markdown
from specbench.runs.compiler import missing
from specbench.runs.plan import Plan, make_plan
from specbench.runs.run_progress import Reporter
from specbench.runs.runner import run_plans
from specbench.runs.settings import merge, run_settings
from specbench.system.console import counted
from specbench.system.torch_device import AUTO, chosen_device

_WINDOW = 8
"""Window of all decoders, so that their forwards have the same shape. For the decoder with a head, this window is the
fastest on average over AVX-512 and AVX2 (`results/speed/README.md`)."""
HEAD = "vertical:siblings=1"  # The decoder with a draft head; with one sibling, its draft is a chain as in SJD
# d=inf: the papers' distance threshold is for another codebook; here it would give clusters of a single token.
SHOWN = ("ar", "sjd", "gsd:G=10,d=inf", HEAD)
THREADS = 1  # more threads gain little for a model of this size, and slow it down if other processes use the cores
PICTURE, TABLES, FIRST = "grid.png", "report.md", "first-look"
_FIRST_IMAGES = 2  # images of AR and of the decoder with a head, decoded eagerly before compilation starts


def demo(
    out: str | Path = "results/demo",
    limit: int = 8,
    compile: str = AUTO,
    reporter: Reporter | None = None,
    score_reporter: scoring.ScoreReporter | None = None,
    tell: Callable[[str], object] = lambda line: None,
) -> list[dict[str, object]]:
    """Compare decoders on the embedded model (`specbench demo`).

    Args:
        out: folder of the runs, `report.md` and `grid.png`.
        limit: number of prompts of the set `shapes`.
        compile: "on" or "off"; "auto" compiles the steps if a compiler is installed, because a speed-up over eager AR
            is misleading.
        reporter, score_reporter: receive progress; silent if None.
        tell: called with a line about two images that are decoded before the compilation.

    Returns:
        One dict per run, with the columns of `report`.

    Raises:
        SpecbenchError: an image failed, the run was interrupted, or `out` cannot be written.
    """
    out, reporter = Path(out), reporter or Reporter()
    steps = "on" if compile == AUTO and missing(chosen_device(AUTO)) is None else compile
    flags: dict[str, Any] = {"threads": THREADS, "window": _WINDOW, "out": str(out)}
    if steps == "on" and not (out / PICTURE).exists():
        tell(_first_look(out, flags, min(limit, _FIRST_IMAGES)))
    summary = run_plans(_plan(flags | {"decoder": [*SHOWN], "limit": limit, "compile": steps}), reporter)
    if problem := summary.problem():
        raise problem
    scoring.score(summary.folders, reporter=score_reporter).check()
    rows = report_rows(summary.folders)
    write_pictures({name: row.folder for name, row in unique_names(rows).items()}, out / PICTURE)
    (out / TABLES).write_text(report_markdown(rows, ReportOptions(everything=True, explain=True)))
    return [record(row) for row in rows]


def _first_look(out: Path, flags: dict[str, Any], limit: int) -> str:
    """Decode `limit` prompts eagerly with AR and with `HEAD`. Return a line on speed and image files."""
    eager = {"decoder": ["ar", HEAD], "limit": limit, "compile": "off", "out": str(out / FIRST)}
    rows = report_rows(run_plans(_plan(flags | eager), Reporter()).folders)
    write_pictures({name: row.folder for name, row in unique_names(rows).items()}, out / PICTURE)
    gain = record(rows[-1])["speedup"]
    fast = f"{HEAD} is {gain:.1f} times as fast as AR, both" if gain else "pictures of AR and a draft head,"
    return f"First look, {counted(limit, 'prompt')}: {fast} not compiled yet: {out / PICTURE}"


def _plan(flags: dict[str, Any]) -> Plan:
    return make_plan(merge(run_settings(), flags | {"baseline": 0}, env={}))
