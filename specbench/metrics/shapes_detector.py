"""`shapes-detector`: share of images that match their caption, by the exact detector of the `shapes` world."""

from __future__ import annotations

import hashlib
import inspect
from collections.abc import Mapping, Sequence
from typing import ClassVar

import pandas as pd
import pyarrow as pa

from specbench.metrics.base import Metric, Sample, Score, column_difference
from specbench.metrics.shapes_requests import read_request
from specbench.models.shapes import detector, scene
from specbench.stats import Difference, mean_of_estimates, proportion_interval


class ShapesDetector(Metric):
    """Fraction of images that satisfy their caption, per category; overall score: mean over categories."""

    name = "shapes-detector"
    summary = "fraction of images that match their caption by the exact detector of `shapes`, mean over categories"
    batch = 16
    columns: ClassVar = {
        **dict.fromkeys(("correct", "shape", "color", "bound", "count", "position"), pa.bool_()),
        "objects": pa.int64(),
    }

    def identity(self) -> Mapping[str, str]:
        source = inspect.getsource(detector) + inspect.getsource(scene)
        return {"detector": hashlib.sha256(source.encode()).hexdigest()[:16], "image": "64x64, no resize"}

    def accepts(self, category: str | None, meta: Mapping[str, object]) -> bool:
        return read_request(meta) is not None

    def features(self, samples: Sequence[Sample]) -> list[dict[str, object]]:
        return [self._judge(sample) for sample in samples]

    def statistics(self, features: pd.DataFrame) -> dict[str, pd.DataFrame]:
        """Group the judgements by category."""
        return {str(category): group for category, group in features.groupby("category", sort=True, dropna=False)}

    def scores(self, statistics: Mapping[str, pd.DataFrame]) -> list[Score]:
        parts = [
            Score(
                f"{self.name}:{category}",
                proportion_interval(group["correct"], group["prompt_id"]),
                len(group),
            )
            for category, group in statistics.items()
        ]
        overall = mean_of_estimates([part.estimate for part in parts])
        return [Score(self.name, overall, sum(part.n for part in parts)), *parts]

    def difference(self, features: pd.DataFrame, baseline: pd.DataFrame) -> tuple[Difference, int] | None:
        return column_difference(features, baseline, "correct", over_categories=True)

    @staticmethod
    def _judge(sample: Sample) -> dict[str, object]:
        found = detector.detect(sample.pixels)
        verdict = detector.judge(read_request(sample.meta), found)
        return {**vars(verdict), "objects": len(found)}
