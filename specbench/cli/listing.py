"""Command `specbench list`: models, decoders, metrics, prompts, tables, runs. Reads names and small files only."""

from __future__ import annotations

from collections.abc import Sequence
from textwrap import wrap
from typing import Annotated

import typer
from rich.text import Text

from specbench.cli import completion
from specbench.cli.commands import help_of
from specbench.cli.options import Json, Out, model_option
from specbench.cli.output import print_json, print_table
from specbench.system import console

_COLUMNS = {
    "models": ("name", "height", "width", "tokens", "parameters_b", "memory_gib", "on_disk", "hub_id", "licence"),
    "decoders": ("name", "lossless", "summary", "options", "paper"),
    "metrics": ("name", "summary"),
    "prompts": ("name", "prompts", "on_disk", "categories", "licence"),
    "tables": ("name", "source", "rows", "models", "prompts", "title"),
    "runs": ("name", "model", "source", "decoder", "differs", "prompts", "seed", "images"),
}
"""Columns shown of each kind; --json has them all."""
_Kind = Annotated[
    str, typer.Argument(metavar="WHAT", help=f"One of {', '.join(_COLUMNS)}.", autocompletion=completion.of(*_COLUMNS))
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
    from specbench.papers.listing import available, kind_named

    kind = kind_named(kind)
    rows = available(kind, out, console.warn, name, model)
    if json:
        return print_json(rows)
    if name is not None:
        from specbench.specs.presets import PRESETS, decoder_name

        known = PRESETS.get(decoder_name(name.partition(":")[0]))
        if known is not None and console.is_terminal():
            lines = (f"{known.name}: {known.summary}", f"paper: {known.paper}", f"equation: {known.equation}", "")
            console.stdout().print(*map(Text, lines), sep="\n")
        return print_table(rows, ("name", "value", "source", "published"))
    if kind == "decoders" and console.is_terminal():
        return _print_decoders(rows)
    columns = _COLUMNS[kind]
    print_table(rows, [one for one in columns if one != "source" or any(row.get("source") for row in rows)])


def _print_decoders(rows: Sequence[dict]) -> None:
    """Decoders in groups: lossless ones, lossy ones, those with a trained head, and those as released."""
    screen, groups = console.stdout(), {}
    for row in rows:
        released = row["name"].endswith("-released")
        kind = "as released by the authors" if released else "lossless" if row["lossless"] else "lossy"
        head = ", with a trained head" if "head" in row["options"] and not released else ""
        groups.setdefault(f"{kind}{head}", []).append((row["name"], row["summary"]))
    width = max(len(row["name"]) for row in rows)
    for title in sorted(groups, key=lambda title: (title.startswith("as"), "head" in title, title.startswith("lossy"))):
        screen.print(Text(f"{title[0].upper()}{title[1:]}", style="bold"))
        for name, summary in groups[title]:
            lines = wrap(summary, screen.width - width - 4) or [""]
            screen.print(Text(f"  {name:{width}}  {lines[0]}"))
            screen.print(*(Text(" " * (width + 4) + line) for line in lines[1:]), sep="\n", end="\n" * (len(lines) > 1))
    heads = next(row["published_heads"] for row in rows if row["published_heads"])
    console.say(f"Heads that are published: {', '.join(f'{repo} ({model})' for model, repo in heads.items())}")
    console.say("Options, paper and equation of one: specbench list decoders sjd")
