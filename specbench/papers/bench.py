"""Reproduce a paper's table: plan, run, score and join it. Everything behind `specbench bench`."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from specbench.papers.join import PaperTable, join
from specbench.papers.measured import find_measured
from specbench.papers.reproduce import Warn, plan_table, run_table, score_table, without_replaced_choices
from specbench.papers.substituted_model import one_row_per_run, with_bundled_scores
from specbench.papers.table import Table

if TYPE_CHECKING:
    from specbench.metrics.base import Settings
    from specbench.metrics.scoring import ScoreReporter
    from specbench.runs.run_progress import Reporter


def bench_table(
    table: Table,
    flags: Mapping[str, object],
    out: Path | str,
    scoring: Settings,
    env: Mapping[str, str] | None = None,
    reporter: Reporter | None = None,
    score_reporter: ScoreReporter | None = None,
    warn: Warn = lambda text: None,
) -> PaperTable:
    """A table with what was measured for it here; what the results folder already holds is not run again.

    Args:
        flags: by the name of a setting of `specbench run`, None means not given; a model replaces the table's own.
        scoring: how to score, see `specbench.papers.reproduce.score_table`.
        env: the environment; the process's own if None.
        warn: called with a line for each row that cannot run and each metric that cannot score.

    Raises:
        SpecbenchError: bad settings, or nothing could be run. An error after which the table can still be shown, such
            as failed images, is its `problem` instead.
    """
    planned = plan_table(table, flags, env)
    done = run_table(planned, reporter, warn)
    substituted = flags.get("model") is not None
    score_table(table, done, scoring, substituted, score_reporter, warn)
    table = without_replaced_choices(table, planned)
    if substituted:
        table = one_row_per_run(table, planned, str(flags["model"]))
        table = with_bundled_scores(table, done.folders.values())
    elsewhere = find_measured([cell for cell in planned if cell.settings in done.problems], out)
    found = {cell: folder for cell, folder in elsewhere.items() if isinstance(folder, Path)}
    return replace(join(table, done.found | found), problem=done.trouble)
