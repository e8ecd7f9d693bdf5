"""Command `specbench demo`: decode, score and report a few prompts with several decoders on the embedded model."""

from __future__ import annotations

from pathlib import Path

import typer

from specbench.cli.commands import help_of
from specbench.cli.options import flags, print_json, print_table
from specbench.runs.settings import JSON, QUIET, Setting, merge
from specbench.specs.options import Option
from specbench.system import console

# Imports inside functions: each command waits only for what it needs, `--help` and completion for nothing.

_LIMIT = Setting(Option("limit", 8, "number of prompts", minimum=1), "What to run", "N")
_OUT = Setting(Option("out", "results/demo", "folder of the runs, the table and the image grid"), "Output", "DIR")
_SETTINGS = (_LIMIT, _OUT, QUIET, JSON)
_HELP = help_of("demo")


def add_to(app: typer.Typer) -> None:
    app.command(
        name="demo", help=_HELP, epilog="The same step by step: specbench run, specbench score, specbench report"
    )(demo)


@flags(_SETTINGS)
def demo(flags: dict) -> None:
    values = merge(_SETTINGS, flags)
    from specbench import api
    from specbench.reporting.answer import answer
    from specbench.reporting.demo import PICTURE, TABLES, headline

    out = Path(str(values["out"].value))
    quiet = bool(values["quiet"].value)
    rows = api.demo(out, int(values["limit"].value), None if quiet else console.ProgressReporter())
    if values["json"].value:
        return print_json(rows)
    table = headline(rows)
    print_table(table, list(table[0]))
    print("\n" + "\n".join(answer(rows)))
    print(f"\n{out / PICTURE}")
    if not quiet:
        for warning in dict.fromkeys(f"{s['metric']}: {s['note']}" for row in rows for s in row["scores"] if s["note"]):
            console.say(warning)
        console.say(f"Full report with the definition of every number: {out / TABLES}")
        console.say("Next: specbench run --help")
