"""Preprocessing of FID: crops and the four resize methods of FID tools to 299 x 299.

Their features differ by several percent, so a FID names its front end and values of different ones never meet.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

import numpy as np
import torch
from PIL import Image
from torch import Tensor
from torch.nn import functional as F

from specbench.metrics.code_version import code_version
from specbench.metrics.inception import INCEPTION_SIZE


def pytorch_fid(pixels: np.ndarray) -> Tensor:
    """Resize as pytorch-fid: bilinear without antialiasing on values in 0..1. uint8 [H, W, 3] to float32 [3, 299,
    299]."""
    scaled = _planes(pixels)[None] / 255
    return 2 * F.interpolate(scaled, (INCEPTION_SIZE, INCEPTION_SIZE), mode="bilinear", align_corners=False)[0] - 1


def tf1(pixels: np.ndarray) -> Tensor:
    """Resize as TensorFlow 1 (the original FID): bilinear, pixel positions at corners. uint8 [H, W, 3] to float32
    [3, 299, 299]."""
    x_CHW = _planes(pixels)
    top, bottom, down = _corner_grid(x_CHW.shape[1])
    left, right, across = _corner_grid(x_CHW.shape[2])
    upper = x_CHW[:, top][:, :, left] * (1 - across) + x_CHW[:, top][:, :, right] * across
    lower = x_CHW[:, bottom][:, :, left] * (1 - across) + x_CHW[:, bottom][:, :, right] * across
    return _centred(upper * (1 - down[:, None]) + lower * down[:, None])


def tm_aa(pixels: np.ndarray) -> Tensor:
    """Resize as torchmetrics since 1.8: bilinear with antialiasing. uint8 [H, W, 3] to float32 [3, 299, 299]."""
    x_BCHW = _planes(pixels)[None]
    return _centred(
        F.interpolate(x_BCHW, (INCEPTION_SIZE, INCEPTION_SIZE), mode="bilinear", align_corners=False, antialias=True)[0]
    )


@code_version(2)
def clean(pixels: np.ndarray) -> Tensor:
    """Resize as clean-fid (Parmar et al. 2022): Pillow's antialiased bicubic on float channels, clipped to 0..255,
    not rounded. uint8 [H, W, 3] to float32 [3, 299, 299]."""
    channels = [Image.fromarray(pixels[..., channel].astype(np.float32)) for channel in range(3)]
    resized = [
        np.asarray(channel.resize((INCEPTION_SIZE, INCEPTION_SIZE), Image.Resampling.BICUBIC)) for channel in channels
    ]
    return _centred(torch.from_numpy(np.stack(resized).clip(0, 255)))


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


FRONT_ENDS: Mapping[str, Callable[[np.ndarray], Tensor]] = {
    "pytorch-fid": pytorch_fid,
    "tf1": tf1,
    "tm-aa": tm_aa,
    "clean": clean,
}
CROPS: Mapping[str, Callable[[np.ndarray], np.ndarray]] = {"none": whole, "center256": center256}


def _planes(pixels: np.ndarray) -> Tensor:
    return torch.from_numpy(np.array(pixels)).permute(2, 0, 1).to(torch.float32)


def _centred(x: Tensor) -> Tensor:
    return (x - 128) / 128


def _corner_grid(length: int) -> tuple[Tensor, Tensor, Tensor]:
    """Interpolation indices and weights [299] of a length: pixel before, pixel after, and the share of the latter."""
    place = torch.arange(INCEPTION_SIZE, dtype=torch.float32) * (length / INCEPTION_SIZE)
    before = place.floor().long()
    return before, (before + 1).clamp(max=length - 1), place - before
