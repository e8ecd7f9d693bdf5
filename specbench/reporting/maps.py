"""Token maps: commit step and origin (accepted draft or sampled) of each token over the token grid of an image, means
over the images of a run, and either as a PNG with one pixel per token."""

from __future__ import annotations

import io
import math
import os
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pyarrow.compute as pc
from PIL import Image

from specbench.store.run_store import RunStore, read_image
from specbench.store.schema import KEY

DRAWN, ACCEPTED = 0, 1
DRAWN_COLOUR, ACCEPTED_COLOUR = (224, 134, 42), (61, 139, 212)
"""Distinguishable on light and on dark."""


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


def mean_map(folder: Path, quantity: str) -> np.ndarray | None:
    """Mean over images at each grid position, [height, width], NaN where no image has one; None where the
    run has not kept it, its token grid is unknown, or nothing was drafted.

    Args:
        quantity: "accepted" (whether the token is an accepted draft), "top1" (largest probability of the target),
            "entropy" (of the target, in nats), or of traced runs "draft_top1" (largest probability of the draft) and
            "draft_tv" (total variation of the two).
    """
    store, columns = RunStore(folder), ["status", "forced", "committed_step", "accepted", "image", "image_sha256"]
    columns += [quantity] if quantity in ("top1", "entropy") else []
    traces = store.traces() if quantity.startswith("draft") else None
    if traces is not None and traces.empty:
        return None
    total, seen, grid = 0.0, 0, None
    for piece in store.batches(columns):  # of runs of any size
        rows = piece.filter(pc.equal(piece["status"], "ok")).to_pandas()
        rows = rows if traces is None else rows.merge(traces[[*KEY, quantity]], on=list(KEY))
        for row in rows.itertuples(index=False):
            grid = grid or _run_grid(folder, row.forced, row.image, row.image_sha256)
            if grid is None:
                return None
            if quantity == "accepted":
                values = origins(row.committed_step, row.forced, row.accepted, grid).astype(float)
            else:
                free = ~np.asarray(row.forced, dtype=bool)
                values = np.asarray(getattr(row, quantity), dtype=float)[free].reshape(grid)
            known = ~np.isnan(values)
            total, seen = total + np.where(known, values, 0.0), seen + known
    if grid is None or (quantity == "accepted" and not np.any(total)):
        return None
    return np.divide(total, seen, out=np.full(grid, np.nan), where=seen > 0)


def _run_grid(folder: Path, forced: Sequence[bool], name: str | None, sha256: str | None) -> tuple[int, int] | None:
    """Token grid (height, width) from an image of a run; all images of a run have the same shape."""
    if not name or not os.path.lexists(folder / name):
        return None
    return grid_of(forced, read_image(folder, name, sha256).shape[:2])


def step_picture(steps: np.ndarray) -> bytes:
    """Draw the commit step of each token (dark early, light late)."""
    from matplotlib import colormaps  # only where a picture is drawn

    shade = (steps - 1) / max(1, steps.max() - 1)
    return _png((colormaps["viridis"](shade)[..., :3] * 255).astype(np.uint8))


def origin_picture(origins: np.ndarray) -> bytes:
    """Draw accepted drafts and sampled tokens in two colours."""
    return _png(np.where((origins == ACCEPTED)[..., None], ACCEPTED_COLOUR, DRAWN_COLOUR).astype(np.uint8))


def share_picture(shares: np.ndarray) -> bytes:
    """Draw a fraction per grid position, from 0 (dark) to 1 (light); NaN is transparent."""
    from matplotlib import colormaps  # only where a picture is drawn

    return _png(
        (colormaps["cividis"].with_extremes(bad=(0, 0, 0, 0))(np.ma.masked_invalid(shares)) * 255).astype(np.uint8)
    )


def _png(pixels: np.ndarray) -> bytes:
    buffer = io.BytesIO()
    Image.fromarray(pixels).save(buffer, format="png")
    return buffer.getvalue()
