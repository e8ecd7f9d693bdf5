"""Score stored images: compute features per image, once per feature fingerprint, then the run's scores. Features are
stored during the pass over the images, with the `started_at` of each row: an image decoded again is scored again."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from copy import copy
from dataclasses import dataclass, replace
from functools import cache
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd

from specbench.errors import MISSING_PREREQUISITE, PARTIAL, SpecbenchError, chosen
from specbench.metrics import catalog as metric_catalog
from specbench.metrics import score_store
from specbench.metrics.base import Metric, Sample, Settings, made_score, read_ahead
from specbench.metrics.reference import ReferenceImages
from specbench.models.facts import RANDOM
from specbench.models.shapes.captions import parse
from specbench.store.image_scores import ImageScores, owner_of
from specbench.store.run_store import RunStore, read_image
from specbench.store.schema import KEY, RowStatus, read_meta
from specbench.system.console import counted
from specbench.system.device_failures import memory_for
from specbench.system.downloads import Download, fetch_what_can_be_had
from specbench.system.plugins import PluginError, naming_plugin


@dataclass(frozen=True)
class Images:
    """Images to score, and the folder that stores their scores."""

    name: str  # name of the run, or of the folder of external images
    folder: Path  # folder in which `scores` is created
    # `prompt_id, sample, prompt, category, meta` (JSON), `path`, other inputs of `read`, and `started_at`, which
    # changes if the image may have changed
    rows: pd.DataFrame
    read: Callable[..., np.ndarray]  # function that returns the pixels of a row's image, uint8 [H, W, 3]
    model: str = ""  # model that made the images; empty for external images


@dataclass(frozen=True)
class ScoreOutcome:
    """Outcome of scoring a run with a metric: counts of images, or the problem."""

    run_id: str
    metric: str = ""  # empty if the problem concerns the whole run
    computed: int = 0  # number of images scored by this call
    reused: int = 0  # number of images scored earlier
    problem: SpecbenchError | None = None
    left_out: bool = False  # True: `problem` is not raised (the user did not name the metric; other metrics scored)


@dataclass(frozen=True)
class Scoring:
    """Result of a call of `score`."""

    outcomes: list[ScoreOutcome]
    images: list[Images]  # images of the readable runs
    reference: Path | None = None  # the user's reference images

    def __iter__(self) -> Iterator[ScoreOutcome]:
        return iter(self.outcomes)

    @property
    def problems(self) -> list[SpecbenchError]:
        """Distinct reasons why images were not scored."""
        problems = {id(outcome.problem): outcome.problem for outcome in self.outcomes if not outcome.left_out}
        return [problem for problem in problems.values() if problem]

    def problem(self) -> SpecbenchError | None:
        """Combine all `problems` into one error, plug-ins first; its hint states if other metrics are scored. None
        without problems."""
        if not (problems := sorted(self.problems, key=lambda problem: not isinstance(problem, PluginError))):
            return None
        first, more = problems[0], len(problems) - 1
        what = first.what + (f"; and {more} more problem{'s' if more > 1 else ''}" if more else "")
        if not self.scored:
            return SpecbenchError(what, first.try_this, first.exit_code)
        return SpecbenchError(what, "; ".join(filter(None, ("all other scores are stored", first.try_this))), PARTIAL)

    @property
    def scored(self) -> bool:
        return any(outcome.problem is None for outcome in self.outcomes)

    def check(self, partly: bool = False) -> Scoring:
        """Raise `problem()` if there is one; if `partly`, only if nothing was scored."""
        if (problem := self.problem()) and not (partly and self.scored):
            raise problem
        return self

    def rows(self) -> list[dict[str, object]]:
        """Return all stored scores of the images, as dicts. If the user's reference failed, distances to other
        references are left out."""
        failed = {outcome.run_id for outcome in self.outcomes if outcome.problem and self.reference}
        return [
            {**owner_of(images.folder), "run_id": images.name, **row}
            for images in self.images
            for row in score_store.scores_to_show(images.folder, images.rows["prompt_id"])
            if images.name not in failed or "reference" not in json.loads(row["identity"])
        ]


class ScoreReporter:
    """Progress callbacks of scoring; no-ops by default. Implementations must be fast and must not raise."""

    def note(self, text: str) -> None:
        """Show a line to the user."""

    def start(self, name: str, metric: str, total: int, done: int) -> None:
        """Scoring of `total` images by `metric` begins; `done` of them are already scored."""

    def image(self, name: str, metric: str) -> None:
        """One image was scored."""

    def finish(self, name: str, metric: str) -> None:
        """Scoring ended, by completion or by an error."""


def score(
    runs: Iterable[Path | Images],
    metrics: str | Metric | Sequence[str | Metric] | None = None,
    settings: Settings | None = None,
    reporter: ScoreReporter | None = None,
    where_they_fit: Sequence[str] = (),
    bundled_only: bool = False,
    protocol: str | None = None,
) -> Scoring:
    """Score run folders or external images. Networks stay loaded until the last image is scored.

    Arguments are as for `specbench.score`, except that () as metrics means none. `where_they_fit`: further
    metrics; like the metrics of `protocol`, they skip runs that they cannot score.

    Raises:
        SpecbenchError: a problem that prevents the scoring of every run; other problems are outcomes.
    """
    reporter, named = reporter or ScoreReporter(), metrics is not None or protocol is not None
    make = cache(lambda name: metric_catalog.metric(name)(settings))
    listed = chosen("metric", metrics)
    required = [metric if isinstance(metric, Metric) else make(metric) for metric in listed]
    added = [make(name) for name in (*where_they_fit, *(metric_catalog.find_protocol(protocol) if protocol else ()))]
    takers = [metric for metric in (*required, *added) if metric.kind == "distance" or metric.class_reference]
    if named and settings and settings.reference and not takers:
        raise SpecbenchError("--reference: no chosen metric uses reference images", "omit it, or choose a distance")
    defaults = (lambda model: metric_catalog.bundled_metrics()) if bundled_only else metric_catalog.default_metrics

    def fitting_metrics(images: Images) -> dict[str, Metric]:
        candidates = [*(required if named else map(make, defaults(images.model))), *added]
        return {metric.name: metric for metric in candidates if why_unfit(images, metric) is None}

    shown, outcomes = _readable(runs)
    fitting = [(images, fitting_metrics(images)) for images in shown]
    outcomes += _refused(fitting, required)
    lacking = _fetch(fitting, settings, reporter)
    _tell_edited(fitting, reporter)
    lacking |= _say_references(fitting, lacking, reporter)
    left_out = not named and any(name not in lacking for _, fits in fitting for name in fits)
    for images, fits in fitting:
        absent = {name: lacking[name] for name in fits if name in lacking}
        outcomes += [ScoreOutcome(images.name, name, problem=why, left_out=left_out) for name, why in absent.items()]
        outcomes += _score_images(images, [metric for name, metric in fits.items() if name not in absent], reporter)
        for name, why in absent.items():
            reporter.note(f"{name} is not computed: {why}")
    return Scoring(outcomes, shown, settings.reference if settings else None)


def _readable(runs: Iterable[Path | Images]) -> tuple[list[Images], list[ScoreOutcome]]:
    """Return the images of the readable runs, and the problems of the unreadable runs."""
    shown, outcomes = [], []
    for run in runs:
        try:
            shown.append(run if isinstance(run, Images) else run_images(run))
        except SpecbenchError as error:
            outcomes.append(ScoreOutcome(run.name, problem=error))
    return shown, outcomes


def _score_images(images: Images, metrics: Sequence[Metric], reporter: ScoreReporter) -> list[ScoreOutcome]:
    """Score images with metrics that apply to them. If a plug-in fails, continue with the other metrics."""
    lacking = {metric.name: problem for metric in metrics if (problem := _too_few_samples(images, metric))}
    failed = [ScoreOutcome(images.name, name, problem=problem) for name, problem in lacking.items()]
    metrics = [metric for metric in metrics if metric.name not in lacking]
    while True:
        try:
            return failed + _score_together(images, metrics, reporter)
        except PluginError as error:
            # A copy, because the traceback would keep tensors alive.
            failed.append(ScoreOutcome(images.name, error.owner, problem=copy(error)))
            metrics = [metric for metric in metrics if metric.name != error.owner]
        except SpecbenchError as error:
            if error.exit_code == MISSING_PREREQUISITE:  # other runs have the same problem
                raise
            return [*failed, ScoreOutcome(images.name, problem=error)]


def _too_few_samples(images: Images, metric: Metric) -> SpecbenchError | None:
    """Return the error for a metric that needs several samples of a prompt, if no prompt has enough samples."""
    if (needed := metric.samples) == 1:
        return None
    if images.rows["prompt_id"][[*_accepted(images.rows, metric)]].value_counts().max() >= needed:
        return None
    what = f"metric '{metric.name}' needs {needed} samples per prompt"
    return SpecbenchError(what, f"run with --samples {needed} or more")


_Fitting = Sequence[tuple[Images, Mapping[str, Metric]]]  # (images, {name: metric that can score them})


def _refused(fitting: _Fitting, required: Sequence[Metric]) -> list[ScoreOutcome]:
    """Return the problems of required metrics that cannot score a run; if all runs have problems, raise the first."""
    unfit = [[(images, metric) for metric in required if metric.name not in fits] for images, fits in fitting]
    refused = []
    for images, metric in chain(*unfit):
        what = f"metric '{metric.name}' cannot score {images.name}: {why_unfit(images, metric)}"
        problem = SpecbenchError(what, "omit --metric to score with the metrics that fit")
        if all(unfit):  # raise before anything is computed
            raise problem
        refused.append(ScoreOutcome(images.name, metric.name, problem=problem))
    return refused


def _tell_edited(fitting: _Fitting, reporter: ScoreReporter) -> None:
    """Print a note on each metric whose code has changed since it scored some of the images."""
    pairs = [(images, metric) for images, fits in fitting for metric in fits.values()]
    for name in dict.fromkeys(metric.name for images, metric in pairs if _had_other_code(images, metric)):
        kept = "images are scored again; earlier scores keep a separate column"
        reporter.note(f"the code of {name} has changed: {kept}")


def _fetch(fitting: _Fitting, settings: Settings | None, reporter: ScoreReporter) -> dict[str, SpecbenchError]:
    """List and download the files of all metrics. Return {metric: error} of failed downloads."""
    metrics = {name: metric for _, fits in fitting for name, metric in fits.items()}
    device = (settings or Settings()).device
    absent = {name: missing for name, metric in metrics.items() if (missing := metric.missing_packages())}
    if settings and settings.offline:
        absent |= {name: missing for name, metric in metrics.items() if (missing := metric.missing())}
    lacking = {name: SpecbenchError(*missing[0], MISSING_PREREQUISITE) for name, missing in absent.items()}
    ready = {name: metric for name, metric in metrics.items() if name not in lacking}

    def announce(needed: Mapping[str, Sequence[Download]]) -> None:
        if needed:
            reporter.note(f"scoring {counted(len(fitting), 'run')} on {device}: {', '.join(needed)}")

    return lacking | fetch_what_can_be_had({name: metric.downloads for name, metric in ready.items()}, announce)


def _say_references(
    fitting: _Fitting, lacking: Mapping[str, SpecbenchError], reporter: ScoreReporter
) -> dict[str, SpecbenchError]:
    """Report the number of reference images and the fingerprints of the scores. Return {metric: error} if a reference
    is unusable; raise the error if the user gave this reference."""
    metrics = {name: metric for _, fits in fitting for name, metric in fits.items() if name not in lacking}
    lines: dict[str, list[str]] = {}
    unusable = {}
    for name, metric in metrics.items():
        if isinstance(reference := getattr(metric, "reference", None), ReferenceImages):
            try:
                with _blamed(metric):
                    digest = made_score(metric).fingerprint  # error if statistics do not suffice
                lines.setdefault(reference.summary, []).append(digest)
            except SpecbenchError as error:
                if reference.path:
                    raise
                unusable[name] = error
    for line, digests in lines.items():
        reporter.note(f"{line} ({', '.join(digests)})")
    return unusable


def _had_other_code(images: Images, metric: Metric) -> bool:
    """Return whether a plug-in's metric has scored these images, but only with earlier versions of its code."""
    if metric.class_reference is None:
        return False
    try:
        with _blamed(metric):
            mine = made_score(metric).facts
        scores = score_store.read_scores(images.folder)
        stored = [json.loads(row["identity"]) for row in scores if row["metric"] == metric.name]
    except SpecbenchError:  # reported when the metric is computed
        return False
    codes = [facts.get("code") for facts in stored if {**facts, "code": None} == {**mine, "code": None}]
    return bool(codes) and mine["code"] not in codes


def _blamed(metric: Metric) -> AbstractContextManager[None]:
    return naming_plugin("metric", metric.name, type(metric).__module__)


def why_unfit(images: Images, metric: Metric) -> str | None:
    """Return the reason why a metric cannot score any of the images; None if it can score an image."""
    if any(_accepted(images.rows, metric)):
        return None
    return "its prompts lack data that the metric needs" if len(images.rows) else "it has no images"


def run_images(folder: Path) -> Images:
    store = RunStore(folder)
    info = store.info()
    model = info.spec.model
    if RANDOM in model:
        what = f"{info.run_id}: {model} has random weights, so scores of its images are meaningless"
        raise SpecbenchError(what, "name the runs to score")
    rows = store.samples(["prompt", "category", "meta", "status", "started_at", "image", "image_sha256"])
    rows = rows[(rows["status"] == RowStatus.OK) & rows["image"].notna()]
    rows = rows.assign(path=[folder / image for image in rows["image"]])
    if model == "shapes":
        rows["meta"] = [with_scene(prompt, meta) for prompt, meta in zip(rows["prompt"], rows["meta"], strict=True)]
        rows["category"] = rows["category"].fillna(OWN_CAPTIONS)
    return Images(info.run_id, folder, rows, lambda row: read_image(folder, row.image, row.image_sha256), model)


OWN_CAPTIONS = "own captions"  # Category for captions of `shapes` from a user's file without categories


def with_scene(prompt: str, meta: object) -> object:
    """Return the metadata of a caption of `shapes`. If a user's file has no scene, parse the scene from the caption."""
    content = read_meta(meta)
    try:
        return meta if "scene" in content else json.dumps(content | {"scene": parse(prompt).to_json()})
    except SpecbenchError:  # all words are known, but it is no caption of `shapes`
        return meta


def _score_together(images: Images, metrics: Sequence[Metric], reporter: ScoreReporter) -> list[ScoreOutcome]:
    """Compute the missing features and scores. Each image is read and decoded once for all metrics."""
    if not metrics:
        return []
    rows, logs = images.rows.reset_index(drop=True), []
    for metric in metrics:
        metric.prepare()
        with _blamed(metric):
            logs.append(score_store.feature_parts(images.folder, metric))
    with score_store.writing(images.folder, logs):
        tasks = [_task(metric, rows, log) for metric, log in zip(metrics, logs, strict=True)]
        for task in tasks:
            reporter.start(images.name, task.metric.name, len(task.images), len(task.images) - len(task.missing))
        with _pinned(tasks):
            try:
                names = ", ".join(task.metric.name for task in tasks)
                advice = "use fewer metrics at a time, a smaller --batch, or --device cpu"
                with memory_for(f"scoring by {names}", metrics[0].settings.device, advice):
                    _add_features(images, rows, tasks, reporter)
            finally:
                for task in tasks:
                    reporter.finish(images.name, task.metric.name)
            return [_finished(images, task) for task in tasks]


def _pinned(tasks: Sequence[_Task]) -> AbstractContextManager[None]:
    """Context with torch's state for features and distances; no-op if there is nothing to compute."""
    if not any(task.missing for task in tasks):
        return nullcontext()
    from specbench.system.torch_state import PinnedTorch  # brings torch

    return PinnedTorch(False)


def _finished(images: Images, task: _Task) -> ScoreOutcome:
    """Compute and store a metric's scores from its stored features. An error does not affect other metrics."""
    outcome = ScoreOutcome(images.name, task.metric.name, len(task.missing), len(task.images) - len(task.missing))
    try:
        with _blamed(task.metric):
            task.log.compact()
            stale = task.missing or task.kept != len(task.images)
            if stale or not score_store.scores_are_current(images.folder, task.metric, task.images):
                score_store.write_run_scores(images.folder, task.metric, task.images)
    except SpecbenchError as error:
        if isinstance(error, PluginError) or error.exit_code == MISSING_PREREQUISITE:
            raise
        return replace(outcome, problem=copy(error))
    return outcome


@dataclass(frozen=True)
class _Task:
    """The work that one metric has to do on a set of images."""

    metric: Metric
    images: pd.DataFrame  # key and `started_at` of the images that the metric accepts
    missing: frozenset[int]  # row numbers of images without features
    kept: int  # number of images with stored features, including images that are no longer requested
    log: ImageScores  # log of the metric's features


def _task(metric: Metric, rows: pd.DataFrame, log: ImageScores) -> _Task:
    accepted = rows.loc[list(_accepted(rows, metric)), [*KEY, "started_at", "prompt"]]
    stored = set(log.read(["started_at"]).to_pandas().itertuples(index=False, name=None))
    missing = (row.Index for row in accepted.itertuples() if (row.prompt_id, row.sample, row.started_at) not in stored)
    return _Task(metric, accepted, frozenset(missing), len(stored), log)


def _add_features(images: Images, rows: pd.DataFrame, tasks: Sequence[_Task], reporter: ScoreReporter) -> None:
    """Compute and store the missing features."""
    missing = frozenset().union(*(task.missing for task in tasks))
    busy = [task for task in tasks if task.missing]
    todo = [row for row in rows.itertuples() if row.Index in missing]

    def load(row: Any) -> tuple[Any, dict[str, Sample]]:
        # `read_ahead` loads the first image alone. Every metric preprocesses this image, so that each metric creates
        # shared objects, such as its network, only once.
        needing = [task.metric for task in busy if row.Index in task.missing or row is todo[0]]
        return row, _samples(images.read(row), row, needing)

    for loaded in read_ahead(load, todo, max((task.metric.batch for task in busy), default=1)):
        for task in busy:
            lacking = [(row, samples[task.metric.name]) for row, samples in loaded if row.Index in task.missing]
            for start in range(0, len(lacking), task.metric.batch):
                chunk = lacking[start : start + task.metric.batch]
                with _blamed(task.metric):
                    task.log.append(_feature_rows(task.metric, chunk))
                for _ in chunk:
                    reporter.image(images.name, task.metric.name)


def _samples(pixels: np.ndarray, row: Any, metrics: Sequence[Metric]) -> dict[str, Sample]:
    about = (row.prompt_id, int(row.sample), row.prompt, _text(row.category), read_meta(row.meta), pixels)
    return {metric.name: Sample(*about, metric.preprocess(pixels)) for metric in metrics}


def _feature_rows(metric: Metric, images: Sequence[tuple[Any, Sample]]) -> Iterator[dict[str, object]]:
    if len(features := metric.features([sample for _, sample in images])) != len(images):
        raise ValueError(f"features of {len(features)} images instead of {len(images)}")
    for (row, sample), kept in zip(images, features, strict=True):
        about = {"started_at": row.started_at, "category": sample.category}
        yield {**kept, "prompt_id": row.prompt_id, "sample": row.sample, **about}


def samples_of(images: Images, metric: Metric) -> list[Sample]:
    """Return the images that a metric can score."""
    rows = images.rows[[*_accepted(images.rows, metric)]]
    return [_samples(images.read(row), row, [metric])[metric.name] for row in rows.itertuples()]


def _accepted(rows: pd.DataFrame, metric: Metric) -> Iterator[bool]:
    """Yield for each image whether a metric can score it."""
    return (bool(metric.accepts(_text(row.category), read_meta(row.meta))) for row in rows.itertuples())


def _text(value: object) -> str | None:
    return value if isinstance(value, str) else None
