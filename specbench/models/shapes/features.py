"""The feature network behind `shapes-frechet`: pictures to 64 numbers that tell objects, colors, counts and backgrounds
apart."""

from __future__ import annotations

from pathlib import Path

from safetensors.torch import load_file
from torch import Tensor, nn

from specbench.models.shapes import FEATURE_FILE, FEATURES
from specbench.models.shapes.tokenizer import to_float


class FeatureNetwork(nn.Sequential):
    """Four convolutions down to 8 x 8 places, averaged: uint8 [B, 3, 64, 64] to [B, 64]."""

    def __init__(self):
        layers: list[nn.Module] = []
        for inner, outer, stride in ((3, 24, 2), (24, 48, 2), (48, 96, 2), (96, FEATURES, 1)):
            convolution = nn.Conv2d(inner, outer, 3, stride, padding=1, bias=False)
            layers += [convolution, nn.BatchNorm2d(outer), nn.ReLU()]
        super().__init__(*layers)

    def forward(self, images: Tensor) -> Tensor:
        return super().forward(to_float(images)).mean((2, 3))


def load_features(device: str = "cpu", file: Path = FEATURE_FILE) -> FeatureNetwork:
    """The shipped network in float32."""
    network = FeatureNetwork()
    network.load_state_dict(load_file(file))
    return network.eval().requires_grad_(False).to(device)
