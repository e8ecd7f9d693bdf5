"""Command `specbench list`: models, decoders, metrics, prompts, tables, runs. Reads names and small files only."""

from __future__ import annotations

from typing import Annotated

import typer

from specbench.cli import completion
from specbench.cli.commands import help_of
from specbench.cli.options import Json, Out, model_option
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
_OF_DECODER = ("name", "value", "source", "published")
_Kind = Annotated[
    str,
    typer.Argument(metavar="WHAT", help=f"One of {', '.join(_COLUMNS)}.", autocompletion=completion.of(*_COLUMNS)),
]

_Name = Annotated[
    str | None,
    typer.Argument(
        metavar="NAME", help="A decoder: list its options, with value and source.", autocompletion=completion.decoders
    ),
]
_Model = Annotated[str, model_option("Model that the decoder's options are for.")]


def add_to(app: typer.Typer) -> None:
    app.command(name="list", help=help_of("list"))(list_things)


def list_things(
    kind: _Kind, name: _Name = None, model: _Model = "shapes", out: Out = "results", json: Json = False
) -> None:
    from specbench.papers.listing import available

    rows = available(kind, out, console.warn, name, model)
    if json:
        print_json(rows)
    elif name is not None:
        print_table(rows, _OF_DECODER)
    else:
        empty = () if any(row.get("source") for row in rows) else ("source",)
        print_table(rows, [column for column in _COLUMNS[kind] if kind != "runs" or column not in empty])
