"""Tiles of an image gallery: the image of a prompt and sample with its numbers and token maps; and the scores of single
images, as stored beside a run: the values behind a metric's mean."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import pandas as pd
import pyarrow as pa
import pyarrow.compute as pc

from specbench.errors import SpecbenchError
from specbench.metrics import catalog as metric_catalog
from specbench.metrics.score_store import image_values, read_scores
from specbench.reporting.maps import commit_steps, grid_of, origins
from specbench.stats import Estimate, mean_interval, without_few
from specbench.store.run_store import RunStore, read_image
from specbench.store.schema import KEY

_COLUMNS = (
    *("prompt", "status", "error", "nfe", "ar_ms", "image", "image_sha256"),
    *("forced", "committed_step", "accepted"),
)


@dataclass
class Tile:
    """One image of a run with its numbers.

    Attributes:
        problem: reason for a missing image.
        pixels: uint8 [H, W, 3].
        nfe: target forwards; None if nobody counted them.
        steps, origins: see `specbench.reporting.maps`; None if the token grid is unknown.
        scores: value by metric.
    """

    problem: str | None = None
    pixels: np.ndarray | None = None
    nfe: int | None = None
    step_compression: float | None = None
    latency_ms: float | None = None
    steps: np.ndarray | None = None
    origins: np.ndarray | None = None
    scores: Mapping[str, float] = field(default_factory=dict)


@dataclass(frozen=True)
class Shown:
    """Text and category of a prompt."""

    text: str
    category: str | None


def first_prompts(folder: Path, limit: int, sample: int = 0) -> dict[str, Shown]:
    """Read the prompts by prompt id of the first images of a run."""
    found: dict[str, Shown] = {}
    for piece in RunStore(folder).batches(["prompt", "category"]):
        rows = piece.filter(pc.equal(piece["sample"], sample)).slice(0, limit - len(found))
        columns = (rows[name].to_pylist() for name in ("prompt_id", "prompt", "category"))
        found |= {prompt: Shown(text, category) for prompt, text, category in zip(*columns, strict=True)}
        if len(found) >= limit:
            break
    return found


def tiles(folder: Path, prompts: Sequence[str], sample: int = 0) -> dict[str, Tile]:
    """Read the tiles of a run by prompt id; prompts without a row are absent."""
    rows = _rows(folder, prompts, sample)
    scores = _scores(folder, prompts, sample)
    return {row.prompt_id: _tile(folder, row, scores.get(row.prompt_id, {})) for row in rows.itertuples(index=False)}


def _rows(folder: Path, prompts: Sequence[str], sample: int) -> pd.DataFrame:
    found, missing = [], set(prompts)
    for piece in RunStore(folder).batches(_COLUMNS):
        here = pc.and_(pc.is_in(piece["prompt_id"], pa.array(prompts, pa.string())), pc.equal(piece["sample"], sample))
        rows = piece.filter(here).to_pandas()
        found.append(rows)
        missing -= set(rows["prompt_id"])
        if not missing:
            break
    return pd.concat(found, ignore_index=True) if found else pd.DataFrame(columns=[*KEY, *_COLUMNS])


def _tile(folder: Path, row, scores: Mapping[str, float]) -> Tile:
    if row.status != "ok":
        return Tile(problem=f"failed: {row.error}")
    if not isinstance(row.image, str) or not os.path.lexists(folder / row.image):
        return Tile(problem="no image file")
    pixels = read_image(folder, row.image, row.image_sha256)
    counted = not pd.isna(row.nfe)  # nobody counted the steps of another program's tokens
    grid = grid_of(row.forced, pixels.shape[:2]) if counted else None
    return Tile(
        pixels=pixels,
        nfe=int(row.nfe) if counted else None,
        step_compression=len(row.forced) / row.nfe if counted and row.nfe else None,
        latency_ms=None if pd.isna(row.ar_ms) else float(row.ar_ms),
        steps=commit_steps(row.committed_step, row.forced, grid) if grid else None,
        origins=origins(row.committed_step, row.forced, row.accepted, grid) if grid else None,
        scores=scores,
    )


def _scores(folder: Path, prompts: Sequence[str], sample: int) -> dict[str, dict[str, float]]:
    """Read per-image scores by prompt id and metric; metrics without per-image values are left out."""
    found: dict[str, dict[str, float]] = {}
    for name, values in values_per_image(folder).items():
        shown = values[values["prompt_id"].isin(prompts) & (values["sample"] == sample)]
        for row in shown.itertuples(index=False):
            found.setdefault(row.prompt_id, {})[name] = float(row.value)
    return found


def values_per_image(folder: Path) -> dict[str, pd.DataFrame]:
    """By metric, `prompt_id, sample, category, value` of each scored image; other metrics are left out."""
    found: dict[str, pd.DataFrame] = {}
    for name in dict.fromkeys(row["metric"] for row in read_scores(folder) if ":" not in str(row["metric"])):
        if name not in metric_catalog.metric_names():
            continue
        try:
            values = image_values(folder, metric_catalog.metric(name)())
        except SpecbenchError:  # the metric cannot be constructed on this machine
            continue
        if values is not None:
            found[str(name)] = values.dropna(subset=["value"])
    return found


def category_means(
    values: Mapping[str, Mapping[str, pd.DataFrame]], metric: str
) -> dict[str, dict[str, tuple[Estimate, int]]]:
    """By category and run, the mean of a metric with its number of images; no interval below `FEW_UNITS` prompts.

    Args:
        values: by run, what `values_per_image` returns.
    """
    means: dict[str, dict[str, tuple[Estimate, int]]] = {}
    for run, metrics in values.items():
        for category, rows in metrics[metric].groupby("category", sort=False) if metric in metrics else ():
            mean = mean_interval(rows["value"], rows["prompt_id"])
            means.setdefault(str(category), {})[run] = without_few(mean, rows["prompt_id"].nunique()), len(rows)
    return means
