"""`specbench export` and `specbench import`: images out to the official programs of GenEval and T2I-CompBench++, and
their verdicts back in."""

from __future__ import annotations

from pathlib import Path

import typer

from specbench.cli.options import flags, print_json, print_table
from specbench.errors import SpecbenchError, unknown_name
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
    from specbench.metrics.official_exchange import export_compbench, export_geneval

    write = {"geneval": export_geneval, "t2i-compbench": export_compbench}[benchmark]
    try:
        count = write(folder, to)
    except OSError as error:
        raise SpecbenchError(f"cannot write to {to}: {error.strerror or error}") from error
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
    from specbench.metrics import scoring
    from specbench.metrics.official_exchange import OfficialCompBench, OfficialGenEval
    from specbench.metrics.score_store import read_scores

    images = scoring.run_images(folder)
    if benchmark == "geneval":
        metric = OfficialGenEval(results)
    else:
        metric = OfficialCompBench(results, 1 + int(images.rows["sample"].max()))
    outcome = scoring.score_with(images, metric)
    if outcome.skipped:
        raise SpecbenchError(f"the results cannot be scores of {outcome.run_id}: {outcome.skipped}")
    rows = [
        {"run_id": images.name, **row} for row in read_scores(folder) if row["metric"].partition(":")[0] == metric.name
    ]
    print_json(rows) if merge(_SETTINGS, flags)["json"].value else print_table(
        rows, ("run_id", "metric", "value", "low", "high", "n")
    )


def _run(flags: dict, benchmark: str, run: str) -> Path:
    if benchmark not in _BENCHMARKS:
        raise unknown_name("benchmark", benchmark, _BENCHMARKS)
    from specbench.store.run_folders import find_runs

    return find_runs(str(merge(_SETTINGS, flags)["out"].value), [run])[0]
