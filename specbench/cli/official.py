"""`specbench export` and `specbench import`: images out to the official programs of GenEval and T2I-CompBench++, and
their verdicts back in."""

from __future__ import annotations

from pathlib import Path

import typer

from specbench.cli.options import flags, print_json, print_table
from specbench.errors import unknown_name
from specbench.runs.settings import JSON, OUT, merge
from specbench.system import console

_SETTINGS = (OUT, JSON)
_BENCHMARKS = ("geneval", "t2i-compbench")
_BENCHMARK = typer.Argument(metavar="BENCHMARK", help=" or ".join(_BENCHMARKS))
_RUN = typer.Argument(metavar="RUN", help="A run id, or the start of one, or a folder.")


def add_to(app: typer.Typer) -> None:
    app.command(name="export", help="Lay a run's images out for the official program of a benchmark.")(export)
    app.command(name="import", help="Take the official program's results as scores of a run.")(import_results)


@flags(_SETTINGS)
def export(
    flags: dict,
    benchmark: str = _BENCHMARK,
    run: str = _RUN,
    to: Path = typer.Option(..., "--to", metavar="DIR", help="An empty or new folder."),
) -> None:
    folder = _run(flags, benchmark, run)
    from specbench.metrics.official_exchange import export_images

    count = export_images(benchmark, folder, to)
    console.say(f"{count} images, laid out for the official program")
    print(to)


@flags(_SETTINGS)
def import_results(
    flags: dict,
    benchmark: str = _BENCHMARK,
    run: str = _RUN,
    results: Path = typer.Option(
        ..., "--from", metavar="PATH", help="GenEval's results file, or the folder that was exported to."
    ),
) -> None:
    folder = _run(flags, benchmark, run)
    from specbench.metrics.official_exchange import import_scores

    rows = import_scores(benchmark, folder, results)
    print_json(rows) if merge(_SETTINGS, flags)["json"].value else print_table(
        rows, ("run_id", "metric", "value", "low", "high", "n")
    )


def _run(flags: dict, benchmark: str, run: str) -> Path:
    if benchmark not in _BENCHMARKS:
        raise unknown_name("benchmark", benchmark, _BENCHMARKS)
    from specbench.store.run_folders import find_runs

    return find_runs(str(merge(_SETTINGS, flags)["out"].value), [run])[0]
