"""Sums over the per-token lists of a sample row. Every part stores them, so that reports read a few numbers per image
instead of its tokens."""

from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

LISTS = ("forced", "logp", "entropy", "top1", "committed_step", "drafted")
"""Columns of lists whose values `token_sums` adds up."""
SUMS = pa.schema(
    [
        ("stream_tokens", pa.int64()),
        ("committed_step_sum", pa.float64()),
        ("drafted_sum", pa.int64()),
        ("free_tokens", pa.int64()),
        ("logp_sum", pa.float64()),
        ("logp_spread", pa.float64()),
        ("entropy_sum", pa.float64()),
        ("top1_sum", pa.float64()),
        ("impossible", pa.int64()),
    ]
)
"""Columns of `token_sums`, none of them ever null."""
VERSION = "token sums 1"
"""Version of `token_sums`: increase it with every change. Sums of another version are computed again."""


def token_sums(rows: pa.Table) -> pa.Table:
    """Sum the `LISTS` of stored rows: one row of `SUMS` per image.

    Sums over the free tokens of an image: `free_tokens`, `logp_sum`, `logp_spread` (squared deviations from the image's
    own mean), `entropy_sum`, `top1_sum` and `impossible` (tokens of target probability 0). Over all tokens:
    `stream_tokens` and `committed_step_sum`. Over window offsets: `drafted_sum`. An image without tokens has zeros.
    """
    forced, logp, entropy, top1 = (_flat(rows[name]) for name in ("forced", "logp", "entropy", "top1"))
    stream = _lengths(rows["forced"])
    free: np.ndarray = ~forced.astype(bool)
    logp = np.where(free, logp, 0)
    count, logp_sum = _sums(free, stream, int), _sums(logp, stream)
    with np.errstate(invalid="ignore"):
        deviations = np.where(free, logp - np.repeat(logp_sum / np.maximum(count, 1), stream), 0)
    sums = {
        "stream_tokens": stream,
        "committed_step_sum": _sums(_flat(rows["committed_step"]), _lengths(rows["committed_step"])),
        "drafted_sum": _sums(_flat(rows["drafted"]), _lengths(rows["drafted"]), int),
        "free_tokens": count,
        "logp_sum": logp_sum,
        "logp_spread": _sums(np.square(deviations), stream),
        "entropy_sum": _sums(np.where(free, entropy, 0), stream),
        "top1_sum": _sums(np.where(free, top1, 0), stream),
        "impossible": _sums(np.isneginf(logp), stream, int),
    }
    return pa.table({name: pa.array(values) for name, values in sums.items()}).cast(SUMS)


def _flat(column: pa.ChunkedArray) -> np.ndarray:
    return column.combine_chunks().flatten().to_numpy(zero_copy_only=False)


def _lengths(column: pa.ChunkedArray) -> np.ndarray:
    return pc.list_value_length(column).fill_null(0).to_numpy()


def _sums(values: Any, lengths: np.ndarray, kind: type = float) -> np.ndarray:
    """Sums over consecutive segments of `values` with these `lengths`."""
    sums: np.ndarray = np.zeros(len(lengths), kind)
    filled = lengths > 0
    sums[filled] = np.add.reduceat(values, (np.cumsum(lengths) - lengths)[filled], dtype=kind)
    return sums
