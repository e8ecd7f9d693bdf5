"""Lists of models, decoders, metrics, prompt sets, papers' tables and runs, as rows. Imports no torch."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

from specbench import names
from specbench.errors import SpecbenchError, read_name
from specbench.specs.components import CHOICES
from specbench.specs.options import plain, split_list
from specbench.specs.presets import PRESETS, published, resolve
from specbench.system import plugins
from specbench.system.json_values import nonfinite_as_text

# Imports inside functions: each list imports only what it needs.

_Rows = list[dict[str, object]]
OURS = "ours"  # Source of a value that neither papers nor released code state for the model


def available(
    kind: str,
    out: str | Path = "results",
    warn: Callable[[str], None] = lambda text: None,
    name: str | None = None,
    model: str = "shapes",
) -> _Rows:
    """List the available items of a kind (`specbench list`).

    Args:
        kind: "models", "decoders", "metrics", "prompts", "tables" or "runs".
        out: the results folder whose runs are listed.
        warn: called with a line for each damaged run.
        name: a decoder, to list its options on `model`; or another item, to list only this item (and a prompt set's
            categories).

    Returns:
        One dict per item, with its `name` first. For a decoder, one dict per option (`name, value, source`) and per
        setting that all decoders of a run share, with the value `published` for this decoder.

    Raises:
        SpecbenchError: an unknown kind, decoder or model.
    """
    kind = kind_named(kind)
    if name is not None and kind == "decoders":
        return _option_rows(name, model)
    rows = run_rows(Path(out), warn) if kind == "runs" else _ROWS[kind]()
    if name is None:
        return rows
    from specbench.prompts import set_name

    named = ("prompt set", set_name(name)) if kind == "prompts" else (kind.removesuffix("s"), name)
    shown = read_name(*named, [str(row["name"]) for row in rows])
    return [row for row in rows if row["name"] == shown or str(row["name"]).startswith(f"{shown}/")]


def kind_named(typed: str) -> str:
    """Resolve a typed kind of items; the singular is also accepted."""
    also = {kind: [kind.removesuffix("s"), f"{kind.removesuffix('s')} sets"] for kind in LISTABLE}
    if (meant := names.SYNONYMS["thing to list"].get(typed.casefold())) is not None:
        raise SpecbenchError(f"unknown thing to list '{typed}'", f"specbench list {meant}")
    return read_name("thing to list", typed, LISTABLE, also)


def decoder_rows() -> _Rows:
    from specbench.models.draft_head_files import PUBLISHED_HEADS

    specs = {name: resolve(name) for name in PRESETS}
    return [
        {
            "name": name,
            "lossless": spec.lossless,
            "summary": PRESETS[name].summary,
            "options": {**spec.options},
            "choices": {kind: getattr(spec, kind) for kind in CHOICES},
            "paper": PRESETS[name].paper,
            "equation": PRESETS[name].equation,
            "published_heads": {model: source.repo for model, source in PUBLISHED_HEADS.items()}
            if spec.head_kind == "eagle"
            else {},
        }
        for name, spec in specs.items()
    ]


def _option_rows(name: str, model: str) -> _Rows:
    """List the options of a decoder on a model, then the settings common to all decoders, with their sources."""
    from specbench.models.catalog import default_prompts, find_model
    from specbench.models.draft_head_files import published_head
    from specbench.runs.decoder_args import plan_decoders
    from specbench.runs.settings import RunSettings
    from specbench.specs.run_spec import SAMPLING

    sampling, stated = find_model(model).sampling(), published(name.partition(":")[0], model, "shared")
    rows: _Rows = []
    for planned in plan_decoders(RunSettings(decoder=tuple(split_list(name)), model=model)):
        values = nonfinite_as_text(planned.chosen | planned.spec.options)
        if values.get("head") == "" and (head := published_head(model, planned.spec.head_kind)):
            rows.append({"name": "head", "value": head, "source": "published for the model", "published": None})
            values.pop("head")
        rows += [
            {"name": key, "value": value, "source": str(planned.origins.get(key, OURS)), "published": None}
            for key, value in values.items()
        ]
    of_model = {setting.name: getattr(sampling, field) for field, setting in SAMPLING.items()}
    for key, value in {**of_model, "prompts": default_prompts(model)}.items():
        stated_text = f"{plain(stated[key].value)} ({stated[key].source})" if key in stated else None
        rows.append({"name": key, "value": value, "source": f"default of {model}", "published": stated_text})
    return rows


def model_rows() -> _Rows:
    from specbench.models import catalog
    from specbench.runs.memory_estimate import single_image_bytes

    return [
        {
            "name": name,
            "height": info.resolution[0],
            "width": info.resolution[1],
            "tokens": info.tokens,
            "parameters_b": info.parameters and float(f"{info.parameters / 1e9:.3g}"),
            "memory_gib": (need := single_image_bytes(info)) and float(f"{need / 2**30:.3g}"),
            "step_bytes": info.step_bytes(),
            "kv_bytes_per_token": info.kv_bytes(),
            "on_disk": info.ready,
            "licence": info.licence,
            "hub_id": info.hub_id,
            "summary": info.summary,
        }
        for name, info in catalog.models().items()
    ]


def metric_rows() -> _Rows:
    from specbench.metrics import catalog as metric_catalog

    by_name: dict[str, Any] = dict(metric_catalog.METRICS)
    for name, point in plugins.plugins("metrics").items():
        try:
            text = metric_catalog.metric_summary(name)
        except SpecbenchError as error:
            text = f"cannot be loaded: {error.what}"
        by_name.setdefault(name, (point.value, text))
    return [{"name": name, "summary": by_name[name][1], "target": by_name[name][0]} for name in sorted(by_name)]


def prompt_rows() -> _Rows:
    from specbench import prompts

    rows = [_public_row(name) for name in prompts.public_names()]
    for name in sorted(set(prompts.prompt_set_names()) - set(prompts.public_names())):
        prompt_set = prompts.load_prompts(name)
        categories = sorted({prompt.category for prompt in prompt_set.prompts if prompt.category})
        about = {"prompts": len(prompt_set.prompts), "on_disk": True, "categories": categories}
        rows.append({"name": name, **about, "sha256": prompt_set.sha256})
    return sorted(rows, key=lambda row: str(row["name"]))


def _public_row(name: str) -> dict[str, object]:
    from specbench.prompts import public

    prompt_set, category = public.find(name)
    return {
        "name": name,
        "prompts": prompt_set.categories[category] if category else prompt_set.prompts,
        "on_disk": not prompt_set.missing,
        "categories": [category] if category else list(prompt_set.categories),
        "licence": prompt_set.licence,
        "summary": prompt_set.summary,
        "page": prompt_set.page,
    }


def table_rows() -> _Rows:
    from specbench.papers.table_files import load_tables, papers

    return [
        {
            "name": table.name,
            "source": table.source,
            "title": table.title,
            "rows": len(table.rows),
            "runnable": sum(row.not_runnable_reason is None for row in table.rows),
            "models": sorted({cell.model for cell in table.all_settings()}),
            "prompts": sorted({cell.prompts for cell in table.all_settings() if cell.prompts}),
            "metrics": table.metrics(),
            "hardware": table.hardware,
            "paper": papers()[str(table.paper)]["title"],
        }
        for table in load_tables()
    ]


def _images(folder: Path) -> int:
    """Count the image files, which is faster than reading rows; count rows if the files were not packed."""
    if (pictures := folder / "images").is_dir():
        return sum(1 for _ in pictures.glob("*.png"))
    from specbench.store.run_store import RunStore  # imports pandas

    return sum(1 for _ in RunStore(folder).completed())


def run_rows(out: Path, warn: Callable[[str], None]) -> _Rows:
    from specbench.store.run_folders import distinctions, runs_in
    from specbench.store.run_info import read_info

    infos, images = {}, {}
    for folder in runs_in(out):
        try:
            images[folder], infos[folder] = _images(folder), read_info(folder)
        except SpecbenchError as error:
            warn(error.what)
    differing = distinctions({folder.name: info for folder, info in infos.items()})
    return [
        {
            "name": folder.name,
            "model": info.spec.model,
            "source": info.source_text,
            "decoder": info.spec.decoder.name,
            "options": nonfinite_as_text(info.spec.decoder.options),
            "differs": differing[folder.name],
            "prompts": info.spec.prompts,
            "seed": info.spec.seed,
            "images": images[folder],
        }
        for folder, info in infos.items()
    ]


_ROWS: dict[str, Callable[[], _Rows]] = {
    "models": model_rows,
    "decoders": decoder_rows,
    "metrics": metric_rows,
    "prompts": prompt_rows,
    "tables": table_rows,
}
LISTABLE = (*_ROWS, "runs")
