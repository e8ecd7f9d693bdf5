"""Lists by token become sums by image, so that a report never holds more than a batch of tokens."""

from __future__ import annotations

import numpy as np
import pandas as pd
import pyarrow as pa
import pyarrow.compute as pc

LISTS = ("forced", "logp", "entropy", "top1", "committed_step")
"""Columns of stored rows that `condense` sums up."""


def condense(rows: pa.Table) -> pd.DataFrame:
    """One line per image: the columns of `rows`, with sums over its free tokens in the place of `LISTS`.

    The sums: `stream_tokens` and `committed_step_sum` (forced ones too), `free_tokens`, `logp_sum`, `logp_spread`
    (squared deviations from the image's own mean), `entropy_sum`, `top1_sum` and `impossible` (tokens of target
    probability 0). Images without tokens have zeros.
    """
    n = rows.num_rows
    slots = {name: rows[name].combine_chunks() for name in LISTS}
    image = pc.list_parent_indices(slots["forced"]).to_numpy(zero_copy_only=False)
    values = {name: _flat(column) for name, column in slots.items()}
    free = ~values["forced"].astype(bool)
    stream = np.bincount(image, minlength=n)
    steps = np.bincount(image, values["committed_step"], minlength=n)
    image = image[free]
    logp, entropy, top1 = (values[name][free].astype(np.float64) for name in ("logp", "entropy", "top1"))

    def total(weights: np.ndarray) -> np.ndarray:
        return np.bincount(image, weights, minlength=n)

    count, logp_sum = np.bincount(image, minlength=n), total(logp)
    with np.errstate(invalid="ignore"):
        deviations = logp - (logp_sum / np.maximum(count, 1))[image]
    sums = {
        "stream_tokens": stream,
        "committed_step_sum": steps,
        "free_tokens": count,
        "logp_sum": logp_sum,
        "logp_spread": total(np.square(deviations)),
        "entropy_sum": total(entropy),
        "top1_sum": total(top1),
        "impossible": np.bincount(image[np.isneginf(logp)], minlength=n),
    }
    return rows.drop_columns(list(LISTS)).to_pandas().assign(**sums)


def _flat(column: pa.Array) -> np.ndarray:
    return column.flatten().to_numpy(zero_copy_only=False)
