"""Command `specbench demo`: decode, score and report a few prompts with several decoders on the embedded model."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import typer

from specbench.cli.options import flags, print_json, print_table
from specbench.runs.settings import JSON, QUIET, Setting, merge, run_settings
from specbench.specs.options import Option
from specbench.system import console

if TYPE_CHECKING:
    from specbench.runs.runner import Reporter

# The papers' distance threshold applies to another codebook; with this one it would leave clusters of one token.
GSD = "gsd:G=10,d=inf"
DECODERS = ("ar", "jacobi", "sjd", "sjd++", GSD, "scd-mc", "scd-gs", "predictive")
WINDOW = 16
THREADS = 1  # a model this small gains little from more threads, and is slowed down when other processes use the cores
PICTURE, TABLES = "grid.png", "report.md"

_LIMIT = Setting(Option("limit", 8, "number of prompts", minimum=1), "What to run", "N")
_OUT = Setting(Option("out", "results/demo", "folder of the runs, the table and the image grid"), "Output", "DIR")
_SETTINGS = (_LIMIT, _OUT, QUIET, JSON)
_HELP = "Compare decoders on the embedded model: run, score, print a table, draw an image grid. Takes a few minutes."


def add_to(app: typer.Typer) -> None:
    app.command(
        name="demo", help=_HELP, epilog="The same step by step: specbench run, specbench score, specbench report"
    )(demo)


@flags(_SETTINGS)
def demo(flags: dict) -> None:
    values = merge(_SETTINGS, flags)
    from specbench.runs.runner import SilentReporter

    out = Path(str(values["out"].value))
    quiet = bool(values["quiet"].value)
    rows = run_demo(out, int(values["limit"].value), SilentReporter() if quiet else console.ProgressReporter())
    if values["json"].value:
        return print_json(rows)
    table = headline(rows)
    print_table(table, list(table[0]))
    print(f"\n{out / PICTURE}")
    if not quiet:
        say_what_next(out, rows)


def run_demo(out: Path, limit: int, reporter: Reporter) -> list[dict]:
    """Run, score and report; writes `grid.png` and `report.md` to `out`.

    Args:
        limit: number of prompts of the set `shapes`.

    Returns:
        The report rows.
    """
    from specbench import api, reporting
    from specbench.reporting.contact_sheet import contact_sheet
    from specbench.runs.execute import execute
    from specbench.runs.plan import make_plan

    flags = {"decoder": list(DECODERS), "window": WINDOW, "threads": THREADS, "limit": limit, "out": str(out)}
    summary = execute(make_plan(merge(run_settings(), flags, env={})), reporter)
    if problem := summary.problem():
        raise problem
    reporter.note("scoring the images")
    names = [folder.name for folder in summary.folders]
    api.score(names, out=out)
    rows = api.report(names, out=out)
    contact_sheet(summary.folders, out / PICTURE)
    (out / TABLES).write_text(reporting.render(rows))
    return rows


def headline(rows: Sequence[Mapping]) -> list[dict[str, str]]:
    """Select and format the main columns of the report, one row per run."""
    metrics = dict.fromkeys(score["metric"] for row in rows for score in row["scores"] if ":" not in score["metric"])
    return [_headline(row, list(metrics)) for row in rows]


def _headline(row: Mapping, metrics: Sequence[str]) -> dict[str, str]:
    from specbench.reporting.columns import MISSING, between, number

    low, high = row["speedup_low"], row["speedup_high"]
    interval = MISSING if low is None else between(low, high)
    values = {score["metric"]: _with_interval(score) for score in row["scores"]}
    return {
        "decoder": row["decoder"],
        "lossless": "yes" if row["lossless"] else "no",
        "steps": number(row["nfe"], 0),
        "tokens per step": number(row["step_compression"]),
        "window cost": number(row["window_cost"]),
        "overhead": number(row["overhead"]),
        "speed-up": number(row["speedup"]),
        "95 %": interval,
        **{metric.replace("-", " "): values.get(metric, MISSING) for metric in metrics},
    }


def _with_interval(score: Mapping) -> str:
    """Format a score with its 95 % interval."""
    from specbench.reporting.columns import between, number

    text = number(score["value"])
    return text if score["low"] is None else f"{text} [{between(score['low'], score['high'])}]"


def say_what_next(out: Path, rows: Sequence[Mapping]) -> None:
    """Print the notes of the scores, and where to find the full report."""
    for warning in dict.fromkeys(f"{s['metric']}: {s['note']}" for row in rows for s in row["scores"] if s["note"]):
        console.say(warning)
    console.say(f"Full report with the definition of every number: {out / TABLES}")
    console.say("Next: specbench run --help")
