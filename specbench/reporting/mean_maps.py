"""Means over the images of a run of a quantity of each token, as maps over the token grid."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from specbench.reporting.plot_data import gather, token_grid
from specbench.store.run_store import RunStore
from specbench.store.schema import KEY


def mean_map(folder: Path, quantity: str) -> np.ndarray | None:
    """Mean over images at each grid position, [height, width], from 0 to 1, NaN where no image has one; None where the
    run has not kept it.

    Args:
        quantity: "accepted" (whether the token is an accepted draft), "top1" (largest probability of the target), or of
            traced runs "draft_top1" (that of the draft) and "draft_tv" (total variation of the two).
    """
    if quantity == "accepted":
        return gather(folder).accepted
    store = RunStore(folder)
    rows = store.samples(["status", "forced", "image", "image_sha256", *(["top1"] if quantity == "top1" else [])])
    rows = rows[rows["status"] == "ok"]
    if quantity != "top1":
        traces = store.traces()
        rows = rows.merge(traces[[*KEY, quantity]], on=list(KEY)) if len(traces) else rows.iloc[:0]
    if rows.empty:
        return None
    first = rows.iloc[0]
    grid = token_grid(folder, first["forced"], first["image"], first["image_sha256"])
    if grid is None:
        return None
    free = [
        np.asarray(values, dtype=float)[~np.asarray(forced, dtype=bool)]
        for values, forced in zip(rows[quantity], rows["forced"], strict=True)
    ]
    shown = np.stack([values.reshape(grid) for values in free])
    seen = ~np.isnan(shown)
    return np.divide(np.nansum(shown, axis=0), seen.sum(axis=0), out=np.full(grid, np.nan), where=seen.any(axis=0))
