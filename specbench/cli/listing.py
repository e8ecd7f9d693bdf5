"""`specbench list`: models, decoders, metrics, prompts, tables, runs. Reads names and small files only."""

from __future__ import annotations

from pathlib import Path

import typer

from specbench.cli.options import flags, print_json, print_table
from specbench.errors import SpecbenchError, unknown_name
from specbench.metrics import catalog as metric_catalog
from specbench.runs.settings import JSON, OUT, merge
from specbench.specs.components import CHOICES
from specbench.specs.presets import PRESETS, resolve
from specbench.system import console, plugins

_SETTINGS = (OUT, JSON)


def add_to(app: typer.Typer) -> None:
    app.command(
        name="list", help="List what there is: models, decoders, metrics, prompt sets, the papers' tables, runs."
    )(list_things)


@flags(_SETTINGS)
def list_things(
    flags: dict, kind: str = typer.Argument(metavar="WHAT", help="models, decoders, metrics, prompts, tables or runs.")
) -> None:
    values = merge(_SETTINGS, flags)
    if kind not in _LISTS:
        raise unknown_name("thing to list", kind, _LISTS)
    rows, columns = _LISTS[kind](Path(str(values["out"].value)))
    if values["json"].value:
        print_json(rows)
    else:
        print_table(rows, columns)


def decoders(_out: Path):
    rows = []
    for name, preset in PRESETS.items():
        spec = resolve(name)
        rows.append(
            {
                "name": name,
                "lossless": spec.lossless,
                "summary": preset.summary,
                "options": dict(spec.options),
                "choices": {kind: getattr(spec, kind) for kind in CHOICES},
                "paper": preset.paper,
                "equation": preset.equation,
            }
        )
    return rows, ("name", "lossless", "summary", "options")


def models(_out: Path):
    from specbench.models import catalog

    rows = [
        {
            "name": name,
            "height": info.resolution[0],
            "width": info.resolution[1],
            "tokens": info.tokens,
            "parameters_b": info.parameters and float(f"{info.parameters / 1e9:.3g}"),
            "memory_gib": None if info.memory_bytes() is None else float(f"{info.memory_bytes() / 2**30:.3g}"),
            "step_bytes": info.step_bytes(),
            "kv_bytes_per_token": info.kv_bytes(),
            "on_disk": info.ready,
            "licence": info.licence,
            "hub_id": info.hub_id,
            "summary": info.summary,
        }
        for name, info in catalog.models().items()
    ]
    columns = ("name", "height", "width", "tokens", "parameters_b", "memory_gib", "on_disk", "hub_id", "licence")
    return rows, columns


def metrics(_out: Path):
    plugged = {name: (point.value, "a plug-in") for name, point in plugins.plugins("metrics").items()}
    known = plugged | metric_catalog.METRICS
    rows = [{"name": name, "summary": known[name][1], "target": known[name][0]} for name in sorted(known)]
    return rows, ("name", "summary")


def prompts(_out: Path):
    from specbench import prompts as sets

    rows = [_public_row(name) for name in sets.public_names()]
    for name in sorted(set(sets.names()) - set(sets.public_names())):
        found = sets.load_prompts(name)
        categories = sorted({prompt.category for prompt in found.prompts if prompt.category})
        rows.append(
            {
                "name": name,
                "prompts": len(found.prompts),
                "on_disk": True,
                "categories": categories,
                "sha256": found.sha256,
            }
        )
    return sorted(rows, key=lambda row: row["name"]), ("name", "prompts", "on_disk", "categories", "licence")


def _public_row(name: str) -> dict:
    from specbench.prompts import public

    found, category = public.find(name)
    share = len(found.categories) if category else 1
    return {
        "name": name,
        "prompts": found.prompts // share,
        "on_disk": not found.missing,
        "categories": [category] if category else list(found.categories),
        "licence": found.licence,
        "summary": found.summary,
        "page": found.page,
    }


def tables(_out: Path):
    from specbench.papers.table_files import load_tables, papers

    rows = []
    for table in load_tables():
        cases = table.cases()
        rows.append(
            {
                "name": table.name,
                "source": table.source,
                "title": table.title,
                "rows": len(table.rows),
                "runnable": sum(row.why is None for row in table.rows),
                "models": sorted({case.model for case in cases}),
                "prompts": sorted({case.prompts for case in cases if case.prompts}),
                "metrics": table.metrics(),
                "hardware": table.hardware,
                "paper": papers()[table.paper]["title"],
            }
        )
    return rows, ("name", "source", "rows", "models", "prompts", "title")


def runs(out: Path):
    from specbench.store.run_folders import read_info, runs_in

    rows = []
    for folder in runs_in(out):
        try:
            spec = read_info(folder)["spec"]
        except SpecbenchError as error:
            console.warn(error.what)
            continue
        rows.append(
            {
                "name": folder.name,
                "model": spec["model"],
                "decoder": spec["decoder"]["name"],
                "options": spec["decoder"]["options"],
                "prompts": spec["prompts"],
                "seed": spec["seed"],
                "images": sum(1 for _ in (folder / "images").glob("*.png")),
            }
        )
    return rows, ("name", "model", "decoder", "options", "prompts", "seed", "images")


_LISTS = {
    "models": models,
    "decoders": decoders,
    "metrics": metrics,
    "prompts": prompts,
    "tables": tables,
    "runs": runs,
}
