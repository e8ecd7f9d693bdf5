"""Depth of a picture: Depth Anything V2 (Yang et al. 2024) through transformers."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import torch
from PIL import Image
from torch import Tensor
from torch.nn import functional as F

from specbench.metrics.mask2former import MEAN, STD
from specbench.metrics.openclip import centred, scaled

DEPTH_REPOSITORY = "depth-anything/Depth-Anything-V2-Small-hf"
SHORT, PATCH = 518, 14


def depth_input(pixels: np.ndarray) -> Tensor:
    """Resize uint8 [H, W, 3] to float32 [3, h, w]: short side 518, long side to whole patches, Pillow bicubic."""
    height, width = pixels.shape[:2]
    scale = SHORT / min(height, width)
    size = [PATCH * round(side * scale / PATCH) for side in (width, height)]
    resized = Image.fromarray(pixels).resize(size, Image.Resampling.BICUBIC)
    return centred(scaled(np.asarray(resized)), MEAN, STD)


class Depth:
    """Depth Anything V2 (Yang et al. 2024) from a transformers checkpoint folder."""

    def __init__(self, folder: Path, device: str):
        from transformers import DepthAnythingForDepthEstimation  # takes seconds

        model = DepthAnythingForDepthEstimation.from_pretrained(folder, local_files_only=True, use_safetensors=True)
        self.network = model.float().eval().requires_grad_(False).to(device)
        self.device = device

    @torch.inference_mode()
    def __call__(self, pixels: np.ndarray) -> np.ndarray:
        """Estimate the nearness of each pixel of uint8 [H, W, 3]: float32 [H, W] from 0 (farthest) to 1 (nearest)."""
        found = self.network(depth_input(pixels)[None].to(self.device)).predicted_depth[None]
        near = F.interpolate(found, pixels.shape[:2], mode="bicubic", align_corners=False)[0, 0].cpu().numpy()
        low, high = near.min(), near.max()
        return (near - low) / (high - low) if high > low else np.zeros_like(near)
