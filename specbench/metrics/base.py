"""What a metric is: images -> features -> statistics -> scores, each arrow one method.

A metric is one file. `scoring` walks the images, keeps the features of each on disk under the metric's
fingerprint, and asks for statistics and scores when all are there; a metric never reads a run folder itself.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import pandas as pd
import pyarrow as pa

from specbench.stats import Estimate


@dataclass(frozen=True)
class Sample:
    """One stored image with what was asked for.

    Attributes:
        prompt_id, sample: which one.
        prompt: the caption.
        category: what the prompt tests, where its set says so.
        meta: whatever else the prompt set knows.
        pixels: uint8 [H, W, 3].
    """

    prompt_id: str
    sample: int
    prompt: str
    category: str | None
    meta: Mapping[str, object]
    pixels: np.ndarray


@dataclass(frozen=True)
class Score:
    """One number about a run. `name` is the metric's, or "metric:part" for a part of it; `n` the images
    behind it."""

    name: str
    estimate: Estimate
    n: int


class Metric(Protocol):
    """A way of scoring images.

    Attributes:
        name: what users type and tables print.
        definition: what the number is, as printed below tables.
        batch: images given to `features` at a time.
        columns: name and arrow type of what `features` keeps of an image.
    """

    name: str
    definition: str
    batch: int
    columns: Mapping[str, pa.DataType]

    def identity(self) -> Mapping[str, str]:
        """Everything that can change a value: variant, weight digests, resize, reference set, library
        versions."""
        ...

    def accepts(self, category: str | None, meta: Mapping[str, object]) -> bool:
        """Whether a prompt tells enough for its images to be scored."""
        ...

    def features(self, samples: Sequence[Sample]) -> list[dict[str, object]]:
        """Per image the values of `columns`; None where there is none."""
        ...

    def statistics(self, features: pd.DataFrame) -> object:
        """What the scores need of all images; `features` has the key columns, `category`, and `columns`."""
        ...

    def scores(self, statistics: object) -> list[Score]:
        """The numbers, the overall one first."""
        ...


def fingerprint(metric: Metric) -> str:
    """Eight hex digits that change whenever the metric's identity does."""
    text = json.dumps([metric.name, dict(metric.identity())], sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()[:8]
