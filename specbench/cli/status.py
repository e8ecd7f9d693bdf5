"""Command `specbench status`: how far runs are."""

from __future__ import annotations

import typer

from specbench.cli.commands import help_of
from specbench.cli.options import Json, Out, Runs
from specbench.cli.output import print_json, print_table
from specbench.system import console

_HELP = help_of(
    "status",
    "Another terminal, workers, a cluster or shards may be decoding; nothing is written. A run is silent where nothing "
    "was stored for a minute and for the time of ten images: its process may have been killed.",
)


def add_to(app: typer.Typer) -> None:
    app.command(name="status", help=_HELP, epilog="Each two seconds: watch specbench status")(status)


def status(runs: Runs = None, out: Out = "results", json: Json = False) -> None:
    from specbench.reporting import status as found

    rows = found.status(out, runs or ())
    if json:
        return print_json(rows)
    if console.is_terminal():
        screen = console.stdout()
        return screen.print(found.status_table(rows, screen.width))
    print_table([found.status_line(row) for row in rows], found.STATUS_COLUMNS)
