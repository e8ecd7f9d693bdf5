"""Missing files that a run and its scores need, with sizes and licences, listed without network access."""

from typing import NamedTuple

from specbench.errors import BAD_INPUT, SpecbenchError
from specbench.metrics import catalog as metric_catalog
from specbench.metrics.published_weights import CHECKPOINTS, hub_problem
from specbench.models.catalog import default_prompts
from specbench.models.facts import BYTES, ModelFacts, typed_name
from specbench.models.hub_model import HubModel
from specbench.prompts.public import missing_set
from specbench.system.downloads import offline

_KILO, _UNITS = 1000, ("bytes", "kB", "MB", "GB", "TB")


class Need(NamedTuple):
    """Missing files of one source. `what`: their content; `name`: repository, set or file; `size`: bytes, None if
    unknown; `about`: whether `size` is the size in memory instead of the size of the download."""

    what: str
    name: str
    size: int | None
    licence: str
    about: bool = False

    def text(self) -> str:
        """Name, size and licence in one line."""
        size = "size unknown" if self.size is None else f"{in_words(self.size)}{' in memory' * self.about}"
        return f"{self.name}: {size}; {self.licence}"


def in_words(size: float) -> str:
    """Format bytes in a suitable unit: "14.0 GB"."""
    place = 0
    while size >= _KILO and place < len(_UNITS) - 1:
        size, place = size / _KILO, place + 1
    return f"{size:.3g} {_UNITS[place]}"


def needs_of(model: ModelFacts, prompts: str | None) -> list[Need]:
    """Return the missing files of the official model and of the prompts."""
    needs = _of_model(model)
    for download in missing_set(prompts) if prompts else ():
        needs.append(Need("prompts", download.name.removeprefix("prompts of "), download.size, download.licence))
    return needs


def score_needs(model: ModelFacts, prompts: str | None) -> list[Need]:
    """Return the missing files of the model's default metrics; a shared network appears once."""
    needs: dict[str, Need] = {}
    for name in metric_catalog.default_metrics(model.name.partition("+")[0], prompts):
        if name in metric_catalog.IMPORTED:
            continue
        metric = metric_catalog.metric(name)()
        for key in metric.checkpoints:
            if not (weights := CHECKPOINTS[key]).here:
                needs[weights.file] = Need(f"network of {name}", weights.file, weights.remote.size, weights.licence)
        for repository in metric.repositories.values():
            if hub_problem(repository, metric.files):
                needs[repository] = Need(f"network of {name}", repository, None, "licence: see its card")
    return list(needs.values())


def fetch_command(model: ModelFacts, prompts: str | None, scores: bool = False) -> str:
    """Return the command that downloads the model, the prompts and, if `scores`, the networks of the metrics."""
    name = model.name.partition("+")[0]
    typed = typed_name(name)
    other = [prompts.partition("/")[0]] if prompts and prompts != default_prompts(name) and missing_set(prompts) else []
    return " ".join(["specbench", "fetch", typed, *other, *(["--scores"] if scores else [])])


def naming_all(error: SpecbenchError, model: ModelFacts, prompts: str) -> SpecbenchError:
    """Add a list of all missing files to the error about a file that cannot be obtained."""
    if error.exit_code == BAD_INPUT or len(needs := needs_of(model, prompts)) < 2:
        return error
    listed = "not on this disk: " + "; ".join(f"{need.what} {need.name}" for need in needs)
    what = listed if offline() else f"{error.what}; {listed}"
    return SpecbenchError(what, f"run on a machine with a network: {fetch_command(model, prompts)}", error.exit_code)


def _of_model(model: ModelFacts) -> list[Need]:
    if not isinstance(model, HubModel) or model.choice.random or model.choice.weights or model.choice.revision:
        return []
    sizes = {0: model.parameters * BYTES[model.dtype], **({1: model.other_bytes} if len(model.companions) == 1 else {})}
    places = {source: place for place, source in enumerate((model.source, *model.companions))}
    return [
        Need(source.what.removeprefix("the "), source.repo, sizes.get(places.get(source, -1)), source.licence, True)
        for source in (part.source for part in model.checkpoint.absent())
    ]
