"""`specbench merge`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from specbench.cli.commands import help_of
from specbench.cli.options import Json, Out, Quiet
from specbench.cli.output import print_json
from specbench.errors import PARTIAL, SpecbenchError
from specbench.system import console

_Shards = Annotated[
    list[Path] | None,
    typer.Argument(metavar="DIR", help="Results folders of shards.", show_default="every shard-*-of-* in --out"),
]
_HELP = help_of(
    "merge",
    "Rows and images are copied into --out; the shards are not changed. Merging again copies only what is new.",
)


def add_to(app: typer.Typer) -> None:
    app.command(name="merge", help=_HELP, epilog="Then: specbench score, specbench report")(merge)


def merge(folders: _Shards = None, out: Out = "results", quiet: Quiet = False, json: Json = False) -> None:
    from specbench.store.merge_shards import incomplete_shards, merge_runs, shards_in
    from specbench.store.run_folders import same_but_for_threads
    from specbench.store.run_info import read_info

    merged = merge_runs(folders or (), out)
    for text in same_but_for_threads({one.folder.name: read_info(one.folder).spec.identity() for one in merged}):
        console.warn(text)
    if not quiet:
        for one in merged:
            console.say(f"{one.folder.name}: images copied: {one.copied}, in all: {one.rows}")
    if json:
        print_json(
            [{"run_id": m.folder.name, "folder": m.folder, "copied": m.copied, "images": m.rows} for m in merged]
        )
    for one in () if json else merged:
        print(one.folder)
    if missing := incomplete_shards(folders or shards_in(out)):
        advice = "what is there is merged; run these again, then merge again"
        raise SpecbenchError("; ".join(missing), advice, PARTIAL)
