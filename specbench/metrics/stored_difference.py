"""Paired differences from stored values alone, for metrics that are means of one number per image.

They need no network, so comparing two runs does not import the metric; both runs' values have the same fingerprint.
"""

from __future__ import annotations

from pathlib import Path

import pandas as pd
import pyarrow as pa
import pyarrow.parquet as pq

from specbench.errors import SpecbenchError
from specbench.metrics.base import column_difference
from specbench.metrics.catalog import METRICS
from specbench.stats import Difference
from specbench.store.parquet_log import ParquetLog
from specbench.store.schema import KEY
from specbench.system.reading import check_regular, files_named

_OVER_CATEGORIES = ("shapes-detector",)
"""Metrics that are the mean of their categories' means of `correct`."""
_BY_CATEGORY = ("compbench[", "geneval[")
"""Metrics with a difference only for some categories; the metric itself decides."""


def stored_difference(folder: Path, baseline: Path, metric: str, fingerprint: str) -> tuple[Difference, int] | None:
    """Subtract the score of the run in `baseline` from that in `folder` over the images both have, and count those.

    Returns:
        None if the metric is no plain mean, or if a run lacks values of this fingerprint; the metric itself may know.
    """
    if metric not in METRICS or metric.startswith(_BY_CATEGORY):
        return None
    column = "correct" if metric in _OVER_CATEGORIES else "value"
    found = [_values(path / "scores" / f"{metric}-{fingerprint}", column) for path in (folder, baseline)]
    mine, theirs = found
    if mine is None or theirs is None:
        return None
    return column_difference(mine, theirs, column, over_categories=metric in _OVER_CATEGORIES)


def _is_number(kind: pa.DataType) -> bool:
    return pa.types.is_boolean(kind) or pa.types.is_integer(kind) or pa.types.is_floating(kind)


def _values(folder: Path, column: str) -> pd.DataFrame | None:
    """Read key, category and `column` of each scored image; None without such values."""
    part = next(iter(files_named(folder, "*.parquet")), None)
    if part is None:
        return None
    try:
        check_regular(part)
        schema = pq.read_schema(part)
    except (pa.ArrowException, OSError, SpecbenchError):
        return None  # a damaged part is named by the metric's own reading
    if not {column, "category", *KEY} <= set(schema.names) or not _is_number(schema.field(column).type):
        return None
    wanted = pa.schema([schema.field(name) for name in (*KEY, "category", column)])
    return ParquetLog(folder, wanted, KEY).read().to_pandas()
