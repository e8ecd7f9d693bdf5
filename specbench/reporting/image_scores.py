"""Scores of single images, as stored beside a run: the values behind a metric's mean."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import pandas as pd

from specbench.errors import SpecbenchError
from specbench.metrics import catalog as metric_catalog
from specbench.metrics.score_store import image_values, read_scores
from specbench.stats import Estimate, mean_interval, without_few


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
