"""Conformance tests of a metric."""

import json
import math
import re
from collections.abc import Callable
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import pandas as pd
import pyarrow as pa

from specbench.checks.findings import SKIPPED, Finding, finding, run_tests
from specbench.metrics.base import Metric, Sample, Settings
from specbench.metrics.catalog import metric
from specbench.prompts import load_prompts
from specbench.system.console import counted
from specbench.system.images import png_bytes

_IMAGES = 6
_SHAPE = (64, 64, 3)
_RELATIVE = 1e-3  # Tolerance for rounding between an image's feature alone and in a batch


def metric_findings(name: str, prompts: str | None = None) -> list[Finding]:
    """Run every conformance test on a metric, with random images of the first prompts that it accepts and random
    reference images. `name`: from the catalogue, or "package.module:NAME". `prompts`: prompt set or file; "shapes" if
    None."""
    draw = np.random.default_rng(0)
    with TemporaryDirectory() as folder:
        for number in range(_IMAGES):
            (Path(folder) / f"{number}.png").write_bytes(png_bytes(draw.integers(0, 256, _SHAPE, np.uint8)))
        return _findings(lambda: metric(name)(Settings(reference=Path(folder))), prompts, draw)


def _findings(make: Callable[[], Metric], prompts: str | None, draw: np.random.Generator) -> list[Finding]:
    made = make()
    missing = made.missing()
    if missing:
        return [Finding("ready", SKIPPED, f"{missing[0][0]} ({missing[0][1]})")]
    candidates = load_prompts(prompts or "shapes").prompts
    accepted = [prompt for prompt in candidates if made.accepts(prompt.category, prompt.meta)]
    if not accepted:
        return [Finding("ready", SKIPPED, f"it accepts no prompt of '{prompts or 'shapes'}'; set --prompts")]
    samples = [
        Sample(prompt.id, sample, prompt.text, prompt.category, prompt.meta, draw.integers(0, 256, _SHAPE, np.uint8))
        for prompt in accepted[:_IMAGES]
        for sample in range(made.samples)
    ]
    made.prepare()
    return MetricChecks(made, make, samples).all_findings()


class MetricChecks:
    """Tests of a metric. Each is a method that returns a `Finding`. Features of an image must depend on that image
    only, and scores must follow the interface."""

    def __init__(self, made: Metric, make: Callable[[], Metric], samples: list[Sample]):
        self._metric, self._make, self._samples = made, make, samples

    def all_findings(self) -> list[Finding]:
        names = ("identity", "features", "batch", "scores", "difference")
        return run_tests((name, getattr(self, name)) for name in names)

    def identity(self) -> Finding:
        """The identity maps texts to texts and is the same for every instance of the metric."""
        identity, again = dict(self._metric.identity()), dict(self._make().identity())
        texts = all(isinstance(part, str) for pair in identity.items() for part in pair)
        wrong = ["identity() must map texts to texts"] * (not texts)
        wrong += ["two instances of the metric have different identity()"] * (identity != again)
        shown = re.sub(r"(sha256:[0-9a-f]{12})[0-9a-f]+", r"\1…", json.dumps(identity, default=str))
        return finding("identity", wrong, f"stable: {shown[:80]}")

    def features(self) -> Finding:
        """Features are one dict per image with the declared columns and types, and the pixels do not change."""
        before = [sample.pixels.copy() for sample in self._samples]
        rows = self._metric.features(self._samples)
        if len(rows) != len(self._samples):
            return finding("features", [f"{len(rows)} dicts for {len(self._samples)} images"], "")
        declared = set(self._metric.columns)
        wrong = [f"columns {sorted(row)} instead of {sorted(declared)}" for row in rows if set(row) != declared]
        changed = any((old != sample.pixels).any() for old, sample in zip(before, self._samples, strict=True))
        wrong += ["the metric changes its input pixels"] * changed
        pa.Table.from_pylist(rows, schema=pa.schema(list(self._metric.columns.items())))
        return finding("features", wrong, f"{', '.join(sorted(declared))} of each image")

    def batch(self) -> Finding:
        """Features of an image do not depend on other images of the batch."""
        together = self._metric.features(self._samples)
        alone = [self._metric.features([sample])[0] for sample in reversed(self._samples)][::-1]
        gap = max(_gap(row, other) for row, other in zip(together, alone, strict=True))
        wrong = [
            f"the features of an image change by {gap:.2g} of their size if the other images of the batch change"
        ] * (gap > _RELATIVE)
        return finding("batch", wrong, "the same features alone and in a batch")

    def scores(self) -> Finding:
        """The overall score is first, names of parts start with its name, and values are within their intervals."""
        scores = self._metric.scores(self._metric.statistics(self._frame()))
        if not scores:
            return finding("scores", ["the metric has no score over several images"], "")
        wrong = [f"the first score is called '{scores[0].name}'"] * (scores[0].name != self._metric.name)
        for score in scores:
            low, value, high = score.estimate.low, score.estimate.value, score.estimate.high
            if value is None or not math.isfinite(value):
                wrong.append(f"{score.name} is {value}")
            elif low is not None and high is not None and not low <= value <= high:
                wrong.append(f"{score.name}: {value} lies outside its interval {low} to {high}")
            if not 0 < score.n <= len(self._samples):
                wrong.append(f"{score.name}: n = {score.n} of {len(self._samples)} images")
        return finding("scores", wrong, ", ".join(f"{score.name} {score.estimate.value:.4g}" for score in scores[:3]))

    def difference(self) -> Finding:
        """A run does not differ from itself."""
        frame = self._frame()
        difference = self._metric.difference(frame, frame)
        if difference is None:
            return Finding("difference", SKIPPED, "this metric has no paired difference")
        wrong = [f"a run minus itself is {difference[0].value}, not 0"] * (difference[0].value != 0)
        return finding("difference", wrong, f"0 between a run and itself, over {counted(difference[1], 'image')}")

    def _frame(self) -> pd.DataFrame:
        features = self._metric.features(self._samples)
        names = ("prompt_id", "sample", "category")
        keys = [{name: getattr(sample, name) for name in names} for sample in self._samples]
        return pd.DataFrame([key | row for key, row in zip(keys, features, strict=True)])


def _gap(row: dict[str, Any], other: dict[str, Any]) -> float:
    """Largest relative difference between the numbers of two feature dicts; infinite if other values differ."""
    gaps = [0.0]
    for name, value in row.items():
        if isinstance(value, int | float | np.ndarray | list | tuple | np.generic) and other[name] is not None:
            mine, theirs = np.asarray(value, dtype=float), np.asarray(other[name], dtype=float)
            gaps.append(float(np.abs(mine - theirs).max(initial=0) / max(np.abs(mine).max(initial=0), 1e-9)))
        elif value != other[name]:
            gaps.append(float("inf"))
    return max(gaps)
