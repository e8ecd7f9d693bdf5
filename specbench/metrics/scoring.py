"""Score stored images: features per image, computed once per feature fingerprint, then the run's scores.

Features are kept as the work goes on, under the `started_at` of the image's row, so that a redone image is scored again
and nothing else is. A run may still be writing.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from copy import copy
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pandas as pd

from specbench.errors import MISSING_PREREQUISITE, PARTIAL, SpecbenchError
from specbench.metrics import catalog as metric_catalog
from specbench.metrics.base import Metric, Sample, Settings, whole_identity
from specbench.metrics.read_ahead import read_ahead
from specbench.metrics.score_store import feature_parts, read_scores, scores_are_current, write_run_scores, writing
from specbench.models.facts import RANDOM
from specbench.models.shapes.captions import parse
from specbench.store.image_scores import ImageScores
from specbench.store.run_store import RunStore, read_image
from specbench.store.schema import KEY, read_meta
from specbench.system.console import counted
from specbench.system.device_failures import memory_for
from specbench.system.downloads import Download, fetch_what_can_be_had
from specbench.system.plugins import PluginError, naming_plugin


@dataclass(frozen=True)
class Images:
    """Images to score and the folder of their scores."""

    name: str  # of the run, or of the folder they are in
    folder: Path  # gets a `scores` folder
    # `prompt_id, sample, prompt, category, meta` (JSON), `path`, what `read` needs besides, and `started_at`, which
    # changes whenever the picture may have
    rows: pd.DataFrame
    read: Callable[..., np.ndarray]  # pixels of a row's image, uint8 [H, W, 3]
    model: str = ""  # name of the model that made them; empty for images from elsewhere


@dataclass(frozen=True)
class Scored:
    """Outcome of one run and one metric: images scored now, images scored before, and the reason if none could be."""

    run_id: str
    metric: str
    computed: int
    reused: int
    skipped: str | None = None


class ScoreReporter:
    """Progress callbacks of scoring; no-ops by default. Implementations must be fast and must not raise."""

    def note(self, text: str) -> None:
        """Show a line to the user."""

    def start(self, name: str, metric: str, total: int, done: int) -> None:
        """`total` images are to be scored by `metric`; `done` of them were before."""

    def image(self, name: str, metric: str) -> None:
        """One image was scored."""

    def finish(self, name: str, metric: str) -> None:
        """Scoring ended, by completion or by an error."""

    def left_out(self, name: str, metric: str, why: str) -> None:
        """`metric` is not computed."""


def score(
    folders: Sequence[Path],
    metrics: Sequence[str] | None = None,
    settings: Settings | None = None,
    reporter: ScoreReporter | None = None,
    where_they_fit: Sequence[str] = (),
    bundled_only: bool = False,
) -> list[Scored]:
    """`score_images` of run folders; problems are raised once all that can be scored is.

    Raises:
        SpecbenchError: unknown metric, one that lacks something or cannot score a run, or an image that is missing.
    """
    problems: list[SpecbenchError] = []
    shown = [run_images(folder) for folder in folders]
    outcomes = score_images(shown, problems, metrics, settings, reporter, where_they_fit, bundled_only)
    if problems:
        raise joint_problem(problems, any(outcome.skipped is None for outcome in outcomes))
    return outcomes


def score_images(
    shown: Sequence[Images],
    problems: list[SpecbenchError],
    metrics: Sequence[str] | None = None,
    settings: Settings | None = None,
    reporter: ScoreReporter | None = None,
    where_they_fit: Sequence[str] = (),
    bundled_only: bool = False,
) -> list[Scored]:
    """Score images from anywhere. The networks of all metrics stay loaded until the last image is scored.

    Args:
        problems: receives why images were not scored. Only what no images can be scored without is raised.
        metrics: names; None means those of `specbench.metrics.catalog.default_metrics`, where they can score any of
            the run's prompts and can be had.
        where_they_fit: further metrics, which are left out of runs that they cannot score instead of refused.
        bundled_only: with no metrics, only those that need no download.
    """
    reporter = reporter or ScoreReporter()
    bundled = metric_catalog.bundled_metrics()
    defaults = [bundled if bundled_only else metric_catalog.default_metrics(images.model) for images in shown]
    by_images = defaults if metrics is None else [metrics] * len(shown)
    required = _made(metrics or (), settings)
    made = required | _made([*chain(*by_images), *where_they_fit], settings)
    unfit = [_unfit_for(images, required.values()) for images in shown if metrics is not None]
    if unfit and all(unfit):  # before anything is computed
        raise unfit[0][0]
    problems += chain(*unfit)
    fitting = []
    for images, names in zip(shown, by_images, strict=True):
        wanted = {*names, *_made(where_they_fit, settings), *required}  # a reference is made under its own name
        fitting.append({name: one for name, one in made.items() if name in wanted and any(_accepted(images.rows, one))})
    pairs = [(images, metric) for images, own in zip(shown, fitting, strict=True) for metric in own.values()]
    for name in dict.fromkeys(metric.name for images, metric in pairs if _had_other_code(images, metric)):
        said = "it scores anew, and the scores of before stay in a column of their own"
        reporter.note(f"the code of {name} has changed: {said}")
    lacking = _fetch(shown, fitting, settings, reporter)
    if metrics is not None or all(name in lacking for own in fitting for name in own):
        problems += lacking.values()
    outcomes = []
    for images, own in zip(shown, fitting, strict=True):
        had = [metric for name, metric in own.items() if name not in lacking]
        while True:
            try:
                outcomes += score_together(images, had, reporter)
                break
            except PluginError as error:  # the other metrics can do without it
                problems.append(copy(error))  # without the traceback, which holds what was allocated
                had = [metric for metric in had if metric.name != error.owner]
            except SpecbenchError as error:
                if error.exit_code == MISSING_PREREQUISITE:  # which other runs lack as well
                    raise
                problems.append(error)
                break
        for name in [name for name in own if name in lacking]:
            reporter.left_out(images.name, name, f"{name} is left out: {lacking[name]}")
            outcomes.append(Scored(images.name, name, 0, 0, lacking[name].what))
    return outcomes


def _fetch(
    shown: Sequence[Images], fitting: Sequence[Mapping[str, Metric]], settings: Settings | None, reporter: ScoreReporter
) -> dict[str, SpecbenchError]:
    """Download what metrics need, all of it together, after a line that says what is done; return why some cannot be
    had. `fitting`: metrics that score each of the `shown` images."""
    metrics, device = {name: metric for own in fitting for name, metric in own.items()}, (settings or Settings()).device
    absent = {name: missing for name, metric in metrics.items() if (missing := metric.missing_packages())}
    if settings and settings.offline:
        absent |= {name: missing for name, metric in metrics.items() if (missing := metric.missing())}
    lacking = {name: SpecbenchError(*missing[0], MISSING_PREREQUISITE) for name, missing in absent.items()}
    wanted = {name: metric for name, metric in metrics.items() if name not in lacking}

    def announce(needed: Mapping[str, Sequence[Download]]) -> None:
        if needed:
            reporter.note(f"scoring {counted(len(shown), 'run')} on {device}: {', '.join(needed)}")

    return lacking | fetch_what_can_be_had({name: metric.downloads for name, metric in wanted.items()}, announce)


def _had_other_code(images: Images, metric: Metric) -> bool:
    """Whether a plug-in's metric has scores of these images by other code alone."""
    if getattr(metric, "class_reference", None) is None:
        return False
    try:
        with _blamed(metric):
            mine = whole_identity(metric)
        stored = [json.loads(row["identity"]) for row in read_scores(images.folder) if row["metric"] == metric.name]
    except SpecbenchError:  # told where it is scored
        return False
    same = [one.get("code") for one in stored if {**one, "code": None} == {**mine, "code": None}]
    return bool(same) and mine["code"] not in same


def _made(names: Iterable[str], settings: Settings | None) -> dict[str, Metric]:
    """Metrics by their names, which differ from those given for "package.module:NAME"."""
    made = {}
    for name in names:
        metric = metric_catalog.metric(name)(settings)
        made[metric.name] = metric
    return made


def _blamed(metric: Metric) -> AbstractContextManager:
    return naming_plugin("metric", metric.name, type(metric).__module__)


def _unfit_for(images: Images, metrics: Iterable[Metric]) -> list[SpecbenchError]:
    """Why each of the metrics that cannot score any of these images cannot."""
    return [
        SpecbenchError(
            f"metric '{metric.name}' cannot score {images.name}: {_unfit(images)}",
            "omit --metric to score with the metrics that fit",
        )
        for metric in metrics
        if not any(_accepted(images.rows, metric))
    ]


def joint_problem(problems: Sequence[SpecbenchError], others: bool) -> SpecbenchError:
    """One error for all `problems` of scoring, which say so if `others` were scored."""
    first, more = min(problems, key=lambda one: not isinstance(one, PluginError)), len(problems) - 1
    what = first.what + (f"; and {more} more problem{'s' if more > 1 else ''}" if more else "")
    if not others:
        return SpecbenchError(what, first.try_this, first.exit_code)
    return SpecbenchError(what, "; ".join(filter(None, ("the other runs are scored", first.try_this))), PARTIAL)


def run_images(folder: Path) -> Images:
    """List the images of a run."""
    store = RunStore(folder)
    info = store.info()
    if RANDOM in info.spec.model:
        what = f"{info.run_id}: {info.spec.model} has random weights, so its images mean nothing"
        raise SpecbenchError(what, "name the runs to score")
    rows = store.samples(["prompt", "category", "meta", "status", "started_at", "image", "image_sha256"])
    rows = rows[(rows["status"] == "ok") & rows["image"].notna()]
    folder = Path(folder)
    rows = rows.assign(path=[folder / image for image in rows["image"]])
    if info.spec.model == "shapes":
        rows["meta"] = [with_scene(prompt, meta) for prompt, meta in zip(rows["prompt"], rows["meta"], strict=True)]
        rows["category"] = rows["category"].fillna(OWN_CAPTIONS)
    read = lambda row: read_image(folder, row.image, row.image_sha256)  # noqa: E731
    return Images(info.run_id, folder, rows, read, info.spec.model)


OWN_CAPTIONS = "own captions"  # Category of captions of `shapes` in somebody's own file, where it names none


def with_scene(prompt: str, meta: object) -> object:
    """The metadata of a caption of `shapes`, with the scene that it means where somebody's own file names none."""
    known = read_meta(meta)
    try:
        return meta if "scene" in known else json.dumps(known | {"scene": parse(prompt).to_json()})
    except SpecbenchError:  # words of the model that make no caption
        return meta


def score_with(images: Images, metric: Metric, reporter: ScoreReporter | None = None) -> Scored:
    """Score images with one metric, see `score_together`."""
    return score_together(images, [metric], reporter)[0]


def score_together(images: Images, metrics: Sequence[Metric], reporter: ScoreReporter | None = None) -> list[Scored]:
    """Score images with several metrics, only what is missing. Each image is read and decoded once for all of them.
    Returns one outcome per metric; a metric that accepts none of the images is skipped."""
    reporter = reporter or ScoreReporter()
    rows = images.rows.reset_index(drop=True)
    wanted = {
        metric.name: rows.loc[list(_accepted(rows, metric)), [*KEY, "started_at", "prompt"]] for metric in metrics
    }
    fitting = [metric for metric in metrics if len(wanted[metric.name])]
    logs = []
    for metric in fitting:
        metric.prepare()
        with _blamed(metric):
            logs.append(feature_parts(images.folder, metric))
    with writing(images.folder, logs) if logs else nullcontext():
        tasks = [_task(metric, wanted[metric.name], log) for metric, log in zip(fitting, logs, strict=True)]
        for task in tasks:
            reporter.start(images.name, task.metric.name, len(task.wanted), len(task.wanted) - len(task.missing))
        try:
            names = ", ".join(task.metric.name for task in tasks)
            device = next((one.settings.device for one in fitting if hasattr(one, "settings")), "cpu")
            with memory_for(
                f"scoring by {names}", device, "fewer metrics at a time, a smaller --batch, or --device cpu"
            ):
                _add_features(images, rows, tasks, reporter)
        finally:
            for task in tasks:
                reporter.finish(images.name, task.metric.name)
        for task in tasks:
            metric, accepted = task.metric, task.wanted
            with _blamed(metric):
                task.log.compact()
                stale = task.missing or task.known != len(accepted)
                if stale or not scores_are_current(images.folder, metric, accepted):
                    write_run_scores(images.folder, metric, accepted)
    outcomes = {task.metric.name: task.outcome(images.name) for task in tasks}
    skipped = {name: Scored(images.name, name, 0, 0, _unfit(images)) for name in wanted}
    return list((skipped | outcomes).values())


@dataclass(frozen=True)
class _Task:
    """Work of one metric on a set of images."""

    metric: Metric
    wanted: pd.DataFrame  # key and `started_at` of the images that it accepts
    missing: frozenset[int]  # row numbers of those without features
    known: int  # number of images whose features are kept, with those of images that are no longer wanted
    log: ImageScores  # of its features

    def outcome(self, name: str) -> Scored:
        return Scored(name, self.metric.name, len(self.missing), len(self.wanted) - len(self.missing))


def _task(metric: Metric, wanted: pd.DataFrame, log: ImageScores) -> _Task:
    known = set(log.read(["started_at"]).to_pandas().itertuples(index=False, name=None))
    missing = (row.Index for row in wanted.itertuples() if (row.prompt_id, row.sample, row.started_at) not in known)
    return _Task(metric, wanted, frozenset(missing), len(known), log)


class _Image(NamedTuple):
    """Image that was read: its row, and by metric the sample with the network's input."""

    row: Any
    samples: Mapping[str, Sample]


def _add_features(images: Images, rows: pd.DataFrame, tasks: Sequence[_Task], reporter: ScoreReporter) -> None:
    """Compute and store the missing features."""
    missing = frozenset().union(*(task.missing for task in tasks))
    busy = [task for task in tasks if task.missing]
    todo = [row for row in rows.itertuples() if row.Index in missing]

    def load(row: Any) -> _Image:
        # The first image is prepared for every metric: `read_ahead` loads it alone, so that each makes once what it
        # makes only once, for example its network.
        needing = [task.metric for task in busy if row.Index in task.missing or row is todo[0]]
        return _Image(row, _samples(images.read(row), row, needing))

    batches: Iterator[list[_Image]] = read_ahead(load, todo, max((task.metric.batch for task in busy), default=1))
    for loaded in batches:
        for task in busy:
            own = [image for image in loaded if image.row.Index in task.missing]
            for start in range(0, len(own), task.metric.batch):
                chunk = own[start : start + task.metric.batch]
                with _blamed(task.metric):
                    task.log.append(_feature_rows(task.metric, chunk))
                for _ in chunk:
                    reporter.image(images.name, task.metric.name)


def _samples(pixels: np.ndarray, row: Any, metrics: Sequence[Metric]) -> dict[str, Sample]:
    about = (row.prompt_id, int(row.sample), row.prompt, _text(row.category), read_meta(row.meta), pixels)
    return {metric.name: Sample(*about, metric.preprocess(pixels)) for metric in metrics}


def _feature_rows(metric: Metric, images: Sequence[_Image]) -> Iterator[dict[str, object]]:
    samples = [image.samples[metric.name] for image in images]
    features = metric.features(samples)
    if len(features) != len(samples):
        raise ValueError(f"features of {len(features)} images instead of {len(samples)}")
    for (row, _), sample, kept in zip(images, samples, features, strict=True):
        yield {
            **kept,
            "prompt_id": row.prompt_id,
            "sample": row.sample,
            "started_at": row.started_at,
            "category": sample.category,
        }


def _accepted(rows: pd.DataFrame, metric: Metric) -> Iterator[bool]:
    """Tell of each image whether a metric can score it."""
    return (bool(metric.accepts(_text(row.category), read_meta(row.meta))) for row in rows.itertuples())


def _unfit(images: Images) -> str:
    """Reason why a metric scores none of the images."""
    return "its prompts lack what the metric needs" if len(images.rows) else "it has no images"


def _text(value: object) -> str | None:
    return value if isinstance(value, str) else None
