"""Command `specbench prompts`: download public prompt sets, and print prompts."""

from __future__ import annotations

from pathlib import Path

import typer

from specbench.cli.options import flags, print_json, print_table
from specbench.cli.progress import transfer
from specbench.errors import SpecbenchError, unknown_name
from specbench.runs.settings import JSON, merge
from specbench.system import console

_SHOW = (JSON,)
_NAME = typer.Argument(metavar="NAME", help="Prompt set, one of 'specbench list prompts'.")


def add_to(parent: typer.Typer) -> None:
    app = typer.Typer(help="Download public prompt sets, and print prompts.", no_args_is_help=True)
    app.callback()(lambda: None)
    app.command(
        name="fetch",
        help="Download a public prompt set and verify its digests; resumes a partial download.",
    )(fetch)
    app.command(name="show", help="Print the prompts of a set or file.")(show)
    parent.add_typer(app, name="prompts")


def fetch(
    name: str = _NAME,
    source: Path = typer.Option(None, "--from", metavar="PATH", help="Import this local copy instead of downloading."),
    images: bool = typer.Option(
        False, "--images", metavar="", help="Download the reference images of the set instead."
    ),
    offline: bool = typer.Option(False, "--offline", metavar="", help="Disable downloads (also HF_HUB_OFFLINE=1)."),
) -> None:
    from specbench.prompts import names, public

    if name not in public.names():
        if name in names():
            raise SpecbenchError(f"prompts '{name}' need no download", f"specbench prompts show {name}")
        raise unknown_name("public prompt set", name, public.names())
    found, _ = public.find(name)
    if images:
        size = f", {found.images.archive.size / 1e6:.0f} MB" if found.images else ""
        licence = f": {found.images.count} images{size}; {found.images.licence}" if found.images else ""
        console.say(f"reference images of {found.name}{licence}")
        with transfer("images") as progress:
            folder = public.fetch_images(found, progress, offline, source)
    elif source is not None:
        folder = public.adopt_set(found, source)
    else:
        size = f"{found.download_size / 1e6:.0f} MB, " if found.download_size else ""
        console.say(f"{found.name}: {found.prompts} prompts ({size}{found.licence}; {found.page})")
        with transfer(found.name) as progress:
            folder = public.fetch_set(found, progress, offline)
    if not images:
        public.read_set(found)
    console.say(f"{'images' if images else 'prompts'} of {found.name} are complete")
    print(folder)


@flags(_SHOW)
def show(
    flags: dict,
    name: str = typer.Argument(metavar="NAME|FILE", help="Prompt set, or file with prompts."),
    limit: int = typer.Option(
        None, "--limit", metavar="N", help="Print only the first N prompts.", min=1, show_default="all"
    ),
) -> None:
    from specbench.prompts import load_prompts, select

    values = merge(_SHOW, flags)
    chosen = select(load_prompts(name), limit)
    rows = [vars(prompt) for prompt in chosen]
    if values["json"].value:
        print_json(rows)
    else:
        print_table([row | {"text": " ".join(row["text"].split())} for row in rows], ("id", "category", "text"))
