"""Downloads (`specbench fetch`) for models, papers' tables, prompt sets, metrics or hub repositories, by name."""

from collections.abc import Sequence
from contextlib import suppress

from specbench import prompts
from specbench.errors import SpecbenchError, chosen, unknown_name
from specbench.metrics import catalog as metric_catalog
from specbench.metrics.base import Settings
from specbench.metrics.published_weights import CHECKPOINTS, missing_file
from specbench.models.catalog import default_prompts, find_model, models
from specbench.models.checkpoint_files import Source, WantedFiles
from specbench.models.draft_head_files import PUBLISHED_HEADS
from specbench.models.hub_model import HubModel
from specbench.papers.planned_cells import resolve_cells
from specbench.papers.table import Table
from specbench.papers.table_files import is_table, load_table, table_names
from specbench.prompts.public import missing_set, public_sets
from specbench.runs.decoder_args import plan_decoders
from specbench.runs.plan import head_files, plan_model
from specbench.system.downloads import Download, fetch_all
from specbench.system.plugins import is_reference


def fetch(
    names: Sequence[str] = (),
    metrics: Sequence[str] = (),
    protocol: str | None = None,
    images: bool = False,
    scores: bool = False,
) -> list[dict[str, object]]:
    """Download the files that the named items need (`specbench fetch`), after a check of free disk space.

    Args:
        names: models, tables, prompt sets, metrics, hub repositories or weight files that specbench reads.
        metrics: names of metrics.
        protocol: "sjd" or "cool-sd": also the metrics of that protocol.
        images: with prompt sets, also their reference images.
        scores: with models, also the networks of the metrics that score their images by default.

    Returns:
        One dict per download: `name, files, bytes, commit, folder`; empty if all files were on this disk.

    Raises:
        SpecbenchError: an unknown name, a disk that is too small, or a file that cannot be downloaded.
    """
    names, metrics = [*map(str, chosen("name", names))], chosen("metric", metrics)
    names = [find_model(name).name if is_reference(name) else name for name in names]  # a user's model
    needs = [lacking for name in names for lacking in downloads_of(name, images)]
    for model in (name for name in names if scores and name in models()):
        metrics = [*metrics, *metric_catalog.default_metrics(model, default_prompts(model))]
    needs += metric_catalog.downloads(metric_catalog.with_protocol(metrics, protocol), Settings())
    return [
        {
            "name": download.name,
            "files": len(download.files),
            "bytes": download.size,
            "commit": download.commit,
            "folder": str(download.folder),
        }
        for download in fetch_all(needs)
    ]


def downloads_of(name: str, images: bool = False) -> list[Download]:
    """Return the missing files of a named item; arguments and errors as in `fetch`."""
    if name in models():
        prompt_set = default_prompts(name)
        return find_model(name).downloads() + (missing_set(prompt_set) if prompt_set else [])
    if (named := prompts.set_name(name)) in prompts.prompt_set_names():
        return missing_set(named) + (missing_set(named, images=True) if images else [])
    if is_table(name):
        return table_downloads(load_table(name))
    if name in metric_catalog.metric_names():
        return metric_catalog.downloads([name], Settings())
    files = {checkpoint.file: key for key, checkpoint in CHECKPOINTS.items()}
    if name in files:
        return [missing for missing in [missing_file(files[name])] if missing]
    if name in (sources := _sources()):
        return [missing for source in sources[name] if (missing := WantedFiles(source).missing())]
    for metric in sorted(metric_catalog.metric_names(), key=lambda known: known not in metric_catalog.METRICS):
        with suppress(SpecbenchError):  # a broken plug-in does not hide other names
            if name in metric_catalog.metric(metric)(Settings()).repositories.values():
                return metric_catalog.downloads([metric], Settings())
    valid = [*models(), *table_names(), *public_sets(), *metric_catalog.metric_names()]
    unknown = unknown_name("thing to fetch", name, valid)
    guess = unknown.try_this.partition("valid:")[0].strip()
    raise SpecbenchError(unknown.what, f"{guess} see: specbench list --help".strip())


def table_downloads(table: Table) -> list[Download]:
    """Return the missing files of a table: models, draft heads, prompts, metrics of its columns, reference images."""
    cells = [cell.values for cell in resolve_cells(table, {}, env={}) if cell.values]
    sets = dict.fromkeys(str(values.prompts) for values in cells)
    needs = [need for name in sets for need in missing_set(name)]
    for model in dict.fromkeys(plan_model(values) for values in cells):
        needs += model.downloads()
    heads = dict.fromkeys(
        head_files(plan_model(values), planned.spec) for values in cells for planned in plan_decoders(values)
    )
    needs += [need for head in heads if head and (need := head.missing())]
    return needs + metric_catalog.downloads(table.metrics(), Settings())


def _sources() -> dict[str, list[Source]]:
    """Return {hub repository: files of models and draft heads}."""
    sources: dict[str, list[Source]] = {}
    for model in models().values():
        if isinstance(model, HubModel):
            for source in model.checkpoint.sources:
                if source not in sources.setdefault(source.repo, []):
                    sources[source.repo].append(source)
    sources |= {source.repo: [source] for source in PUBLISHED_HEADS.values()}
    return sources
