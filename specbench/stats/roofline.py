"""How far a run is from the least its device could need."""

from __future__ import annotations

from collections.abc import Mapping

import pandas as pd

from specbench.models.transformer.size import Size
from specbench.stats.ratios import ratio


def over_floor(rows: pd.DataFrame, floor: Mapping | None) -> float | None:
    """Over floor: time of the decode loop over the least in which this device could do the same forwards, both summed
    over images: the larger of the bytes to read (weights once per forward, cached keys and values of the image's own
    tokens once per row and forward) over its memory bandwidth, and of the operations of the matrix products over its
    peak.

    The prompt's keys, tree branches, everything around the target and the writing of anything are left out, so the
    floor is a little lower than it could be. `floor` is what `specbench.runs.roofline_facts` noted with the run.
    """
    if floor is None or rows.empty:
        return None
    loop = rows[["draft_ms", "target_ms", "verify_ms", "host_ms"]].sum(axis=1) / rows["batch"]
    return ratio(loop.sum(), floor_ms(rows, floor).sum())


def floor_ms(rows: pd.DataFrame, floor: Mapping) -> pd.Series:
    """Milliseconds per image; see `over_floor`."""
    size, twins = Size(**floor["size"]), floor["rows_per_image"]
    nfe = rows["nfe"]
    visible = nfe * rows["stream_tokens"] - rows["committed_step_sum"] + nfe
    columns = (nfe + rows["drafted_sum"]).clip(lower=rows["stream_tokens"])
    read_ms = floor["itemsize"] * size.read(nfe / rows["batch"], twins, visible) / floor["bytes_per_s"] * 1e3
    computed_ms = size.operations(columns, twins, visible * columns / nfe) / floor["flops"] * 1e3
    return pd.concat([read_ms, computed_ms], axis=1).max(axis=1)
