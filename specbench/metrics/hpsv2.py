"""`hpsv2[v2.1]` and `hpsv2[v2.0]`: Human Preference Score (Wu et al. 2023), computed by open_clip from the authors'
checkpoints.

The authors' way in is kept: resized as a float tensor with antialiasing, so that the longer side is 224, and padded
with black before normalising. (The authors' package is made of torchvision's transforms, which may not fit this torch.)
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import cached_property
from pathlib import Path

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F

from specbench.metrics import published_weights
from specbench.metrics.base import Settings, described
from specbench.metrics.clip import CosineMetric, clip_versions
from specbench.metrics.openclip import centred, scaled, untrained_model

ARCHITECTURE = "ViT-H-14"
_SIZE = 224


def hps_input(pixels: np.ndarray) -> Tensor:
    """Preprocess uint8 [H, W, 3] for HPSv2: normalised float32 [3, 224, 224]."""
    x_BCHW = scaled(pixels)[None]
    height, width = x_BCHW.shape[2:]
    scale = _SIZE / max(height, width)
    target = (round(height * scale), round(width * scale))
    if scale != 1:
        x_BCHW = F.interpolate(x_BCHW, target, mode="bicubic", antialias=True, align_corners=False)
    down, across = _SIZE - target[0], _SIZE - target[1]
    x_BCHW = F.pad(x_BCHW, (across // 2, across - across // 2, down // 2, down - down // 2))
    return centred(x_BCHW[0])


def load_hpsv2(path: Path, device: str, architecture: str = ARCHITECTURE) -> torch.nn.Module:
    """Build the network and load an authors' checkpoint, whose digest the caller has checked, in float32."""
    model = untrained_model(architecture)
    content = torch.load(path, map_location="cpu", weights_only=True)
    model.load_state_dict(content["state_dict"])
    return model.float().eval().requires_grad_(False).to(device)


class Hpsv2(CosineMetric):
    """HPSv2 (Wu et al. 2023): cosine of image and caption, -1 to 1, in float32."""

    def __init__(self, variant: str, settings: Settings | None = None):
        super().__init__(settings)
        self.name = f"hpsv2[{variant}]"
        self.checkpoints = (f"hpsv2-{variant}",)

    def identity(self) -> Mapping[str, str]:
        return {
            "weights": published_weights.CHECKPOINTS[self.checkpoints[0]].digest,
            "resize": described("longer side 224, tensor bicubic, antialiased, black padding", hps_input),
            **clip_versions(),
        }

    @cached_property
    def network(self) -> torch.nn.Module:
        return load_hpsv2(self.weights_file(self.checkpoints[0]), self.settings.device)

    def preprocess(self, pixels: np.ndarray) -> Tensor:
        return hps_input(pixels)
