"""Metric interface: images -> features -> statistics -> scores, one method per arrow.

A metric is one class. `scoring` iterates over the images, stores their features on disk under a fingerprint of all
that determines them, and then computes statistics and scores. A metric never reads a run folder itself.
"""

from __future__ import annotations

import hashlib
import inspect
import json
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
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
from specbench.stats import Difference, Estimate, mean_difference, mean_interval, mean_of_estimates, proportion_interval
from specbench.system.downloads import Download
from specbench.system.foreign_code import code_of
from specbench.system.limits import available_cores
from specbench.system.torch_device import use_device

Better = Literal["lower", "higher"]
Kind = Literal["plain", "proportions", "distance"]
"""Kinds of scores. `proportions`: fractions of right images by category, and their unweighted mean. `distance`: from
all images to reference images, which depends on the number of images. `plain`: any other score."""


@dataclass(frozen=True)
class Settings:
    """Settings of metric computation."""

    device: str = "cpu"  # device of the networks, for example "cuda"
    batch: int | None = None  # images per forward of a network; None: each metric's own default
    # reference of distances: folder of images, or .npz file of their statistics; None: COCO's images
    reference: Path | None = None
    offline: bool = False  # never download what is missing
    # Python of an environment that has the authors' package of a metric; None: `packages.python_of`
    python: Path | None = None

    def check(self) -> None:
        """Raise a SpecbenchError if the device does not exist here or there is no such reference."""
        use_device(self.device)
        if self.reference is not None and not self.reference.exists():
            raise SpecbenchError(f"--reference {self.reference} does not exist", "a folder of images, or a .npz file")
        if self.reference is not None and self.reference.suffix in (".zip", ".tar", ".gz", ".tgz", ".parquet"):
            what = f"--reference {self.reference} is not a folder of images; unpack it"
            raise SpecbenchError(what, "for COCO's val2017.zip: specbench fetch coco --images --from val2017.zip")


@dataclass(frozen=True)
class Sample:
    """Stored image with its prompt."""

    # prompt_id, sample: which one
    prompt_id: str
    sample: int
    prompt: str  # the caption
    category: str | None  # what the prompt tests, if its set says so
    meta: Mapping[str, Any]  # whatever else the prompt set knows
    pixels: np.ndarray  # uint8 [H, W, 3]
    preprocessed: Any = None  # result of the metric's `preprocess`; None before the call


@dataclass(frozen=True)
class Score:
    """One score of a run, from `n` images. Its name is the metric's, or "metric:part" for a part of the score."""

    name: str
    estimate: Estimate
    n: int
    note: str | None = None  # warning for readers of the number
    prompts: int | None = None  # number of the images' prompts; None if unknown, or if all prompts of the run
    # better, kind: the metric's if None
    better: Better | None = None
    kind: Kind | None = None


class Metric:
    """Base class of metrics."""

    name: str  # what users type and tables print
    summary: str  # line of a plug-in for `specbench list metrics`; the catalogue has the lines of built-in metrics
    better: Better = "higher"  # whether higher or lower values are better
    kind: Kind = "plain"
    unit: str = ""  # of its scores
    batch: int = 16  # images given to `features` at a time
    # place of a plug-in's class, "package.module:NAME"; None for built-in metrics
    class_reference: str | None = None
    columns: ClassVar[Mapping[str, pa.DataType]]  # name and arrow type of the values that `features` stores per image
    checkpoints: Sequence[str] = ()  # names in `specbench.metrics.published_weights` of the files it needs
    # hub repositories whose networks it needs, by their names in its identity
    repositories: ClassVar[Mapping[str, str]] = MappingProxyType({})
    # further distributions that it needs, with the command that installs each
    packages: ClassVar[Mapping[str, str]] = MappingProxyType({})

    def __init__(self, settings: Settings | None = None):
        self.settings = settings or Settings()
        self.batch = self.settings.batch or self.batch

    def identity(self) -> Mapping[str, str]:
        """Describe all that can change a value: variant, weight digests, resize, reference set, library versions."""
        raise NotImplementedError

    def feature_identity(self) -> Mapping[str, str]:
        """Describe the part of the identity that can change a feature, without inputs of the score only."""
        return self.identity()

    def missing(self) -> list[tuple[str, str]]:
        """List missing requirements as (what is missing, what to do); empty if the metric is ready."""
        files = map(published_weights.problem, self.checkpoints)
        folders = map(published_weights.hub_problem, self.repositories.values())
        return self.missing_packages() + [problem for problem in (*files, *folders) if problem]

    def missing_packages(self) -> list[tuple[str, str]]:
        """List missing packages: the part of `missing` that cannot be downloaded."""
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
        """Path of one of the `checkpoints`, downloaded first if it is absent."""
        return published_weights.require_weights_file(name, self.settings.offline)

    def network_folder(self, repository: str) -> Path:
        """Folder of one of the `repositories`, downloaded first if it is absent."""
        return published_weights.hub_folder(repository, self.settings.offline)

    def downloads(self) -> list[Download]:
        """List the required files that are not on this disk and can be downloaded."""
        folders = map(published_weights.missing_folder, self.repositories.values())
        return [download for download in (*folders, *map(published_weights.missing_file, self.checkpoints)) if download]

    def accepts(self, category: str | None, meta: Mapping[str, Any]) -> bool:
        """Return whether images of a prompt can be scored; class labels and codes are no captions."""
        return not meta.keys() & {"class", "codes"}

    def preprocess(self, pixels: np.ndarray) -> Any:
        """Make the network's input from an image uint8 [H, W, 3]. Scoring calls this in threads while the network
        runs."""
        return None

    def preprocessed(self, samples: Sequence[Sample]) -> list[Any]:
        """List the network's inputs for samples, and preprocess those that scoring has not preprocessed."""
        done = ((sample.pixels, sample.preprocessed) for sample in samples)
        return [self.preprocess(pixels) if made is None else made for pixels, made in done]

    def features(self, samples: Sequence[Sample]) -> list[dict[str, object]]:
        """Compute the values of `columns` per image; None if undefined."""
        return [self.features_of(sample) for sample in samples]

    def features_of(self, sample: Sample) -> dict[str, object]:
        """Compute the values of `columns` of one image, for metrics that do not take several at once."""
        raise NotImplementedError

    def statistics(self, features: pd.DataFrame) -> object:
        """Aggregate the features of all images; `features` has the key columns, `category`, and `columns`."""
        return features

    def scores(self, statistics: object) -> list[Score]:
        """Compute the scores, the overall one first."""
        raise NotImplementedError

    def captions_cut(self, captions: Sequence[str]) -> tuple[int, int] | None:
        """Return the number of captions that are cut, and the limit in tokens; None if the metric cuts no captions."""
        return None

    def difference(self, features: pd.DataFrame, baseline: pd.DataFrame) -> tuple[Difference, int] | None:
        """Subtract a baseline's score over the images that both runs have. `features`, `baseline`: as for `statistics`.
        Return the difference with a paired interval and the number of images, or None if no difference is defined."""
        return None


class PerImageMetric(Metric):
    """Base class of metrics with one `value` per image. The score is their mean; its interval is over prompts."""

    columns: ClassVar = {"value": pa.float32()}

    def scores(self, statistics: pd.DataFrame) -> list[Score]:
        return [] if statistics.empty else [mean_score(self.name, statistics, "value")]

    def difference(self, features: pd.DataFrame, baseline: pd.DataFrame) -> tuple[Difference, int] | None:
        return column_difference(features, baseline, "value")


def part_scores(
    name: str, rows: pd.DataFrame, by: str, column: str, interval: Callable[..., Estimate] = mean_interval
) -> list[Score]:
    """Scores "name:part": the mean of `column` over the rows of each value (part) of the column `by`."""
    parts = rows.groupby(by, sort=True, dropna=False)
    return [mean_score(f"{name}:{part}", group, column, interval) for part, group in parts if group[column].count()]


def answer_scores(name: str, images: pd.DataFrame, answers: Iterable[list[Any]]) -> list[Score]:
    """Scores "name:part" of answers about images: a list of [part, value] per image. `n` counts images."""
    rows = images.assign(answer=[*answers]).explode("answer").dropna(subset="answer")  # keeps the index of the image
    return part_scores(name, rows.assign(part=rows["answer"].str[0], value=rows["answer"].str[1]), "part", "value")


def mean_score(name: str, rows: pd.DataFrame, column: str, interval: Callable[..., Estimate] = mean_interval) -> Score:
    """Mean of a column as a score. Rows without a value are left out, and the score's note has their number."""
    kept = rows.dropna(subset=column)
    if kept.empty:
        raise SpecbenchError(f"no image has a value of {name}")
    lacking = f"{len(rows) - len(kept)} of {len(rows)} images have no value" if len(kept) < len(rows) else None
    prompts = kept["prompt_id"].nunique()
    return Score(name, interval(kept[column], kept["prompt_id"]), kept.index.nunique(), lacking, prompts)


def category_scores(name: str, rows: pd.DataFrame, column: str) -> list[Score]:
    """Scores of verdicts: the proportion of `column` by category, after the unweighted mean of these proportions."""
    parts = part_scores(name, rows, "category", column, proportion_interval)
    if not parts:
        return []
    n, prompts = sum(part.n for part in parts), rows.dropna(subset=column)["prompt_id"].nunique()
    return [Score(name, mean_of_estimates([part.estimate for part in parts]), n, None, prompts), *parts]


def column_difference(
    features: pd.DataFrame, baseline: pd.DataFrame, column: str, by_category: bool = False, all_of: Sequence[str] = ()
) -> tuple[Difference, int] | None:
    """Mean paired difference of a column by prompt; if `by_category`, the mean of the categories' means. None if a
    category in `all_of` is missing."""
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
    """Features of the images that both runs have: key, `column` of both runs (the baseline's ends in `_base`), and the
    columns `also` of the first run."""
    keys = ["prompt_id", "sample"]
    return features[[*keys, column, *also]].merge(baseline[[*keys, column]], on=keys, suffixes=("", "_base"))


MEAN_OF_IMAGES = "mean"
"""Fact of an identity: the score is the mean of a stored `value` per image, so that differences can be paired."""
RESULTS_FILE = "results file"
"""Fact of imported scores that is stored but not in their fingerprint, so that runs can share a fingerprint."""


@dataclass(frozen=True)
class Origin:
    """All that determines the features or the scores of a metric."""

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
    """Add the arithmetic of a GPU, and the place and code digest of a plug-in's class."""
    facts, settings = dict(identity), getattr(metric, "settings", None)  # a plug-in may have none
    if settings and settings.device.startswith("cuda"):  # identities without this fact: convolutions were in TF32
        facts["float32"] = "without TF32"
    reference = getattr(metric, "class_reference", None)
    if reference is not None:
        code = code_of([reference])
        facts |= {"class": reference, "code": code.digest[:16] if code else "specbench's"}
        methods = [inspect.unwrap(getattr(type(metric), name, len)) for name in ("scores", "difference")]
        if methods == [PerImageMetric.scores, PerImageMetric.difference]:
            facts["score"] = MEAN_OF_IMAGES
    return Origin(metric.name, facts)


CODE_VERSIONS = {"clean": 2, "center256": 2}
"""Versions above 1 of functions that preprocess images, by name. A test pins the results of each version; a fix that
changes results increases the version, so that old features are not used."""


def described(name: str, function: Callable[..., Any]) -> str:
    """Name preprocessing for an identity, with the version of its function if above 1."""
    version = CODE_VERSIONS.get(function.__name__, 1)
    return name if version == 1 else f"{name}, code {version}"


Wanted = TypeVar("Wanted")
Loaded = TypeVar("Loaded")
BATCHES_AHEAD = 2
MOST_AHEAD = 256
"""Maximum number of items read ahead, for large batches: a 1024 x 1024 image with its network's input takes 4 MB."""
MOST_THREADS = 32


def read_ahead(load: Callable[[Wanted], Loaded], items: Sequence[Wanted], batch: int) -> Iterator[list[Loaded]]:
    """Iterate over `load(item)` of all items, in order, in lists of `batch`. Threads load the next two while one is in
    use, because reading, decoding and resizing release the interpreter lock. The caller's thread loads the first item,
    so that whatever `load` creates on first use is created only once."""
    if not items:
        return
    import torch  # not needed if everything is scored

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
            torch.set_num_threads(threads)  # threads that start later take the number that was set last
