"""Maps over the token grid of an image: commit step and origin (accepted draft or sampled) of each token."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

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
