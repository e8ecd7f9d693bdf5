"""Orders in which another program may have stored the tokens of an image."""

from collections.abc import Callable, Sequence

import numpy as np

from specbench.models.interface import TokenLayout

TOKEN_ORDERS: Sequence[tuple[str, Callable[[np.ndarray], np.ndarray]]] = (
    ("the image is transposed: its tokens are in column order", lambda grid: grid.reshape(grid.shape[::-1]).T),
    ("the rows are mirrored", lambda grid: grid[:, ::-1]),
    ("the rows are in reverse order, from the bottom", lambda grid: grid[::-1]),
    ("the tokens are shifted: the first token is missing", lambda grid: np.roll(grid.ravel(), 1).reshape(grid.shape)),
    ("the tokens are shifted: extra token at the start", lambda grid: np.roll(grid.ravel(), -1).reshape(grid.shape)),
    ("row ends are shifted: rows are one token too short", lambda grid: _skewed(grid, 1)),
    ("row ends are shifted: rows are one token too long", lambda grid: _skewed(grid, -1)),
)
"""Causes in words, each with the grid of token indices that restores the order in which the model drew the tokens."""


def _skewed(grid: np.ndarray, step: int) -> np.ndarray:
    return np.stack([np.roll(row, step * number) for number, row in enumerate(grid)])


def places_of(layout: TokenLayout, order: Callable[[np.ndarray], np.ndarray]) -> np.ndarray:
    """For each slot [N], the slot whose token is read there if every grid is read in the given order."""
    places = np.arange(layout.length)
    for rows in layout.rows:
        grid = np.array(rows)
        places[grid.ravel()] = grid.ravel()[order(np.arange(grid.size).reshape(grid.shape)).ravel()]
    return places
