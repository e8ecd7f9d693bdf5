"""Token maps as small pictures: PNGs with one pixel per token."""

from __future__ import annotations

import io
import math
import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from matplotlib import colormaps
from PIL import Image

from specbench.store.run_store import RunStore, read_image
from specbench.store.schema import KEY

# Maps over the token grid of an image: commit step and origin (accepted draft or sampled) of each token.

DRAWN, ACCEPTED = 0, 1
DRAWN_COLOUR, ACCEPTED_COLOUR = (224, 134, 42), (61, 139, 212)
"""Distinguishable on light and on dark."""


def grid_of(forced: Sequence[bool], pixels: tuple[int, int]) -> tuple[int, int] | None:
    """Infer height and width of the token grid from the number of free tokens and the aspect ratio of the image.

    Args:
        forced: [N] bool, tokens forced by the grammar.
        pixels: height and width of the image.

    Returns:
        None if no integer grid fits.
    """
    free = int(np.size(forced) - np.count_nonzero(forced))
    height = round(math.sqrt(free * pixels[0] / pixels[1]))
    return (height, free // height) if height and free % height == 0 else None


def commit_steps(committed_step: Sequence[int], forced: Sequence[bool], grid: tuple[int, int]) -> np.ndarray:
    """Map the 1-based target forward that committed each image token; [height, width]."""
    return np.asarray(committed_step)[~np.asarray(forced, dtype=bool)].reshape(grid)


def origins(
    committed_step: Sequence[int], forced: Sequence[bool], accepted: Sequence[int] | None, grid: tuple[int, int]
) -> np.ndarray:
    """Map the origin of each image token: `ACCEPTED` draft, or `DRAWN` from p or a residual; [height, width].

    A step commits its accepted drafts and then one drawn token, except that the last step may end the image with an
    accepted draft; the total of `accepted` (per window offset) tells the two apart. Without drafts, as in AR, every
    token was drawn.
    """
    step, free = np.asarray(committed_step), ~np.asarray(forced, dtype=bool)
    total = 0 if accepted is None else int(np.sum(accepted))
    if not total:
        return np.full(grid, DRAWN)
    kept = np.append(step[1:] == step[:-1], False)
    kept[-1] = int(np.count_nonzero(kept & free)) < total
    return np.where(kept, ACCEPTED, DRAWN)[free].reshape(grid)


# Data for plots of a run, collected in one pass over its rows.

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


# Means over the images of a run of a quantity of each token, as maps over the token grid.


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


def step_picture(steps: np.ndarray) -> bytes:
    """Draw the commit step of each token (dark early, light late)."""
    shade = (steps - 1) / max(1, steps.max() - 1)
    return _png((colormaps["viridis"](shade)[..., :3] * 255).astype(np.uint8))


def origin_picture(origins: np.ndarray) -> bytes:
    """Draw accepted drafts and sampled tokens in two colours."""
    return _png(np.where((origins == ACCEPTED)[..., None], ACCEPTED_COLOUR, DRAWN_COLOUR).astype(np.uint8))


def share_picture(shares: np.ndarray) -> bytes:
    """Draw a fraction per grid position, from 0 (dark) to 1 (light); NaN is transparent."""
    return _png(
        (colormaps["cividis"].with_extremes(bad=(0, 0, 0, 0))(np.ma.masked_invalid(shares)) * 255).astype(np.uint8)
    )


def _png(pixels: np.ndarray) -> bytes:
    buffer = io.BytesIO()
    Image.fromarray(pixels).save(buffer, format="png")
    return buffer.getvalue()
