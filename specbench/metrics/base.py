"""Metric interface: images -> features -> statistics -> scores, with one method per arrow.

A metric is a class. `scoring` iterates over the images, stores their features under a fingerprint of all inputs, and
then computes statistics and scores. A metric never reads a run folder.
"""

import hashlib
import inspect
import json
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from functools import cached_property
from importlib import metadata
from itertools import islice
from pathlib import Path
from types import MappingProxyType
from typing import Any, ClassVar, Literal, TypeVar

import numpy as np
import pandas as pd
import pyarrow as pa

from specbench.errors import MISSING_PREREQUISITE, SpecbenchError
from specbench.metrics import published_weights
from specbench.names import encodable
from specbench.stats import (
    Better,
    Difference,
    Estimate,
    mean_difference,
    mean_interval,
    mean_of_proportions,
    proportion_interval,
)
from specbench.system.digests import digest_of
from specbench.system.downloads import Download
from specbench.system.foreign_code import code_of
from specbench.system.limits import available_cores
from specbench.system.torch_device import use_device

Kind = Literal["plain", "proportions", "distance"]
"""Kinds of scores. `proportions`: fractions of correct images per category, and their unweighted mean. `distance`:
distance to reference images; its value depends on the number of images. `plain`: any other score."""


@dataclass(frozen=True)
class Settings:
    """Settings of metric computation."""

    device: str = "cpu"  # device of the networks, for example "cuda"
    batch: int | None = None  # images per forward of a network; None: the default of each metric
    # reference images of distances: a folder, or an .npz file of their statistics; None: COCO's images
    reference: Path | None = None
    offline: bool = False  # whether to download nothing
    # Python of an environment with the metric's package; None: the Python that `packages.python_of` finds
    python: Path | None = None

    def check(self) -> None:
        """Raise a SpecbenchError if this machine lacks the device or the reference does not exist."""
        use_device(self.device)
        if self.reference is not None and not self.reference.exists():
            raise SpecbenchError(f"--reference {self.reference} does not exist", "name a folder or a .npz file")
        if self.reference is not None and self.reference.suffix in (".zip", ".tar", ".gz", ".tgz", ".parquet"):
            what = f"--reference {self.reference} is not a folder of images; unpack it"
            raise SpecbenchError(what, "for COCO's val2017.zip: specbench fetch coco --images --from val2017.zip")


@dataclass(frozen=True)
class Sample:
    """Stored image with its prompt."""

    # prompt_id, sample: key of the image
    prompt_id: str
    sample: int
    prompt: str  # the caption
    category: str | None  # tested ability, if the prompt set states it
    meta: Mapping[str, Any]  # further facts in the prompt set
    pixels: np.ndarray  # uint8 [H, W, 3]
    preprocessed: Any = None  # result of the metric's `preprocess`; None before this call


@dataclass(frozen=True)
class Score:
    """A score of a run, from `n` images. Its name is the metric's name, or "metric:part" for a part of the score."""

    name: str
    estimate: Estimate
    n: int
    note: str | None = None  # warning about the number
    prompts: int | None = None  # number of prompts; None: unknown, or all prompts of the run
    # better, kind: None means the metric's value
    better: Better | None = None
    kind: Kind | None = None


class Metric:
    """Base class of metrics."""

    name: str  # name in commands and tables
    summary: str  # for plug-ins: description in `specbench list metrics`; built-in metrics have it in the catalogue
    better: Better = "higher"  # whether higher or lower values are better
    kind: Kind = "plain"
    unit: str = ""  # unit of the scores
    unjudged: str = ""  # for plug-ins: ignored aspects of an image; built-in metrics have them in the catalogue
    samples: int = 1  # required number of samples of a prompt
    batch: int = 16  # number of images per call of `features`
    # reference of a plug-in's class, "package.module:NAME"; None for built-in metrics
    class_reference: str | None = None
    columns: ClassVar[Mapping[str, pa.DataType]]  # {name: arrow type} of the values per image that `features` returns
    checkpoints: Sequence[str] = ()  # required files, by their names in `specbench.metrics.published_weights`
    # repositories: {name in the identity: hub repository of a required network}; files: glob patterns of required files
    repositories: ClassVar[Mapping[str, str]] = MappingProxyType({})
    files: ClassVar[Sequence[str]] = published_weights.NETWORK_FILES
    # {further required distribution: command that installs it}
    packages: ClassVar[Mapping[str, str]] = MappingProxyType({})

    def __init__(self, settings: Settings | None = None):
        self.settings = settings or Settings()
        self.batch = self.settings.batch or self.batch

    def identity(self) -> Mapping[str, str]:
        """Describe all inputs that can change a value: variant, weight digests, resize, reference, library versions."""
        raise NotImplementedError

    def feature_identity(self) -> Mapping[str, str]:
        """Return the part of the identity that can change features; omit inputs that change only the score."""
        return self.identity()

    @cached_property
    def reference_identity(self) -> dict[str, str]:
        """Digest the files of the user's reference: part of the identity of a plug-in's distance."""
        if (reference := self.settings.reference) is None:
            return {}
        files = sorted(path for path in (reference, *reference.rglob("*")) if path.is_file())
        lines = [f"{encodable(str(path.relative_to(reference)))} {digest_of(path)}" for path in files]
        digest = hashlib.sha256("\n".join(lines).encode()).hexdigest()[:16]
        return {"reference": digest} | ({"reference_n": str(len(lines))} if reference.is_dir() else {})

    def missing(self) -> list[tuple[str, str]]:
        """List missing requirements as (what is missing, what to do); empty if the metric is ready."""
        files = map(published_weights.problem, self.checkpoints)
        folders = (published_weights.hub_problem(name, self.files) for name in self.repositories.values())
        return self.missing_packages() + [problem for problem in (*files, *folders) if problem]

    def missing_packages(self) -> list[tuple[str, str]]:
        """List the entries of `missing` that are packages, which specbench does not install."""
        absent = [name for name in self.packages if not any(metadata.distributions(name=name))]
        lacking = f"metric '{self.name}' needs {{}}, which is not installed"
        return [(lacking.format(name), self.packages[name]) for name in absent]

    def prepare(self) -> None:
        """Download the required files; called before any other method."""
        for problem in self.missing_packages():
            raise SpecbenchError(*problem, MISSING_PREREQUISITE)
        for repository in self.repositories.values():
            self.network_folder(repository)
        for name in self.checkpoints:
            self.weights_file(name)

    def weights_file(self, name: str) -> Path:
        """Return the path of one of the `checkpoints`; download the file first if it is missing."""
        return published_weights.require_weights_file(name, self.settings.offline)

    def network_folder(self, repository: str) -> Path:
        """Return the folder of one of the `repositories`; download the files first if they are missing."""
        return published_weights.hub_folder(repository, self.files, self.settings.offline)

    def network_identity(self, repository: str) -> str:
        """Digest the files of one of the `repositories`, with its commit."""
        return published_weights.folder_identity(self.network_folder(repository), self.files)

    def downloads(self) -> list[Download]:
        """List the required files that are not on this disk and can be downloaded."""
        folders = (published_weights.network_files(name, self.files).missing() for name in self.repositories.values())
        return [download for download in (*folders, *map(published_weights.missing_file, self.checkpoints)) if download]

    def accepts(self, category: str | None, meta: Mapping[str, Any]) -> bool:
        """Return whether images of a prompt can be scored; by default yes, except for class labels and codes."""
        return not meta.keys() & {"class", "codes"}

    def preprocess(self, pixels: np.ndarray) -> Any:
        """Make the network's input from an image, uint8 [H, W, 3]. Threads call this while the network runs."""
        return None

    def preprocessed(self, samples: Sequence[Sample]) -> list[Any]:
        """Return the network's inputs for samples; preprocess samples that scoring has not preprocessed yet."""
        done = ((sample.pixels, sample.preprocessed) for sample in samples)
        return [self.preprocess(pixels) if made is None else made for pixels, made in done]

    def features(self, samples: Sequence[Sample]) -> list[dict[str, object]]:
        """Compute the values of `columns` per image; None if undefined."""
        return [self.features_of(sample) for sample in samples]

    def features_of(self, sample: Sample) -> dict[str, object]:
        """Compute the values of `columns` of one image, for metrics that process images one by one."""
        raise NotImplementedError

    def statistics(self, features: pd.DataFrame) -> object:
        """Aggregate the features of all images; `features` has the key columns, `category`, and `columns`."""
        return features

    def scores(self, statistics: object) -> list[Score]:
        """Compute the scores, the overall score first."""
        raise NotImplementedError

    def captions_cut(self, captions: Sequence[str]) -> tuple[int, int] | None:
        """Return the number of truncated captions, and the limit in tokens; None if the metric never truncates."""
        return None

    def difference(self, features: pd.DataFrame, baseline: pd.DataFrame) -> tuple[Difference, int] | None:
        """Compute the score difference between a run and a baseline over common images. Both arguments as for
        `statistics`. Return the difference with a paired interval, and the number of images; None if undefined."""
        return None


class PerImageMetric(Metric):
    """Base class of metrics with one `value` per image. The score is the mean value, with an interval over prompts."""

    columns: ClassVar = {"value": pa.float32()}

    def scores(self, statistics: pd.DataFrame) -> list[Score]:
        return [] if statistics.empty else [mean_score(self.name, statistics, "value")]

    def difference(self, features: pd.DataFrame, baseline: pd.DataFrame) -> tuple[Difference, int] | None:
        return column_difference(features, baseline, "value")


def part_scores(
    name: str, rows: pd.DataFrame, by: str, column: str, interval: Callable[..., Estimate] = mean_interval
) -> list[Score]:
    """Compute a score "name:part" for each value (part) in the column `by`: the mean of `column` for this part."""
    parts = rows.groupby(by, sort=True, dropna=False)
    return [mean_score(f"{name}:{part}", group, column, interval) for part, group in parts if group[column].count()]


def answer_scores(name: str, images: pd.DataFrame, answers: Iterable[list[Any]]) -> list[Score]:
    """Compute scores "name:part" from answers about images: a list of [part, value] per image. `n` counts images."""
    rows = images.assign(answer=[*answers]).explode("answer").dropna(subset="answer")  # keeps the index of the image
    return part_scores(name, rows.assign(part=rows["answer"].str[0], value=rows["answer"].str[1]), "part", "value")


def mean_score(name: str, rows: pd.DataFrame, column: str, interval: Callable[..., Estimate] = mean_interval) -> Score:
    """Compute the mean of a column as a score. Rows without a value are excluded; the note counts these rows."""
    kept = rows.dropna(subset=column)
    if kept.empty:
        raise SpecbenchError(f"no image has a value of {name}")
    lacking = f"{len(rows) - len(kept)} of {len(rows)} images have no value" if len(kept) < len(rows) else None
    prompts = kept["prompt_id"].nunique()
    return Score(name, interval(kept[column], kept["prompt_id"]), kept.index.nunique(), lacking, prompts)


def category_scores(name: str, rows: pd.DataFrame, column: str) -> list[Score]:
    """Compute scores from verdicts: first the unweighted mean over categories, then the proportion per category."""
    parts, kept = part_scores(name, rows, "category", column, proportion_interval), rows.dropna(subset=column)
    if not parts:
        return []
    whole = mean_of_proportions(
        [(part[column], part["prompt_id"]) for _, part in kept.groupby("category", dropna=False)]
    )
    return [Score(name, whole, sum(part.n for part in parts), None, kept["prompt_id"].nunique()), *parts]


def column_difference(
    features: pd.DataFrame, baseline: pd.DataFrame, column: str, by_category: bool = False, all_of: Sequence[str] = ()
) -> tuple[Difference, int] | None:
    """Compute the mean paired difference of a column by prompt; if `by_category`, the mean of the categories' means.
    None if a category in `all_of` is missing."""
    both = paired_features(features, baseline, column, ["category"] if by_category else ())
    both = both.dropna(subset=[column, f"{column}_base"])
    if both.empty or (all_of and set(both["category"]) != set(all_of)):
        return None
    gaps = both[column].astype("float64") - both[f"{column}_base"].astype("float64")
    if by_category:
        category = both["category"].fillna("")
        gaps = gaps * len(both) / (category.nunique() * category.map(category.value_counts()))
    return mean_difference(gaps, both["prompt_id"]), len(both)


def paired_features(
    features: pd.DataFrame, baseline: pd.DataFrame, column: str, also: Sequence[str] = ()
) -> pd.DataFrame:
    """Join the features of common images: key, `column` of both runs (`_base` is appended to the baseline's), and the
    columns `also` of the first run."""
    keys = ["prompt_id", "sample"]
    return features[[*keys, column, *also]].merge(baseline[[*keys, column]], on=keys, suffixes=("", "_base"))


MEAN_OF_IMAGES = "mean"
"""Key in the identity of scores that can be paired, because they are means of a stored `value` per image."""
RESULTS_FILE = "results file"
"""Key in the identity of imported scores. The fingerprint excludes this key, so that runs can share a fingerprint."""


@dataclass(frozen=True)
class Origin:
    """All inputs that determine the features, or the scores, of a metric."""

    metric: str
    facts: Mapping[str, str]

    @property
    def fingerprint(self) -> str:
        facts = {name: fact for name, fact in self.facts.items() if name != RESULTS_FILE}
        text = json.dumps([self.metric, facts], sort_keys=True)
        return hashlib.sha256(text.encode()).hexdigest()[:8]


def made_features(metric: Metric) -> Origin:
    return _origin(metric, metric.feature_identity())


def made_score(metric: Metric) -> Origin:
    return _origin(metric, metric.identity())


def _origin(metric: Metric, identity: Mapping[str, str]) -> Origin:
    """Make an origin from an identity; add the GPU's arithmetic, and a plug-in's code, networks and reference."""
    facts = dict(identity)
    if not all(isinstance(text, str) for text in (*facts, *facts.values())):
        advice = f"it returned {facts}; write numbers as texts"
        raise SpecbenchError(f"metric '{metric.name}': identity() must map texts to texts", advice)
    if metric.settings.device.startswith("cuda"):  # older scores lack this fact: convolutions used TF32
        facts["float32"] = "without TF32"
    if metric.class_reference is not None:
        code = code_of([metric.class_reference])
        facts |= {"class": metric.class_reference, "code": code.digest[:16] if code else "specbench's"}
        for name, repository in metric.repositories.items():
            facts[name] = metric.network_identity(repository)
        if metric.kind == "distance" and "reference" not in metric.identity():
            facts |= metric.reference_identity
        methods = [inspect.unwrap(getattr(type(metric), name)) for name in ("scores", "difference")]
        if methods == [PerImageMetric.scores, PerImageMetric.difference]:
            facts["score"] = MEAN_OF_IMAGES
    return Origin(metric.name, facts)


CODE_VERSIONS = {"clean": 2, "center256": 2}
"""{function that preprocesses images: version, if above 1}. A fix that changes results must increase the version, so
that old features are not used. A test pins the results of each version."""


def described(name: str, function: Callable[..., Any]) -> str:
    """Describe preprocessing for an identity: `name`, and the version of its function if above 1."""
    version = CODE_VERSIONS.get(function.__name__, 1)
    return name if version == 1 else f"{name}, code {version}"


Wanted = TypeVar("Wanted")
Loaded = TypeVar("Loaded")
BATCHES_AHEAD = 2
MOST_AHEAD = 256
"""Maximum number of items read ahead, for large batches: a 1024 x 1024 image with its network's input takes 4 MB."""
MOST_THREADS = 32


def read_ahead(load: Callable[[Wanted], Loaded], items: Sequence[Wanted], batch: int) -> Iterator[list[Loaded]]:
    """Yield `load(item)` of all items, in order, in lists of `batch`. Threads load the next two lists while the caller
    uses a list, because reading, decoding and resizing release the interpreter lock. The first item is loaded in the
    caller's thread, so that objects created by the first call of `load` are created only once."""
    if not items:
        return
    import torch  # not needed if all images are scored

    threads, rest, ahead = torch.get_num_threads(), iter(items[1:]), min(BATCHES_AHEAD * batch, MOST_AHEAD)
    loaded = [load(items[0])]
    # One torch thread per loader: the images are already spread over the cores.
    with ThreadPoolExecutor(min(MOST_THREADS, available_cores()), "read", torch.set_num_threads, (1,)) as pool:
        waiting: deque[Future[Loaded]] = deque(pool.submit(load, item) for item in islice(rest, ahead))
        try:
            while waiting:
                if len(loaded) == batch:
                    yield loaded
                    loaded = []
                loaded.append(waiting.popleft().result())
                waiting.extend(pool.submit(load, item) for item in islice(rest, 1))
            yield loaded
        finally:
            pool.shutdown(cancel_futures=True)
            torch.set_num_threads(threads)  # new threads use the number that was set last
