"""Score stored images: features per image, computed once per feature fingerprint, then the run's scores.

Features are kept as the work goes on, under the `started_at` of the image's row, so that a redone image is scored again
and nothing else is. A run may still be writing.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pandas as pd

from specbench.errors import BAD_INPUT, SpecbenchError
from specbench.metrics import catalog as metric_catalog
from specbench.metrics.base import Metric, Sample, Settings
from specbench.metrics.read_ahead import read_ahead
from specbench.metrics.score_store import feature_parts, scores_are_current, write_run_scores, writing
from specbench.models.hub_model import RANDOM
from specbench.store.run_images import read_image
from specbench.store.run_store import RunStore
from specbench.store.schema import read_meta


@dataclass(frozen=True)
class Images:
    """Images to score and the folder of their scores.

    Attributes:
        name: of the run, or of the folder they are in.
        folder: gets a `scores` folder.
        rows: `prompt_id, sample, prompt, category, meta` (JSON), `path`, what `read` needs besides, and `started_at`,
            which changes whenever the picture may have.
        read: pixels of a row's image, uint8 [H, W, 3].
    """

    name: str
    folder: Path
    rows: pd.DataFrame
    read: Callable[..., np.ndarray]


@dataclass(frozen=True)
class Scored:
    """What `score` did with one run and one metric: images scored now, there before, and why none, if so."""

    run_id: str
    metric: str
    computed: int
    reused: int
    skipped: str | None = None


class Reporter:
    """Progress callbacks of scoring; no-ops by default. Implementations must be fast and must not raise."""

    def start(self, name: str, metric: str, total: int, done: int) -> None:
        """`total` images are to be scored by `metric`; `done` of them were before."""

    def image(self, name: str, metric: str) -> None:
        """One image was scored."""

    def finish(self, name: str, metric: str) -> None:
        """Scoring ended, by completion or by an error."""

    def left_out(self, name: str, metric: str, why: str) -> None:
        """`metric`, which nobody named, is not computed."""


def score(
    folders: Sequence[Path],
    metrics: Sequence[str] | None = None,
    settings: Settings | None = None,
    reporter: Reporter | None = None,
    where_they_fit: bool = False,
) -> list[Scored]:
    """Score the images of run folders and keep the results beside them.

    Args:
        metrics: names; None means every metric that needs nothing from outside but an installed package and can
            score any of the run's prompts.
        where_they_fit: named metrics that cannot score a run are left out instead of refused.

    Raises:
        SpecbenchError: unknown metric, one that lacks something or cannot score a run it was named for, or a missing
            or damaged image.
    """
    return score_images([run_images(folder) for folder in folders], metrics, settings, reporter, where_they_fit)


def score_images(
    shown: Sequence[Images],
    metrics: Sequence[str] | None = None,
    settings: Settings | None = None,
    reporter: Reporter | None = None,
    where_they_fit: bool = False,
) -> list[Scored]:
    """As `score`, for pictures from anywhere: all of them by one metric before the next one, whose network is loaded
    once."""
    names = metric_catalog.bundled_metrics() if metrics is None else metrics
    by_metric = []
    for make in [metric_catalog.metric(name) for name in names]:
        metric = make(settings)
        one = _score_if_ready if metrics is None else score_with if where_they_fit else _score_or_refuse
        by_metric.append([one(images, metric, reporter) for images in shown])
    return [outcome for of_images in zip(*by_metric, strict=True) for outcome in of_images]


def _score_or_refuse(images: Images, metric: Metric, reporter: Reporter | None) -> Scored:
    """As `score_with`; a SpecbenchError where the metric cannot score these images."""
    outcome = score_with(images, metric, reporter)
    if outcome.skipped:
        raise SpecbenchError(
            f"metric '{outcome.metric}' cannot score {outcome.run_id}: {outcome.skipped}",
            "leave it away to score with what fits", BAD_INPUT,
        )  # fmt: skip
    return outcome


def _score_if_ready(images: Images, metric: Metric, reporter: Reporter | None) -> Scored:
    """As `score_with`, but a package that is not installed leaves the metric out."""
    for why, hint in metric.missing_packages():
        (reporter or Reporter()).left_out(images.name, metric.name, f"{why} ({hint})")
        return Scored(images.name, metric.name, 0, 0, why)
    return score_with(images, metric, reporter)


def run_images(folder: Path) -> Images:
    """Images of a run.

    Raises:
        SpecbenchError: the run's model has random weights.
    """
    store = RunStore(folder)
    info = store.info()
    if RANDOM in info.spec.model:
        raise SpecbenchError(
            f"{info.run_id}: {info.spec.model} has random weights, so its images mean nothing",
            "name the runs to score",
        )
    rows = store.samples(["prompt", "category", "meta", "status", "started_at", "image", "image_sha256"])
    rows = rows[(rows["status"] == "ok") & rows["image"].notna()]
    folder = Path(folder)
    rows = rows.assign(path=[folder / image for image in rows["image"]])
    return Images(info.run_id, folder, rows, lambda row: read_image(folder, row.image, row.image_sha256))


def score_with(images: Images, metric: Metric, reporter: Reporter | None = None) -> Scored:
    """Score pictures with one metric, only what is missing.

    Raises:
        SpecbenchError: the metric lacks something, or a picture is missing or damaged.
    """
    rows, reporter = images.rows, reporter or Reporter()
    wanted = rows[[metric.accepts(_text(row.category), read_meta(row.meta)) for row in rows.itertuples()]]
    if wanted.empty:
        why = "its prompts lack what the metric needs" if len(rows) else "it has no images"
        return Scored(images.name, metric.name, 0, 0, why)
    metric.prepare()
    parts = feature_parts(images.folder, metric)
    with writing(images.folder, parts):
        there = parts.read(["started_at"]).to_pandas()
        known = set(there.itertuples(index=False, name=None))
        missing = wanted[[(row.prompt_id, row.sample, row.started_at) not in known for row in wanted.itertuples()]]
        reporter.start(images.name, metric.name, len(wanted), len(wanted) - len(missing))
        try:
            for samples in read_ahead(partial(_read, metric, images.read), list(missing.itertuples()), metric.batch):
                parts.append(_feature_rows(metric, samples))
                for _ in samples:
                    reporter.image(images.name, metric.name)
        finally:
            reporter.finish(images.name, metric.name)
        parts.compact()
        if len(missing) or len(known) != len(wanted) or not scores_are_current(images.folder, metric, wanted):
            write_run_scores(images.folder, metric, wanted)
    return Scored(images.name, metric.name, len(missing), len(wanted) - len(missing))


class _Image(NamedTuple):
    """An image that was read, and its row."""

    row: Any
    sample: Sample


def _read(metric: Metric, read: Callable, row: Any) -> _Image:
    pixels = read(row)
    meta, made = read_meta(row.meta), metric.preprocess(pixels)
    sample = Sample(row.prompt_id, int(row.sample), row.prompt, _text(row.category), meta, pixels, made)
    return _Image(row, sample)


def _feature_rows(metric: Metric, images: Sequence[_Image]) -> Iterator[dict[str, object]]:
    for (row, sample), kept in zip(images, metric.features([one.sample for one in images]), strict=True):
        yield {
            "prompt_id": row.prompt_id,
            "sample": row.sample,
            "started_at": row.started_at,
            "category": sample.category,
            **kept,
        }


def _text(value: object) -> str | None:
    return value if isinstance(value, str) else None
