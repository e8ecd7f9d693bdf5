"""Commands `specbench export` and `specbench import`: exchange with the official evaluators of GenEval,
T2I-CompBench++ and DPG-Bench."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from specbench.cli import completion
from specbench.cli.commands import help_of
from specbench.cli.options import Json, Out, Run, option
from specbench.cli.output import print_json, print_table
from specbench.errors import unknown_name
from specbench.system import console

_BENCHMARKS = ("geneval", "t2i-compbench", "dpg-bench")
_LAYOUTS = (*_BENCHMARKS, "dataset")
_Benchmark = Annotated[
    str,
    typer.Argument(
        metavar="BENCHMARK", help=f"One of {', '.join(_BENCHMARKS)}.", autocompletion=completion.of(*_BENCHMARKS)
    ),
]
_Layout = Annotated[
    str,
    typer.Argument(
        metavar="LAYOUT",
        help=f"One of {', '.join(_BENCHMARKS)}, or dataset: a folder for Hugging Face's datasets.",
        autocompletion=completion.of(*_LAYOUTS),
    ),
]
_Results = Annotated[
    Path,
    option("--from", "PATH", "Results of GenEval, exported folder of T2I-CompBench++, or _detail.txt of DPG-Bench."),
]


def add_to(app: typer.Typer) -> None:
    app.command(name="export", help=help_of("export"))(export)
    app.command(name="import", help=help_of("import"))(import_results)


def export(
    benchmark: _Layout,
    run: Run,
    to: Annotated[Path, option("--to", "DIR", "New or empty folder.")],
    out: Out = "results",
) -> None:
    folder = _run(out, benchmark, run, _LAYOUTS)
    from specbench.metrics.official_exchange import export_images

    count = export_images(benchmark, folder, to)
    console.say(f"{count} images, in the layout of {benchmark}")
    print(to)


def import_results(
    benchmark: _Benchmark, run: Run, results: _Results, out: Out = "results", json: Json = False
) -> None:
    folder = _run(out, benchmark, run)
    from specbench.metrics.official_exchange import import_scores

    rows = import_scores(benchmark, folder, results)
    print_json(rows) if json else print_table(rows, ("run_id", "metric", "value", "low", "high", "n"))


def _run(out: str, benchmark: str, run: str, known: tuple[str, ...] = _BENCHMARKS) -> Path:
    if benchmark not in known:
        raise unknown_name("benchmark", benchmark, known)
    from specbench.store.run_folders import find_run

    return find_run(out, run)
