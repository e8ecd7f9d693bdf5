"""`specbench demo`."""

from __future__ import annotations

from pathlib import Path

import typer

from specbench.cli.options import flags, print_json, print_table
from specbench.runs.settings import JSON, QUIET, Setting, merge
from specbench.specs.components import Option
from specbench.system import console

_LIMIT = Setting(Option("limit", 8, "how many prompts", minimum=1), "What to run", "N")
_OUT = Setting(Option("out", "results/demo", "where its runs, table and picture go"), "Output", "DIR")
_SETTINGS = (_LIMIT, _OUT, QUIET, JSON)
_HELP = "Compare decoders on the embedded model, here and now: run, score, a table, a picture. Takes a few minutes."


def add_to(app: typer.Typer) -> None:
    app.command(name="demo", help=_HELP, epilog="The same by hand: specbench run, then score, then report")(demo)


@flags(_SETTINGS)
def demo(flags: dict) -> None:
    values = merge(_SETTINGS, flags)
    from specbench import demo as show
    from specbench.runs.runner import SilentReporter

    out = Path(str(values["out"].value))
    quiet = bool(values["quiet"].value)
    rows = show.demo(out, int(values["limit"].value), SilentReporter() if quiet else console.ProgressReporter())
    if values["json"].value:
        return print_json(rows)
    table = show.headline(rows)
    print_table(table, list(table[0]))
    print(f"\n{out / show.PICTURE}")
    if not quiet:
        show.say_what_next(out, rows)
