"""Data for plots of a run, collected in one pass over its rows."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from specbench.reporting.token_maps import grid_of, origins
from specbench.store.run_images import read_image
from specbench.store.run_store import RunStore
from specbench.store.schema import KEY

STEP_SPANS = ("target", "draft", "verify", "host")
"""Timing spans of a decode step, as in `specbench.decoding.generation.SPANS`."""
LOGP_EDGES = np.arange(-12.0, 0.001, 0.5)
"""Histogram bins of log p in nats; smaller values count in the first bin."""
_COLUMNS = (
    *("status", "nfe", "forced", "logp", "committed_step", "accepted", "image", "image_sha256"),
    *(f"{span}_ms" for span in STEP_SPANS),
)


@dataclass
class PlotData:
    """Aggregates over the decoded images of a run.

    Attributes:
        step_ms: milliseconds per target forward by span, a ratio of totals; None for batch sizes above 1.
        logp: fraction of the free tokens in each bin of `LOGP_EDGES`.
        accepted: [height, width] fraction of images whose token at this grid position is an accepted draft; None if the
            token grid is unknown or nothing was drafted.
    """

    step_ms: dict[str, float] | None
    logp: np.ndarray | None
    accepted: np.ndarray | None


def gather(folder: Path) -> PlotData:
    """Aggregate the rows of a run in one pass."""
    spans, nfe, batched = dict.fromkeys(STEP_SPANS, 0.0), 0, RunStore(folder).info().spec.batch > 1
    counts, kept, images, grid = np.zeros(len(LOGP_EDGES) - 1), 0, 0, None
    for piece in RunStore(folder).batches(_COLUMNS):
        rows = piece.filter(pc.equal(piece["status"], "ok"))
        if not rows.num_rows:
            continue
        grid = grid or token_grid(folder, *(rows[name][0].as_py() for name in ("forced", "image", "image_sha256")))
        spans = {span: total + (pc.sum(rows[f"{span}_ms"]).as_py() or 0.0) for span, total in spans.items()}
        nfe += pc.sum(rows["nfe"]).as_py()
        counts += _histogram(rows)
        if grid is not None:
            found = _accepted(rows, grid)
            kept, images = kept + found.sum(axis=0), images + len(found)
    step = {span: total / nfe for span, total in spans.items()} if nfe and not batched else None
    shares = kept / images if images and np.any(kept) else None
    return PlotData(step, counts / counts.sum() if counts.sum() else None, shares)


def speed_by_prompt(folder: Path, baseline: Path, most: int) -> list[tuple[str, float]]:
    """(prompt, speed-up) of the first `most` images that a run and its AR baseline both decoded one at a time."""
    mine, theirs = (RunStore(path).samples(["prompt", "ar_ms"]).dropna(subset=["ar_ms"]) for path in (folder, baseline))
    pairs = mine.merge(theirs[[*KEY, "ar_ms"]], on=list(KEY), suffixes=("", "_base")).head(most)
    return [(row.prompt, row.ar_ms_base / row.ar_ms) for row in pairs.itertuples(index=False) if row.ar_ms > 0]


def token_grid(folder: Path, forced: Sequence[bool], name: str | None, sha256: str | None) -> tuple[int, int] | None:
    """Token grid (height, width) from an image of a run; all images of a run have the same shape."""
    if not name or not os.path.lexists(folder / name):
        return None
    return grid_of(forced, read_image(folder, name, sha256).shape[:2])


def _histogram(rows: pa.Table) -> np.ndarray:
    forced, logp = (rows[name].combine_chunks().flatten().to_numpy(zero_copy_only=False) for name in ("forced", "logp"))
    inside = np.clip(logp[~forced.astype(bool)], LOGP_EDGES[0], LOGP_EDGES[-1])
    return np.histogram(inside, LOGP_EDGES)[0]


def _accepted(rows: pa.Table, grid: tuple[int, int]) -> np.ndarray:
    """Mark accepted draft tokens: [n, height, width], 1 or 0."""
    columns = (rows[name].to_pandas() for name in ("committed_step", "forced", "accepted"))
    return np.stack([origins(step, forced, accepted, grid) for step, forced, accepted in zip(*columns, strict=True)])
