"""Commands `specbench pack` and `specbench verify`: runs in one file, to be sent."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from specbench.cli import completion
from specbench.cli.commands import help_of
from specbench.cli.options import Json, Out, Runs, option, switch
from specbench.cli.output import print_json, print_table, print_written
from specbench.errors import GATE, SpecbenchError, unknown_name
from specbench.system import console

_PICTURES = ("png", "jpeg", "none")


def add_to(app: typer.Typer) -> None:
    app.command(name="pack", help=help_of("pack"), epilog="Commands read FILE.zip where they read a run.")(pack)
    app.command(name="verify", help=help_of("verify"))(verify)


def pack(
    runs: Runs = None,
    to: Annotated[Path, option("--to", "FILE.zip", "File to write.")] = Path("runs.zip"),
    pictures: Annotated[
        str,
        option("--pictures", "KIND", "png, jpeg (smaller) or none.", autocompletion=completion.of(*_PICTURES)),
    ] = "png",
    out: Out = "results",
) -> None:
    if pictures not in _PICTURES:
        raise unknown_name("kind of pictures", pictures, _PICTURES)
    from specbench.store import packed
    from specbench.store.run_folders import find_runs

    folders = find_runs(out, runs or ())
    parts = packed.pack(folders, to, pictures)
    console.say(f"{len(folders)} run{'s' if len(folders) > 1 else ''}, {parts} parts, {to.stat().st_size / 1e6:.1f} MB")
    print_written(to)


def verify(
    file: Annotated[Path, typer.Argument(metavar="FILE", help="File of specbench pack.")],
    recompute: Annotated[bool, switch("--recompute", "Take p from the model instead of the recorded values.")] = False,
    device: Annotated[str, option("--device", "DEVICE", "With --recompute: torch device.")] = "cpu",
    json: Json = False,
) -> None:
    from specbench.checks import verify as checks

    rows = checks.verify(file, recompute, device)
    print_json(rows) if json else print_table(rows, ("run", "check", "status", "detail"))
    if wrong := [row for row in rows if row["status"] == checks.WRONG]:
        raise SpecbenchError(f"{len(wrong)} of {len(rows)} checks failed: {wrong[0]['detail']}", exit_code=GATE)
