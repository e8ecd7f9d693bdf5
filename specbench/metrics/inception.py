"""Pixels to the input of FID's network: crops, and the resize methods of four FID tools to 299 x 299.

Features of different resize methods differ by several percent, so a FID names its front end and values of different
ones never meet.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING

import numpy as np
from PIL import Image

from specbench.metrics.base import code_version
from specbench.metrics.crops import center256, whole

if TYPE_CHECKING:
    from torch import Tensor

# Imports inside functions: torch, not for images that are scored already.

INCEPTION_FEATURES = 2048
INCEPTION_SIZE = 299


def pytorch_fid(pixels: np.ndarray) -> Tensor:
    """Resize as pytorch-fid: bilinear without antialiasing on values in 0..1. uint8 [H, W, 3] to float32 [3, 299,
    299]."""
    from torch.nn import functional as F

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
    from torch.nn import functional as F

    x_BCHW = _planes(pixels)[None]
    return _centred(
        F.interpolate(x_BCHW, (INCEPTION_SIZE, INCEPTION_SIZE), mode="bilinear", align_corners=False, antialias=True)[0]
    )


@code_version(2)
def clean(pixels: np.ndarray) -> Tensor:
    """Resize as clean-fid (Parmar et al. 2022): Pillow's antialiased bicubic on float channels, clipped to 0..255,
    not rounded. uint8 [H, W, 3] to float32 [3, 299, 299]."""
    import torch

    channels = [Image.fromarray(pixels[..., channel].astype(np.float32)) for channel in range(3)]
    resized = [
        np.asarray(channel.resize((INCEPTION_SIZE, INCEPTION_SIZE), Image.Resampling.BICUBIC)) for channel in channels
    ]
    return _centred(torch.from_numpy(np.stack(resized).clip(0, 255)))


def bicubic256(pixels: np.ndarray) -> np.ndarray:
    """Resize uint8 [H, W, 3] to [256, 256, 3], bicubic without antialiasing, and truncate as LlamaGen's script."""
    import torch
    from torch.nn import functional as F

    resized = F.interpolate(_planes(pixels)[None], (256, 256), mode="bicubic", align_corners=False)[0]
    return resized.clamp(0, 255).to(torch.uint8).permute(1, 2, 0).numpy()


FRONT_ENDS: Mapping[str, Callable[[np.ndarray], Tensor]] = {
    "pytorch-fid": pytorch_fid,
    "tf1": tf1,
    "tm-aa": tm_aa,
    "clean": clean,
}
CROPS: Mapping[str, Callable[[np.ndarray], np.ndarray]] = {
    "none": whole,
    "center256": center256,
    "bicubic256": bicubic256,
}


def _planes(pixels: np.ndarray) -> Tensor:
    import torch

    return torch.from_numpy(np.array(pixels)).permute(2, 0, 1).to(torch.float32)


def _centred(x: Tensor) -> Tensor:
    return (x - 128) / 128


def _corner_grid(length: int) -> tuple[Tensor, Tensor, Tensor]:
    """Interpolation indices and weights [299] of a length: pixel before, pixel after, and the share of the latter."""
    import torch

    place = torch.arange(INCEPTION_SIZE, dtype=torch.float32) * (length / INCEPTION_SIZE)
    before = place.floor().long()
    return before, (before + 1).clamp(max=length - 1), place - before
