"""Command `specbench demo`: decode, score and report a few prompts with several decoders on the embedded model."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from specbench.cli.commands import help_of
from specbench.cli.options import OUTPUT, Json, Quiet, option
from specbench.cli.output import print_json, print_table
from specbench.cli.progress import ProgressReporter
from specbench.system import console

# Imports inside functions: each command waits only for what it needs, `--help` and completion for nothing.

_Limit = Annotated[
    int, option("--limit", "N", "Number of prompts.", min=1, envvar="SPECBENCH_LIMIT", show_envvar=False)
]
_Out = Annotated[
    Path,
    option("--out", "DIR", "Folder of the runs, the table and the image grid.", envvar="SPECBENCH_OUT", **OUTPUT),
]


def add_to(app: typer.Typer) -> None:
    epilog = "The same step by step: specbench run, specbench score, specbench report"
    app.command(name="demo", help=help_of("demo"), epilog=epilog)(demo)


def demo(limit: _Limit = 8, out: _Out = Path("results/demo"), quiet: Quiet = False, json: Json = False) -> None:
    from specbench.reporting import demo as demonstration
    from specbench.reporting.answer import answer

    rows = demonstration.demo(out, limit, None if quiet else ProgressReporter())
    if json:
        return print_json(rows)
    table = demonstration.headline(rows)
    print_table(table, list(table[0]))
    print("\n" + "\n".join(answer(rows)))
    print(f"\n{out / demonstration.PICTURE}")
    if not quiet:
        for warning in dict.fromkeys(f"{s['metric']}: {s['note']}" for row in rows for s in row["scores"] if s["note"]):
            console.say(warning)
        console.say(f"Full report with the definition of every number: {out / demonstration.TABLES}")
        console.say("Next: specbench run --help")
