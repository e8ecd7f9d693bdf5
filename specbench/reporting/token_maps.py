"""What a stored image says about each place of its token grid: when it was committed, and from where."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

DRAWN, ACCEPTED = 0, 1


def grid_of(forced: Sequence[bool], pixels: tuple[int, int]) -> tuple[int, int] | None:
    """Height and width of the token grid: the free slots, as rows and columns in the shape of the picture.

    Args:
        forced: per stream slot, whether the grammar left no choice.
        pixels: height and width of the picture.

    Returns:
        None where no whole grid fits.
    """
    free = int(np.size(forced) - np.count_nonzero(forced))
    height = round(math.sqrt(free * pixels[0] / pixels[1]))
    return (height, free // height) if height and free % height == 0 else None


def commit_steps(committed_step: Sequence[int], forced: Sequence[bool], grid: tuple[int, int]) -> np.ndarray:
    """The target forward, from 1, that committed each image token; [height, width]."""
    return np.asarray(committed_step)[~np.asarray(forced, dtype=bool)].reshape(grid)


def origins(
    committed_step: Sequence[int], forced: Sequence[bool], accepted: Sequence[int] | None, grid: tuple[int, int]
) -> np.ndarray:
    """Whether each image token is an `ACCEPTED` draft or was `DRAWN` afresh from p or a residual; [height, width].

    A step commits the drafts it accepts and then one token drawn afresh, save for the last one, which may end the image
    with a draft: `accepted` (per window offset) tells. Without tested drafts, as in AR, every token was drawn.
    """
    step, free = np.asarray(committed_step), ~np.asarray(forced, dtype=bool)
    total = 0 if accepted is None else int(np.sum(accepted))
    if not total:
        return np.full(grid, DRAWN)
    kept = np.append(step[1:] == step[:-1], False)
    kept[-1] = int(np.count_nonzero(kept & free)) < total
    return np.where(kept, ACCEPTED, DRAWN)[free].reshape(grid)
