"""The feature network behind `shapes-frechet`: pictures to 64 numbers that tell objects, colors, counts and backgrounds
apart."""

from __future__ import annotations

from pathlib import Path

from safetensors.torch import load_file
from torch import Tensor, nn

from .network import WEIGHTS
from .tokenizer import to_float

FEATURES = 64
FILE = WEIGHTS / "features.safetensors"


class FeatureNetwork(nn.Sequential):
    """Four convolutions down to 8 x 8 places, averaged: uint8 [B, 3, 64, 64] to [B, 64]."""

    def __init__(self):
        super().__init__(
            nn.Conv2d(3, 24, 3, stride=2, padding=1),
            nn.SiLU(),
            nn.Conv2d(24, 48, 3, stride=2, padding=1),
            nn.GroupNorm(8, 48),
            nn.SiLU(),
            nn.Conv2d(48, 96, 3, stride=2, padding=1),
            nn.GroupNorm(8, 96),
            nn.SiLU(),
            nn.Conv2d(96, FEATURES, 3, padding=1),
            nn.SiLU(),
        )

    def forward(self, images: Tensor) -> Tensor:
        return super().forward(to_float(images)).mean((2, 3))


def load_features(device: str = "cpu", file: Path = FILE) -> FeatureNetwork:
    """The shipped network in float32."""
    network = FeatureNetwork()
    network.load_state_dict({name: tensor.float() for name, tensor in load_file(file).items()})
    return network.eval().requires_grad_(False).to(device)
