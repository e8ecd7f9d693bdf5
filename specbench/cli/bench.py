"""`specbench bench`, and papers' tables for `specbench report` and `specbench list`."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.console import Console

from specbench.cli import options as opt
from specbench.cli.commands import command
from specbench.cli.output import print_json, write_or_print
from specbench.errors import MISSING_PREREQUISITE, SpecbenchError
from specbench.runs.settings import check_environment, merge, run_settings
from specbench.specs.options import Use, split_list
from specbench.system import console
from specbench.system.table_formats import formats_with

if TYPE_CHECKING:
    from specbench.papers.join import PaperTable
    from specbench.papers.table import Table

_SETTINGS = run_settings(use=Use.TABLES)


@command(
    "bench",
    "Images and scores in the results folder are not computed again. Rows with the same model and prompts "
    "take turns on one loaded model. Rows that cannot run on this machine are reported and left out.",
    "--model replaces the paper's model: specbench bench gsd-1 --model shapes --limit 16 runs on a laptop.",
    epilog="The tables: specbench list tables. Then: specbench report NAME",
)
@opt.flags(_SETTINGS, dict.fromkeys(("model", "prompts", "samples", "seed", "batch"), "the table's"))
def bench(
    flags: dict[str, Any],
    name: str = opt.argument("NAME", "Table or figure of 'specbench list tables', or your own file (FILE.toml)."),
    added: list[str] | None = opt.OwnRows,
    dry_run: bool = opt.dry_run_switch(),
    fmt: str | None = opt.format_option(formats_with("tables")),
    to: Path | None = opt.To,
    columns: str | None = opt.Columns,
    notes: bool = opt.Notes,
    baseline: str | None = opt.Baseline,
    caption: str | None = opt.Caption,
) -> None:
    from specbench.papers.formats import check_columns
    from specbench.papers.reproduce import check_baseline
    from specbench.papers.table_files import load_table

    check_environment()
    settings = merge(_SETTINGS, flags)
    fmt = opt.chosen_format("tables", fmt, to, settings.json)
    opt.check_latex("tables", fmt, caption, notes)
    table, runs = _with_own(load_table(name, settings.out), added or (), settings.out)
    check_columns(table, split_list(columns or ""), flags.get("model") is not None)
    if baseline:
        check_baseline(table, flags, baseline, runs)
    if dry_run:
        return _print_estimate(table, flags, settings.json)
    from specbench.metrics.base import Settings
    from specbench.papers.reproduce import bench_table
    from specbench.runs.progress_bar import ProgressReporter, ScoreProgress

    joined = bench_table(
        table,
        flags,
        settings.out,
        Settings(settings.device),
        reporter=None if settings.quiet else ProgressReporter(),
        score_reporter=None if settings.quiet else ScoreProgress(),
        warn=console.warn,
        runs=runs,
    )
    joined = _against(joined, baseline)
    print_tables([joined], fmt, to, split_list(columns or ""), notes, caption)
    if settings.shard:
        console.say("when all shards have ended: specbench merge, then this command without --shard")
    if joined.problem:
        raise joined.problem


def report_tables(
    names: Sequence[str],
    model: str | None,
    prompts: str | None,
    out: str,
    fmt: str,
    to: Path | None,
    html: Path | None,
    added: Sequence[str],
    baseline: str | None,
    columns: Sequence[str],
    notes: bool,
    caption: str | None,
) -> None:
    """Print papers' tables with the runs of the results folder, write them as an HTML page, or both."""
    from specbench.papers.reproduce import measured_table
    from specbench.papers.table_files import is_table, load_table

    joined = []
    for name in names:
        if not is_table(name):
            advice = "report takes runs or tables, not both; see: specbench list tables"
            raise SpecbenchError(f"unknown table '{name}'", advice)
        table, folders = _with_own(load_table(name, out), added, out)
        joined.append(_against(measured_table(table, model, prompts, out, folders), baseline))
        if model is None and not any(line.runs for line in joined[-1].lines):
            console.say(f"no run in {out} is of {name}; for another model or prompt set: --model, --prompts")
    if html:
        print_tables(joined, "html", html, columns, caption=caption)
    if to or not html:
        print_tables(joined, fmt, to, columns, notes, caption)
    if problem := next((table.problem for table in joined if table.problem), None):
        raise problem


def _with_own(table: Table, added: Sequence[str], out: str) -> tuple[Table, list[Path]]:
    """Add a row to the table for each decoder of `--with`. Also return the run folders that `--with` names."""
    from specbench.papers.table import with_own_rows
    from specbench.specs.presets import PRESETS
    from specbench.store.run_folders import find_runs, runs_in

    names = split_list(",".join(added))
    ids = [folder.name for folder in runs_in(Path(out))]
    others = [name for name in names if ":" not in name and name not in PRESETS]
    runs = [name for name in others if Path(name).exists() or any(run.startswith(name) for run in ids)]
    decoders = [name for name in names if name not in runs]
    return with_own_rows(table, decoders), find_runs(out, runs) if runs else []


def _against(joined: PaperTable, baseline: str | None) -> PaperTable:
    from specbench.papers.join import with_baseline

    return with_baseline(joined, baseline) if baseline else joined


def print_tables(
    joined: Sequence[PaperTable],
    fmt: str,
    to: Path | None,
    columns: Sequence[str] = (),
    notes: bool = False,
    caption: str | None = None,
) -> None:
    """Print joined tables on stdout, fitted to the width of a terminal, or write them to a file."""
    from specbench.papers.formats import only_columns
    from specbench.papers.render import render_tables

    joined = [only_columns(table, columns) for table in joined] if columns else joined
    if caption:
        joined = [replace(table, heading=caption) for table in joined]
    if to is None and fmt == "markdown" and sys.stdout.isatty():
        from specbench.papers.render import terminal

        screen = Console(highlight=False)
        for table in joined:
            screen.print(terminal(table, screen))
        return
    write_or_print(render_tables(joined, fmt, notes), to)


def _print_estimate(table: Table, flags: Mapping[str, Any], as_json: bool) -> None:
    from specbench.cli.run import print_dry_run
    from specbench.papers.planned_cells import plan_table
    from specbench.papers.reproduce import estimate, run_lines, scoring_needs, seeds_together, total

    planned = plan_table(table, flags)
    rows = estimate(table, planned, flags.get("model"))
    if not rows:
        raise SpecbenchError(f"no row of {table.name} can be run", f"specbench report {table.name} prints the reasons")
    if as_json:
        print_json(rows)
    else:
        print_dry_run(seeds_together(rows), first=("rows",), notes=("chosen",))
        if lacking := [] if flags.get("model") else scoring_needs(table):
            print("\nMissing for scores (to download files: specbench fetch):", *lacking, sep="\n")
        print("\nThese commands decode the same images, without scores and table:", *run_lines(planned), sep="\n")
        console.say(total(rows))
    if all(row["problem"] for row in rows):
        what = f"no row of {table.name} can run here"
        raise SpecbenchError(what, "see the obstacles listed above", MISSING_PREREQUISITE)
