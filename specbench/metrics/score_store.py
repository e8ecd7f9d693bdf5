"""Stored scores of runs (`scores/<metric>-<fingerprint>.parquet`): read, write, tabulate and subtract them. For scores
of single images see `specbench.store.image_scores`."""

import json
import os
import shutil
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, get_args

import pandas as pd
import pyarrow as pa
import pyarrow.parquet as pq

from specbench.errors import SpecbenchError, chosen
from specbench.metrics import base, catalog
from specbench.metrics.base import MEAN_OF_IMAGES, Kind, Metric, Settings, made_score
from specbench.metrics.geneval_rules import TAGS
from specbench.stats import (
    Better,
    Difference,
    Estimate,
    difference_to_show,
    mean_interval,
    prompts_for_change,
    without_few,
)
from specbench.store.image_scores import ImageScores, feature_place, owner_of, parquet_bytes, stored_values
from specbench.store.run_store import RunStore
from specbench.store.schema import KEY, OWNER, RUN_SCORES, with_units
from specbench.system import console
from specbench.system.files import blaming, files_named, read_regular, take_lock, write_atomically
from specbench.system.foreign_code import code_of
from specbench.system.json_values import parse_json
from specbench.system.plugins import path_component

_MAX_BYTES = 2**26
_SCORE_TYPES = {
    **dict.fromkeys(("metric", "fingerprint", "identity"), str),
    **dict.fromkeys(("value", "low", "high"), float | None),
    **dict.fromkeys(("n", "images"), int),
    "note": str | None,
    "cut": float | None,
    "edited": str | None,
    "prompts": int | None,
    **dict.fromkeys(("unit", "unjudged"), str | None),
}
_OVER_TAGS = ("geneval[hf-m2f]", "geneval[official]")
# Metrics of kind `proportions` in older files, which do not state the kind
_OLDER_KINDS = dict.fromkeys(("geneval", "shapes-detector"), "proportions")
_ONE_A_PROMPT = "dpg-bench[released]:"  # Prefix of scores that use only the last sample of each prompt


def read_scores(folder: Path) -> list[dict[str, Any]]:
    """Read the run-level scores in a run folder: a dict per score with the columns of `RUN_SCORES` except `OWNER`."""
    scores: list[dict[str, Any]] = []
    for path in files_named(folder / "scores", "*.parquet"):
        with blaming(path, "is damaged: not readable as scores", "delete it and score again"):
            table = pq.ParquetFile(pa.BufferReader(read_regular(path, _MAX_BYTES))).read()
            scores += [_known_score(row) for row in table.to_pylist()]
    return scores


def _known_score(row: dict[str, Any]) -> dict[str, Any]:
    """Validate a row of a run's scores; raise a ValueError if specbench did not write it. NaN means missing. Old files
    lack the last columns; then specbench's metrics have known values of `better` and `kind`, other metrics defaults."""
    row = dict.fromkeys(("note", "cut", "edited", "prompts", "unit", "unjudged", "better", "kind")) | row
    if row.get("metric") in catalog.METRICS:
        row["unjudged"] = catalog.METRICS[row["metric"]].unjudged or None
    row |= {name: None for name in ("value", "low", "high") if row.get(name) != row.get(name)}
    name = str(row.get("metric")).partition(":")[0].partition("[")[0]
    older = ("lower", "distance") if name in catalog.DISTANCES else ("higher", _OLDER_KINDS.get(name, "plain"))
    row |= {name: row[name] or value for name, value in zip(("better", "kind"), older, strict=True)}
    for name, values in (("better", get_args(Better)), ("kind", get_args(Kind))):
        if row[name] not in values:
            raise ValueError(f"{name} of the score {row['metric']} is {row[name]!r:.40}, not {' or '.join(values)}")
    for name, kind in _SCORE_TYPES.items():
        if not isinstance(row.get(name), kind):
            raise ValueError(f"column {name}")
    if not isinstance(facts := parse_json(row["identity"]), dict):
        raise ValueError("column identity")
    if row["kind"] == "proportions" and facts.get("score") == MEAN_OF_IMAGES:
        row["kind"] = "plain"  # a plug-in may declare `proportions` although its score is no mean over categories
    return {name: row[name] for name in (*_SCORE_TYPES, "better", "kind")}


def stored_directions(folders: Iterable[Path]) -> dict[str, Better]:
    """Return {score: which of its values are better} of the runs' scores."""
    return {score["metric"]: score["better"] for folder in folders for score in read_scores(folder)}


def scores_to_show(folder: Path, prompt_ids: pd.Series) -> list[dict[str, Any]]:
    """Read scores for tables, without intervals over too few prompts. Added keys: `too_few`, whether an interval was
    removed or is undefined; `prompts_needed`, number of prompts that detects a change of 2 %. Notes state the number of
    reference images. `prompt_ids`: prompt of each image of the run."""
    of_run, scores = prompt_ids.nunique(), read_scores(folder)
    for row in scores:
        prompts = row["prompts"]
        if prompts is None:
            per_prompt = 1 if row["metric"].startswith(_ONE_A_PROMPT) else len(prompt_ids) / max(1, of_run)
            prompts = min(row["n"] / max(1, per_prompt), of_run)  # `n` of older files may count answers
        shown = without_few(Estimate(row["value"], row["low"], row["high"]), prompts)
        row["prompts_needed"] = prompts_for_change(shown, prompts)
        if number := json.loads(row["identity"]).get("reference_n"):
            row["note"] = "; ".join(filter(None, (f"{number} reference images", row["note"])))
        row |= {"low": shown.low, "high": shown.high, "too_few": row["n"] == 1 or shown.low != row["low"]}
    return scores


def score_frame(rows: Sequence[Mapping[str, object]], long: bool) -> pd.DataFrame:
    """Make a DataFrame of scores: if `long`, one row per score; else one row per run, with `METRIC`, `METRIC_low`,
    `METRIC_high` and `METRIC_n`. If a metric has several fingerprints, these names include the fingerprint."""
    if long:
        names = dict.fromkeys([*OWNER, *RUN_SCORES.names, "too_few", "prompts_needed"])
        frame = pd.DataFrame(rows, columns=[*names])
        numbers = ("value", "low", "high", "cut", "prompts", "prompts_needed")
        return with_units(frame.astype(dict.fromkeys(numbers, float)), RUN_SCORES)
    ways = Counter(name for name, _ in {(row["metric"], row["fingerprint"]) for row in rows})
    several = {name for name, count in ways.items() if count > 1}
    wide: dict[object, dict[str, object]] = {}
    for row in rows:
        run = wide.setdefault(row["run_id"], {name: row[name] for name in OWNER})
        name = f"{row['metric']} ({row['fingerprint']})" if row["metric"] in several else row["metric"]
        run |= {f"{name}_{part}".removesuffix("_value"): row[part] for part in ("value", "low", "high", "n")}
    frame = pd.DataFrame([*wide.values()], columns=None if wide else [*OWNER])
    frame = frame.astype({name: float for name in frame if name not in OWNER})
    frame.attrs["units"] = {name: "images" for name in frame if str(name).endswith("_n")}
    return frame


def image_features(folder: Path, metric: Metric) -> pd.DataFrame:
    """Read the stored features of each scored image: key, category and the metric's columns."""
    return feature_parts(folder, metric).read().to_pandas()


def difference(folder: Path, baseline: Path, metric: Metric) -> dict[str, object] | None:
    """Compute the paired difference between the scores of a run and a baseline; None if no image is common. Return
    `run_id, baseline, metric, difference, low, high, p, spread, n, fingerprint`. Interval and p-value are None for too
    few prompts."""
    common = of_same_captions(folder, baseline)
    features, theirs = (_kept(image_features(path, metric), common) for path in (folder, baseline))
    if features.empty != theirs.empty:
        lacking = folder if features.empty else baseline
        what = f"{lacking.name} has no score of '{metric.name}' with fingerprint {made_score(metric).fingerprint}"
        raise SpecbenchError(what, f"score both runs again: specbench score --metric '{metric.name}'")
    pair = None if features.empty else metric.difference(features, theirs)
    if pair is None or pair[0].value != pair[0].value:  # NaN
        return None
    shown = difference_to_show(pair[0])
    row = {"run_id": folder.name, "baseline": baseline.name, "metric": metric.name, "difference": shown.value}
    row |= {"low": shown.low, "high": shown.high, "p": shown.p, "spread": shown.spread}
    return row | {"n": pair[1], "fingerprint": made_score(metric).fingerprint}


def named_metric(name: str, folders: Iterable[Path]) -> str:
    """Return the metric's name, see `catalog.require_metric`. If only stored scores of the runs have an unknown name,
    the error names the plug-in's class that computed them."""
    try:
        return catalog.require_metric(name)
    except SpecbenchError:
        reference = None
        with suppress(SpecbenchError):  # damaged scores of some run do not hide the unknown name
            scores = (score for folder in folders for score in read_scores(folder))
            known = (score["identity"] for score in scores if score["metric"].partition(":")[0] == name)
            reference = json.loads(next(known, "{}")).get("class")
        if reference is None:
            raise
    hint = f"use --metric {reference}; without the plug-in, `specbench compare` subtracts stored scores"
    raise SpecbenchError(f"metric '{name}' is not installed; {reference} computed these scores", hint)


def difference_rows(
    baseline: Path, folders: Sequence[Path], metrics: str | Iterable[str], settings: Settings | None = None
) -> list[dict[str, object]]:
    """Compute paired differences of runs from a baseline, see `specbench.differences`."""
    others = [folder for folder in folders if folder.resolve() != baseline.resolve()]
    if not (names := chosen("metric", metrics)):
        raise SpecbenchError("--against needs a metric", "name metrics with which both runs were scored")
    made = [catalog.metric(named_metric(name, (baseline, *others)))(settings) for name in names]
    rows = []
    for folder, metric in ((folder, metric) for folder in others for metric in made):
        if row := difference(folder, baseline, metric):
            rows.append(row)
        else:
            console.warn(f"{metric.name}: no paired difference of {folder.name} (specbench compare says why)")
    return rows


def of_same_captions(folder: Path, baseline: Path) -> pd.DataFrame | None:
    """Return the keys of images that have the same caption in two runs; None if both runs have the same prompt set."""
    stores = RunStore(folder), RunStore(baseline)
    if len({store.info().spec.prompts_sha256 for store in stores}) == 1:
        return None
    mine, theirs = (store.samples(["prompt"]) for store in stores)
    return mine.merge(theirs, on=[*KEY, "prompt"])[list(KEY)]


def _kept(features: pd.DataFrame, keys: pd.DataFrame | None) -> pd.DataFrame:
    return features if keys is None else features.merge(keys, on=list(KEY))


def is_mean_of_images(score: Mapping[str, object]) -> bool:
    """Return whether a score is the mean of the images' `value`, if `value` is stored. The class is not loaded."""
    known = score["metric"] in (*catalog.METRICS, *catalog.IMPORTED)
    return known or json.loads(str(score["identity"])).get("score") == MEAN_OF_IMAGES


def stored_difference(folder: Path, baseline: Path, score: Mapping[str, object]) -> tuple[Difference, int] | None:
    """Subtract a score of `baseline` from the same score of `folder`, over common images, from stored values only.
    Return the difference and the number of images; None if the score is no plain mean or values are missing."""
    if not is_mean_of_images(score):
        return None
    metric = str(score["metric"])
    stored = f"{metric}-{score['fingerprint']}"
    mine, theirs = (stored_values(feature_place(path, stored)) for path in (folder, baseline))
    if mine is None or theirs is None:
        return None
    common = of_same_captions(folder, baseline)
    mine, theirs = _kept(mine, common), _kept(theirs, common)
    tags = TAGS if metric in _OVER_TAGS else ()
    return base.column_difference(mine, theirs, "value", by_category=score["kind"] == "proportions", all_of=tags)


def pooled_score(folders: Sequence[Path], score: Mapping[str, object]) -> Estimate | None:
    """Compute a score over the images of several runs together, from stored values only. `score`: the score of a run.
    None if the score is not known to be a mean of stored values."""
    name, known = str(score["metric"]), is_mean_of_images(score)
    stored = [stored_values(feature_place(path, f"{name}-{score['fingerprint']}")) for path in folders if known]
    if not stored or any(values is None or values.empty for values in stored):
        return None
    values = pd.concat(stored).dropna(subset="value")  # DPG-Bench: no value for a question without an answer
    estimate = mean_interval(values["value"], values["prompt_id"])
    if score["kind"] == "proportions":
        estimate = base.category_scores(name, values, "value")[0].estimate
    return without_few(estimate, values["prompt_id"].nunique())


def scores_are_current(folder: Path, metric: Metric, images: pd.DataFrame) -> bool:
    """Return whether the stored scores are of exactly these `images`, so that they need not be computed again
    (distances take minutes). Scores that an older version stored as NaN instead of null are not current. Means of
    proportions are never current: they take milliseconds, and older versions stored other bounds."""
    path = _scores_file(folder, metric)
    try:
        rows = pq.ParquetFile(pa.BufferReader(read_regular(path, _MAX_BYTES))).read().to_pylist()
    except (pa.ArrowException, OSError, ValueError, SpecbenchError):
        return False
    parts = files_named(feature_parts(folder, metric).folder, "*.parquet")
    newest = max((part.stat().st_mtime_ns for part in parts), default=0)
    if not rows or any(rows[0].get(name) not in (None, fact) for name, fact in _declared(metric).items()):
        return False  # a notebook may have changed the direction of its class
    if metric.kind == "proportions":
        return False
    whole = all("cut" in row and row.get("value") == row.get("value") for row in rows)
    return whole and all(row.get("images") == len(images) for row in rows) and path.stat().st_mtime_ns > newest


def write_run_scores(folder: Path, metric: Metric, images: pd.DataFrame) -> None:
    """Compute the run's scores from the stored features of `images`, and write them."""
    features = image_features(folder, metric).merge(images[[*KEY, "started_at"]], on=[*KEY, "started_at"])
    digest, identity = made_score(metric).fingerprint, json.dumps(made_score(metric).facts, sort_keys=True)
    cut, reason = _cut(metric, images["prompt"].tolist())
    code, declared = code_of([metric.class_reference]), _declared(metric)
    rows = [
        {
            "metric": item.name,
            "value": item.estimate.value,
            "low": item.estimate.low,
            "high": item.estimate.high,
            "n": item.n,
            "note": "; ".join(filter(None, (item.note, reason))) or None,
            "fingerprint": digest,
            "identity": identity,
            "images": len(images),
            "cut": cut,
            "edited": code and code.edited,
            "better": item.better or declared["better"],
            "kind": item.kind or declared["kind"],
            "unit": declared["unit"] or None,
            "unjudged": declared["unjudged"] or None,
            "prompts": item.prompts or (features["prompt_id"].nunique() if item.n == len(features) else None),
        }
        for item in metric.scores(metric.statistics(features))
    ]
    # A plug-in's scores are checked before they are stored.
    checked = [_known_score(row) for row in pa.Table.from_pylist(rows, schema=RUN_SCORES).to_pylist()]
    for row in checked:
        whole = row["metric"].partition(":")[0]
        if whole != metric.name and (whole in catalog.METRICS or not path_component(whole)):
            raise ValueError(f"a score called {row['metric']!r:.100}")
    target = _scores_file(folder, metric)
    for leftover in files_named(target.parent, ".*.tmp"):  # left by a killed writer: this process holds the lock
        leftover.unlink()
    if checked:  # readers reject a file without rows
        owner = owner_of(folder)
        file = parquet_bytes(pa.Table.from_pylist([{**row, **owner} for row in checked], schema=RUN_SCORES))
        if not (target.is_file() and target.read_bytes() == file):
            write_atomically(target, file)
        return
    target.unlink(missing_ok=True)


def _declared(metric: Metric) -> dict[str, str]:
    """Return the facts that a metric declares to readers."""
    facts = {name: getattr(metric, name) for name in ("better", "kind", "unit", "unjudged")}
    if metric.name in catalog.METRICS:
        facts["unjudged"] = catalog.METRICS[metric.name].unjudged
    return facts


def _cut(metric: Metric, captions: Sequence[str]) -> tuple[float | None, str | None]:
    """Return the share of captions that the metric truncates (None if unknown), and a warning if it is not 0."""
    cut = metric.captions_cut(captions) if captions else None
    if cut is None or not cut[0]:
        return (None if cut is None else 0.0), None
    count, tokens = cut
    return count / len(captions), f"{count} of {len(captions)} captions are truncated, to {tokens} tokens"


def forget(folder: Path, metric: Metric) -> None:
    """Remove a metric's stored scores and features of all fingerprints from a run folder."""
    with writing(folder, ()):
        for path in (path for place in ("scores", "image_scores") for path in files_named(folder / place, "*-*")):
            if path.name.rpartition("-")[0] == metric.name:
                shutil.rmtree(path) if path.is_dir() else path.unlink()


def _scores_file(folder: Path, metric: Metric) -> Path:
    return folder / "scores" / f"{metric.name}-{made_score(metric).fingerprint}.parquet"


def feature_parts(folder: Path, metric: Metric) -> ImageScores:
    """Return the log of a metric's stored features of a run's images."""
    return ImageScores(folder, metric.name, base.made_features(metric).fingerprint, metric.columns)


@contextmanager
def writing(folder: Path, logs: Sequence[ImageScores]) -> Iterator[None]:
    """Lock the scores of a run against concurrent scorers, and prepare the logs of features for writing."""
    try:
        (folder / "scores").mkdir(parents=True, exist_ok=True)
        handle = take_lock(folder / "scores" / ".lock", f"{folder} is being scored by another process")
    except OSError as error:
        raise SpecbenchError(f"cannot write scores to {folder}: {error.strerror}") from error
    try:
        for log in logs:
            log.prepare()
        yield
    finally:
        os.close(handle)
