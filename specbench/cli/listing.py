"""Command `specbench list`: models, decoders, metrics, prompts, tables, runs. Reads names and small files only."""

from __future__ import annotations

from typing import Annotated

import typer

from specbench.cli import completion
from specbench.cli.commands import help_of
from specbench.cli.options import Json, Out
from specbench.cli.output import print_json, print_table
from specbench.system import console

# Imports inside functions: each command waits only for what it needs, `--help` and completion for nothing.

_COLUMNS = {
    "models": ("name", "height", "width", "tokens", "parameters_b", "memory_gib", "on_disk", "hub_id", "licence"),
    "decoders": ("name", "lossless", "summary", "options", "paper"),
    "metrics": ("name", "summary"),
    "prompts": ("name", "prompts", "on_disk", "categories", "licence"),
    "tables": ("name", "source", "rows", "models", "prompts", "title"),
    "runs": ("name", "model", "source", "decoder", "options", "prompts", "seed", "images"),
}
"""Columns shown of each kind; --json has them all."""
_Kind = Annotated[
    str,
    typer.Argument(metavar="WHAT", help=f"One of {', '.join(_COLUMNS)}.", autocompletion=completion.of(*_COLUMNS)),
]


def add_to(app: typer.Typer) -> None:
    app.command(name="list", help=help_of("list"))(list_things)


def list_things(kind: _Kind, out: Out = "results", json: Json = False) -> None:
    from specbench.papers.listing import available

    rows = available(kind, out, console.warn)
    if json:
        print_json(rows)
    else:
        empty = () if any(row.get("source") for row in rows) else ("source",)
        print_table(rows, [column for column in _COLUMNS[kind] if kind != "runs" or column not in empty])
