"""`specbench demo`: several decoders over a few prompts of the embedded model, scored, as a table and a picture."""

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

# The papers' distance filter is in the units of another codebook; on this one it would leave clusters of one token.
GSD = "gsd:G=10,d=inf"
DECODERS = ("ar", "jacobi", "sjd", "sjd++", GSD, "scd-mc", "scd-gs", "predictive")
WINDOW = 16
THREADS = 1  # a model this small gains little from more, and loses much where others use the cores
PICTURE, TABLES = "grid.png", "report.md"

_LIMIT = Setting(Option("limit", 8, "how many prompts", minimum=1), "What to run", "N")
_OUT = Setting(Option("out", "results/demo", "where its runs, table and picture go"), "Output", "DIR")
_SETTINGS = (_LIMIT, _OUT, QUIET, JSON)
_HELP = "Compare decoders on the embedded model, here and now: run, score, a table, a picture. Takes a few minutes."


def add_to(app: typer.Typer) -> None:
    app.command(name="demo", help=_HELP, epilog="The same by hand: specbench run, then score, then report")(demo)


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
    """Run, score and report; leaves `grid.png` and `report.md` in `out`.

    Args:
        limit: how many prompts of the set `shapes`.

    Returns:
        The report rows.
    """
    from specbench import api, reporting
    from specbench.reporting.contact_sheet import gallery
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
    gallery(summary.folders, out / PICTURE)
    (out / TABLES).write_text(reporting.render(rows))
    return rows


def headline(rows: Sequence[Mapping]) -> list[dict[str, str]]:
    """The few columns of the report that say it all, as text: one row per run."""
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
    """A score with its 95 % interval, so that few prompts look like few prompts."""
    from specbench.reporting.columns import between, number

    text = number(score["value"])
    return text if score["low"] is None else f"{text} [{between(score['low'], score['high'])}]"


def say_what_next(out: Path, rows: Sequence[Mapping]) -> None:
    """What to beware of in the report rows, and where the rest is."""
    for warning in dict.fromkeys(f"{s['metric']}: {s['note']}" for row in rows for s in row["scores"] if s["note"]):
        console.say(warning)
    console.say(f"Everything, with the definition of every number: {out / TABLES}")
    console.say("Next: specbench run --help")
