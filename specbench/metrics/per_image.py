"""Metrics whose score is the mean of one number per image."""

from __future__ import annotations

from typing import ClassVar

import pandas as pd
import pyarrow as pa

from specbench.metrics.base import Metric, Score, column_difference
from specbench.stats import Difference, mean_interval


class PerImageMetric(Metric):
    """Base class of metrics with one `value` per image; the score is their mean, its interval over prompts."""

    columns: ClassVar = {"value": pa.float32()}

    def scores(self, statistics: pd.DataFrame) -> list[Score]:
        if statistics.empty:
            return []
        values = statistics["value"].astype("float64")
        return [Score(self.name, mean_interval(values, statistics["prompt_id"]), len(statistics))]

    def difference(self, features: pd.DataFrame, baseline: pd.DataFrame) -> tuple[Difference, int] | None:
        return column_difference(features, baseline, "value")
