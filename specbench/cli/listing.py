"""`specbench list` (reads only names and small files), `specbench fetch` and `specbench prompts show`."""

from collections.abc import Sequence
from pathlib import Path
from textwrap import wrap
from typing import Any

from rich.text import Text

from specbench.cli.commands import ADDERS, COMMANDS, CommandLine, command
from specbench.cli.options import Json, Out, Quiet, argument, flags, option, protocol_option, switch
from specbench.cli.output import print_json, print_table
from specbench.errors import SpecbenchError
from specbench.runs.settings import merge, names_with, run_settings
from specbench.specs.options import Use
from specbench.system import console

_COLUMNS = {
    "models": ("name", "height", "width", "tokens", "parameters_b", "memory_gib", "on_disk", "hub_id", "licence"),
    "decoders": ("name", "lossless", "summary", "options", "paper"),
    "metrics": ("name", "summary"),
    "prompts": ("name", "prompts", "on_disk", "categories", "licence"),
    "tables": ("name", "source", "rows", "models", "prompts", "title"),
    "runs": ("name", "model", "source", "decoder", "differs", "prompts", "seed", "images"),
}
"""Printed columns of each kind; --json prints all columns."""


@command("list")
def list_things(
    kind: str = argument("WHAT", f"One of {', '.join(_COLUMNS)}."),
    name: str | None = argument(
        "NAME", "List only this item; for a decoder, also its options with values and sources.", None
    ),
    model: str = option("--model", "NAME", "Model for which a decoder's options are listed.", "shapes"),
    out: str = Out,
    json: bool = Json,
) -> None:
    from specbench.papers.listing import available, kind_named

    kind = kind_named(kind)
    rows = available(kind, out, console.warn, name, model)
    if json:
        return print_json(rows)
    if name is not None and kind == "prompts":
        print_table(rows, ("name", "prompts", "on_disk", "summary", "licence", "page"))
        what = "Its prompts: specbench prompts show" if rows[0]["on_disk"] else "Not on this disk: specbench fetch"
        return console.say(f"{what} {rows[0]['name']}")
    if name is not None and kind == "decoders":
        from specbench.specs.presets import PRESETS, decoder_name, resolve

        preset = PRESETS.get(decoder_name(name.partition(":")[0]))
        if preset is not None and console.is_terminal():
            lines = (f"{preset.name}: {preset.summary}", f"paper: {preset.paper}", f"equation: {preset.equation}", "")
            console.stdout().print(*map(Text, lines), sep="\n")
        print_table(rows, ("name", "value", "source", "published"))
        if preset is not None:
            console.say(f"{preset.name} is {'lossless' if resolve(preset.name).lossless else 'lossy'} by default.")
        return None
    if kind == "decoders" and console.is_terminal():
        return _print_decoders(rows)
    columns = _COLUMNS[kind]
    print_table(rows, [column for column in columns if column != "source" or any(row.get("source") for row in rows)])


def _print_decoders(rows: Sequence[dict[str, Any]]) -> None:
    """Print decoders in groups: lossless, lossy, with a trained head, and as released by the authors."""
    from specbench.specs.presets import PRESETS

    screen, groups = console.stdout(), dict[tuple[bool, bool, bool], list[tuple[str, str]]]()
    for row in rows:
        released = PRESETS[row["name"]].released
        group = released, not released and "head" in row["options"], not released and not row["lossless"]
        groups.setdefault(group, []).append((row["name"], row["summary"]))
    width = max(len(row["name"]) for row in rows)
    for released, head, lossy in sorted(groups):
        kind = "As released by the authors" if released else "Lossy" if lossy else "Lossless"
        screen.print(Text(f"{kind}{', with a trained head' * head}", style="bold"))
        for name, summary in groups[released, head, lossy]:
            lines = wrap(summary, screen.width - width - 4) or [""]
            screen.print(Text(f"  {name:{width}}  {lines[0]}"))
            screen.print(*(Text(" " * (width + 4) + line) for line in lines[1:]), sep="\n", end="\n" * (len(lines) > 1))
    heads = next(row["published_heads"] for row in rows if row["published_heads"])
    console.say(f"Published heads: {', '.join(f'{repo} ({model})' for model, repo in heads.items())}")
    console.say("Options, paper and equation of a decoder: specbench list decoders sjd")


@command(
    "fetch",
    "NAME: a model, a paper's table (its models, prompts and metrics), a prompt set, a metric, or a repository or file "
    "of weights. 'run', 'bench' and 'score' download missing files by themselves.",
)
def fetch(
    names: list[str] | None = argument("NAME", "Models, prompt sets or metrics to download.", None, show_default=False),
    metric: list[str] | None = option("--metric", "NAME", "Also download this metric; may be repeated."),
    protocol: str | None = protocol_option("The metrics"),
    source: Path | None = option(
        "--from", "PATH", "Use this local copy of a prompt set or, with --images, of its images, instead of a download."
    ),
    images: bool = switch("--images", "Also download the reference images of a prompt set."),
    scores: bool = switch("--scores", "With a model: also download the networks of its metrics."),
    quiet: bool = Quiet,
    json: bool = Json,
) -> None:
    if not (names or metric or protocol):
        raise SpecbenchError("nothing to fetch", "name a model, a table or a prompt set: specbench fetch janus")
    if source:
        from specbench.prompts import fetch_prompts

        if not names or len(names) > 1:
            raise SpecbenchError("--from requires one prompt set", "write for example: fetch coco --from COPY")
        return print(fetch_prompts(names[0], images, source))
    from specbench.papers import downloads

    rows = downloads.fetch(names or (), metric or (), protocol, images, scores)
    if json:
        return print_json(rows)
    asked = ", ".join([*(names or ()), *(metric or ()), *([f"protocol {protocol}"] if protocol else [])])
    if not quiet:
        console.say(f"{asked}: complete on this disk")
    for folder in dict.fromkeys(str(row["folder"]) for row in rows):
        print(folder)


_DRAWING = run_settings({"prompt-column", *names_with(Use.DRAWING)})
_prompts = CommandLine(help=COMMANDS["prompts"][1], no_args_is_help=True)
_prompts.callback()(lambda: None)
ADDERS["prompts"] = lambda app: app.add_typer(_prompts, name="prompts")


@_prompts.command(name="show", help="Print the prompts of a set or file that a run with these options would decode.")
@flags(_DRAWING)
def show(
    flags: dict[str, object], name: str = argument("NAME|FILE", "Prompt set, or file with prompts."), json: bool = Json
) -> None:
    from specbench import api

    asked = merge(_DRAWING, flags)
    rows = api.show_prompts(
        name, asked.limit, asked.offset, asked.sample, asked.per_category, asked.category, asked.ids,
        asked.prompt_column,
    )  # fmt: skip
    if json:
        return print_json(rows)
    print_table([row | {"text": " ".join(str(row["text"]).split())} for row in rows], ("id", "category", "text"))
