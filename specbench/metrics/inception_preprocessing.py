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
from specbench.metrics.inception import SIZE


def pytorch_fid(pixels: np.ndarray) -> Tensor:
    """Bilinear without antialiasing on values in 0..1."""
    scaled = _planes(pixels)[None] / 255
    return 2 * F.interpolate(scaled, (SIZE, SIZE), mode="bilinear", align_corners=False)[0] - 1


def tf1(pixels: np.ndarray) -> Tensor:
    """Bilinear of TensorFlow 1: no antialiasing, and pixel positions are corners instead of centres."""
    x_CHW = _planes(pixels)
    top, bottom, down = _corner_grid(x_CHW.shape[1])
    left, right, across = _corner_grid(x_CHW.shape[2])
    upper = x_CHW[:, top][:, :, left] * (1 - across) + x_CHW[:, top][:, :, right] * across
    lower = x_CHW[:, bottom][:, :, left] * (1 - across) + x_CHW[:, bottom][:, :, right] * across
    return _centred(upper * (1 - down[:, None]) + lower * down[:, None])


def tm_aa(pixels: np.ndarray) -> Tensor:
    """Bilinear with antialiasing, torchmetrics' default since 1.8."""
    x_BCHW = _planes(pixels)[None]
    return _centred(F.interpolate(x_BCHW, (SIZE, SIZE), mode="bilinear", align_corners=False, antialias=True)[0])


@code_version(2)
def clean(pixels: np.ndarray) -> Tensor:
    """Pillow's bicubic, which antialiases, on floating-point channels that are clipped to 0..255 afterwards and not
    rounded."""
    channels = [Image.fromarray(pixels[..., channel].astype(np.float32)) for channel in range(3)]
    resized = [np.asarray(channel.resize((SIZE, SIZE), Image.Resampling.BICUBIC)) for channel in channels]
    return _centred(torch.from_numpy(np.stack(resized).clip(0, 255)))


def whole(pixels: np.ndarray) -> np.ndarray:
    return pixels


@code_version(2)
def center256(pixels: np.ndarray) -> np.ndarray:
    """The centre square of the short side, by Lanczos to 256 x 256; the crop is torchvision's, which halves odd margins
    to even."""
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
    """For each of 299 places the pixels before and after it and the share of the latter."""
    place = torch.arange(SIZE, dtype=torch.float32) * (length / SIZE)
    before = place.floor().long()
    return before, (before + 1).clamp(max=length - 1), place - before
