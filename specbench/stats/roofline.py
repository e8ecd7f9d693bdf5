"""Roofline: measured decode time relative to the lower bound of the device."""

from __future__ import annotations

from collections.abc import Mapping

import pandas as pd

from specbench.models.transformer.size import Size
from specbench.stats.ratios import ratio_or_none


def roofline_ratio(rows: pd.DataFrame, floor: Mapping | None) -> float | None:
    """Roofline ratio: time of the decode loop over the roofline time of the same target forwards, both summed over
    images; below 1 the device's measured peaks are too low, and reports leave the ratio out. The roofline time is the
    larger of bytes read (weights once per forward, KV cache of the image tokens once per row and forward) over memory
    bandwidth, and matrix-product FLOPs over peak FLOP/s of this device.

    Excluded, so that the bound is slightly too low: the prompt's KV cache, tree branches, all work outside the target,
    all writes. `floor` holds the inputs stored with the run, see `specbench.runs.roofline_facts`.
    """
    if floor is None or rows.empty:
        return None
    loop = rows[["draft_ms", "target_ms", "verify_ms", "host_ms"]].sum(axis=1) / rows["batch"]
    return ratio_or_none(loop.sum(), floor_ms(rows, floor).sum())


def floor_ms(rows: pd.DataFrame, floor: Mapping) -> pd.Series:
    """Roofline time in milliseconds per image, see `roofline_ratio`."""
    size, rows_per_image = Size(**floor["size"]), floor["rows_per_image"]
    nfe = rows["nfe"]
    visible = nfe * rows["stream_tokens"] - rows["committed_step_sum"] + nfe
    columns = (nfe + rows["drafted_sum"]).clip(lower=rows["stream_tokens"])
    read_ms = floor["itemsize"] * size.read(nfe / rows["batch"], rows_per_image, visible) / floor["bytes_per_s"] * 1e3
    computed_ms = size.operations(columns, rows_per_image, visible * columns / nfe) / floor["flops"] * 1e3
    return pd.concat([read_ms, computed_ms], axis=1).max(axis=1)
