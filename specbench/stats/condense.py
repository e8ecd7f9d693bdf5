"""Per-image sums of per-token lists, so that a report never holds more than a batch of tokens in memory."""

from __future__ import annotations

import numpy as np
import pandas as pd
import pyarrow as pa
import pyarrow.compute as pc

LISTS = ("forced", "logp", "entropy", "top1", "committed_step", "drafted")
"""Columns of stored rows that `condense` replaces by sums."""


def condense(rows: pa.Table) -> pd.DataFrame:
    """Replace the `LISTS` columns of stored rows by sums per image; other list columns stay Arrow lists.

    Over an image's free tokens: `free_tokens`, `logp_sum`, `logp_spread` (squared deviations from the image's own
    mean), `entropy_sum`, `top1_sum` and `impossible` (tokens of target probability 0). Over all tokens:
    `stream_tokens` and `committed_step_sum`. Over window offsets: `drafted_sum`. An image without tokens has zeros.
    """
    forced, logp, entropy, top1 = (_flat(rows[name]) for name in ("forced", "logp", "entropy", "top1"))
    free, stream = ~forced.astype(bool), _lengths(rows["forced"])
    logp = np.where(free, logp, 0)
    count, logp_sum = _sums(free, stream, int), _sums(logp, stream)
    with np.errstate(invalid="ignore"):
        deviations = np.where(free, logp - np.repeat(logp_sum / np.maximum(count, 1), stream), 0)
    sums = {
        "stream_tokens": stream,
        "committed_step_sum": _sums(_flat(rows["committed_step"]), stream),
        "drafted_sum": _sums(_flat(rows["drafted"]), _lengths(rows["drafted"]), int),
        "free_tokens": count,
        "logp_sum": logp_sum,
        "logp_spread": _sums(np.square(deviations), stream),
        "entropy_sum": _sums(np.where(free, entropy, 0), stream),
        "top1_sum": _sums(np.where(free, top1, 0), stream),
        "impossible": _sums(np.isneginf(logp), stream, int),
    }
    others = rows.drop_columns(list(LISTS))
    return others.to_pandas(types_mapper=_keep_lists).assign(**sums)


def _keep_lists(kind: pa.DataType) -> pd.ArrowDtype | None:
    return pd.ArrowDtype(kind) if pa.types.is_list(kind) else None


def _flat(column: pa.ChunkedArray) -> np.ndarray:
    return column.combine_chunks().flatten().to_numpy(zero_copy_only=False)


def _lengths(column: pa.ChunkedArray) -> np.ndarray:
    return pc.list_value_length(column).fill_null(0).to_numpy()


def _sums(values: np.ndarray, lengths: np.ndarray, kind: type = float) -> np.ndarray:
    """Sums over consecutive segments of `values` with these `lengths`."""
    sums, filled = np.zeros(len(lengths), kind), lengths > 0
    sums[filled] = np.add.reduceat(values, (np.cumsum(lengths) - lengths)[filled], dtype=kind)
    return sums
