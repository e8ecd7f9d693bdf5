"""`specbench merge`."""

from __future__ import annotations

from pathlib import Path

import typer

from specbench.cli.commands import help_of
from specbench.cli.options import flags, print_json
from specbench.runs.settings import JSON, OUT, QUIET
from specbench.runs.settings import merge as merge_settings
from specbench.system import console

# Imports inside functions: each command waits only for what it needs, `--help` and completion for nothing.

_SETTINGS = (OUT, QUIET, JSON)
_HELP = help_of(
    "merge",
    "Rows and images are copied into --out; the shards are not changed. Merging again copies only what is new.",
)


def add_to(app: typer.Typer) -> None:
    app.command(name="merge", help=_HELP, epilog="Then: specbench score, specbench report")(merge)


@flags(_SETTINGS)
def merge(
    flags: dict,
    folders: list[Path] = typer.Argument(
        None, metavar="DIR", help="Results folders of shards.", show_default="every shard-*-of-* in --out"
    ),
) -> None:
    values = merge_settings(_SETTINGS, flags)
    from specbench import api

    merged = api.merge_runs(folders or (), str(values["out"].value))
    if not values["quiet"].value:
        for one in merged:
            console.say(f"{one.folder.name}: images copied: {one.copied}, in all: {one.rows}")
    if values["json"].value:
        return print_json(
            [{"run_id": m.folder.name, "folder": m.folder, "copied": m.copied, "images": m.rows} for m in merged]
        )
    for one in merged:
        print(one.folder)
