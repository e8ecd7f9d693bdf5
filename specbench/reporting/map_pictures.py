"""Token maps as small pictures: PNGs with one pixel per token."""

from __future__ import annotations

import io

import numpy as np
from matplotlib import colormaps
from PIL import Image

from specbench.reporting.token_maps import ACCEPTED, ACCEPTED_COLOUR, DRAWN_COLOUR


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
