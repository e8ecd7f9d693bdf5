"""Crops and resizes by Pillow that metrics begin with. No torch here."""

from __future__ import annotations

import numpy as np
from PIL import Image

from specbench.metrics.base import code_version


def whole(pixels: np.ndarray) -> np.ndarray:
    return pixels


@code_version(2)
def center256(pixels: np.ndarray) -> np.ndarray:
    """Crop uint8 [H, W, 3] to the centre square and resize by Lanczos to [256, 256, 3]; as in torchvision, odd
    margins are rounded to even."""
    height, width = pixels.shape[:2]
    side = min(height, width)
    left, top = round((width - side) / 2), round((height - side) / 2)
    square = Image.fromarray(pixels).crop((left, top, left + side, top + side))
    return np.asarray(square.resize((256, 256), Image.Resampling.LANCZOS))


def short_side_centre(pixels: np.ndarray, size: int) -> np.ndarray:
    """Preprocess as CLIP (Radford et al. 2021): short side to `size` by Pillow's bicubic, then the centre square.
    uint8 [H, W, 3] to [size, size, 3]."""
    height, width = pixels.shape[:2]
    short = min(height, width)
    resized = Image.fromarray(pixels).resize(
        (int(size * width / short), int(size * height / short)), Image.Resampling.BICUBIC
    )
    left, top = round((resized.width - size) / 2), round((resized.height - size) / 2)
    return np.asarray(resized.crop((left, top, left + size, top + size)))


def squashed(pixels: np.ndarray, size: int) -> np.ndarray:
    """Resize uint8 [H, W, 3] to [size, size, 3] without a crop, by Pillow's bicubic."""
    return np.asarray(Image.fromarray(pixels).resize((size, size), Image.Resampling.BICUBIC))
