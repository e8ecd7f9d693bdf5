"""An Inception checkpoint in the published format: random weights whose normalisations have seen images. With the
statistics of a fresh network its features hardly depend on the image, so a test on them could not fail."""

from pathlib import Path

import numpy as np
import torch
from torch import nn

from specbench.metrics.inception_network import Inception


def images(n: int, height: int = 40, width: int = 56, seed: int = 0) -> list[np.ndarray]:
    """Images with coarse and fine structure, uint8 [H, W, 3]."""
    draw = np.random.default_rng(seed)
    coarse = draw.integers(0, 256, (n, height // 8 + 1, width // 8 + 1, 3)).repeat(8, axis=1).repeat(8, axis=2)
    fine = draw.integers(-60, 60, (n, height, width, 3))
    return list(np.clip(coarse[:, :height, :width] + fine, 0, 255).astype(np.uint8))


def save_inception(path: Path) -> Path:
    """Write the checkpoint; the same one every time."""
    torch.manual_seed(0)
    network = Inception()
    for layer in network.modules():
        if isinstance(layer, nn.Conv2d):
            nn.init.kaiming_normal_(layer.weight)
        if isinstance(layer, nn.BatchNorm2d):
            layer.momentum = None
    network.train()
    pixels = torch.from_numpy(np.stack(images(3, 299, 299))).permute(0, 3, 1, 2)
    with torch.no_grad():
        network(pixels.float() / 128 - 1)
    torch.save(network.state_dict(), path)
    return path
