"""Command `specbench demo`: decode, score and report a few prompts with several decoders on the embedded model."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from specbench.cli.commands import help_of
from specbench.cli.options import OUTPUT, Json, Quiet, option
from specbench.cli.output import print_json
from specbench.cli.progress import ProgressReporter, ScoreProgress
from specbench.system import console
from specbench.system.torch_device import AUTO

_Limit = Annotated[
    int, option("--limit", "N", "Number of prompts.", min=1, envvar="SPECBENCH_LIMIT", show_envvar=False)
]
_Out = Annotated[
    Path,
    option("--out", "DIR", "Folder of the runs, the table and the image grid.", envvar="SPECBENCH_OUT", **OUTPUT),
]
_Compile = Annotated[
    str, option("--compile", "WHEN", "Compile the steps: on, off, or auto: on where a compiler is there.")
]


def add_to(app: typer.Typer) -> None:
    epilog = "The same step by step: specbench run, specbench score, specbench report"
    app.command(name="demo", help=help_of("demo"), epilog=epilog)(demo)


def demo(
    limit: _Limit = 8,
    out: _Out = Path("results/demo"),
    compile: _Compile = AUTO,
    quiet: Quiet = False,
    json: Json = False,
) -> None:
    from rich.text import Text

    from specbench.reporting import demo as demonstration
    from specbench.reporting.answer import answer, disturbances
    from specbench.reporting.terminal import narrow_table

    reporters = (None, None) if quiet else (ProgressReporter(notes=False), ScoreProgress())
    if not quiet:
        console.say(
            f"{len(demonstration.DECODERS) + 1} decoders draw the same {console.counted(limit, 'caption')} with the "
            "bundled model `shapes`. Measured: how much faster each is than plain sampling (ar), and how good its "
            "images are."
        )
    rows = demonstration.demo(out, limit, compile, *reporters)
    if json:
        return print_json(rows)
    screen = console.stdout()
    screen.print(Text(), narrow_table(rows, screen.width), Text(), sep="\n")
    said = [*answer(rows)[:1], *disturbances(rows)[-1:]]
    screen.print(*(Text(line) for line in (*said, f"Images of every decoder: {out / demonstration.PICTURE}")), sep="\n")
    if not quiet:
        console.stderr().print(
            "Type next:",
            f"  specbench report --out {out} --html report.html  # plots and images",
            "  specbench list decoders",
            "  specbench run --decoder ar,sjd --limit 8",
            sep="\n",
            markup=False,
        )
