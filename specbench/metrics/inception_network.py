"""The Inception network of FID, loaded from its published file."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from specbench.system.torch_state import PinnedTorch

_FEATURES = 2048


class Inception(nn.Module):
    """Inception v3 of the FID papers (TensorFlow, 2015): average pooling ignores padding, and the last block uses max
    pooling. Input: images [B, 3, 299, 299], scaled to about -1..1; output: features [B, 2048]. Layers are named as in
    the published file."""

    def __init__(self) -> None:
        super().__init__()
        self.Conv2d_1a_3x3 = _Conv(3, 32, 3, 2)
        self.Conv2d_2a_3x3 = _Conv(32, 32, 3, padded=False)
        self.Conv2d_2b_3x3 = _Conv(32, 64, 3)
        self.Conv2d_3b_1x1 = _Conv(64, 80, 1)
        self.Conv2d_4a_3x3 = _Conv(80, 192, 3, padded=False)
        self.Mixed_5b = _block_35(192, 32)
        self.Mixed_5c = _block_35(256, 64)
        self.Mixed_5d = _block_35(288, 64)
        self.Mixed_6a = _reduce_35(288)
        self.Mixed_6b = _block_17(768, 128)
        self.Mixed_6c = _block_17(768, 160)
        self.Mixed_6d = _block_17(768, 160)
        self.Mixed_6e = _block_17(768, 192)
        self.Mixed_7a = _reduce_17(768)
        self.Mixed_7b = _block_8(1280, "average")
        self.Mixed_7c = _block_8(2048, "maximum")
        self.fc = nn.Linear(_FEATURES, 1008)

    def forward(self, x_BCHW: Tensor) -> Tensor:
        x = x_BCHW
        for name, layer in self.named_children():
            if name != "fc":
                x = layer(F.max_pool2d(x, 3, 2) if name in ("Conv2d_3b_1x1", "Mixed_5b") else x)
        return x.mean((2, 3))

    @PinnedTorch()
    def unbiased_logits(self, features_BD: Tensor) -> Tensor:
        """Return logits [B, 1008] of features, on the CPU and without the bias, as for TensorFlow's Inception score."""
        return (features_BD.to(self.fc.weight) @ self.fc.weight.T).cpu()


def load_inception(path: Path, device: str = "cpu") -> Inception:
    """Build the network from its published file. The caller has checked the digest."""
    network = Inception()
    network.load_state_dict(torch.load(path, map_location="cpu", weights_only=True))
    return network.eval().requires_grad_(False).to(device)


def _block_35(channels: int, pooled: int) -> _Block:
    return _Block("average", {
        "branch1x1": (channels, 64, 1),
        "branch5x5_1": (channels, 48, 1), "branch5x5_2": (48, 64, 5),
        "branch3x3dbl_1": (channels, 64, 1), "branch3x3dbl_2": (64, 96, 3), "branch3x3dbl_3": (96, 96, 3),
        "branch_pool": (channels, pooled, 1),
    })  # fmt: skip


def _reduce_35(channels: int) -> _Block:
    return _Block("reduce", {
        "branch3x3": (channels, 384, 3, 2),
        "branch3x3dbl_1": (channels, 64, 1), "branch3x3dbl_2": (64, 96, 3), "branch3x3dbl_3": (96, 96, 3, 2),
    })  # fmt: skip


def _block_17(channels: int, inner: int) -> _Block:
    row, column = (1, 7), (7, 1)
    return _Block("average", {
        "branch1x1": (channels, 192, 1),
        "branch7x7_1": (channels, inner, 1), "branch7x7_2": (inner, inner, row), "branch7x7_3": (inner, 192, column),
        "branch7x7dbl_1": (channels, inner, 1),
        "branch7x7dbl_2": (inner, inner, column), "branch7x7dbl_3": (inner, inner, row),
        "branch7x7dbl_4": (inner, inner, column), "branch7x7dbl_5": (inner, 192, row),
        "branch_pool": (channels, 192, 1),
    })  # fmt: skip


def _reduce_17(channels: int) -> _Block:
    return _Block("reduce", {
        "branch3x3_1": (channels, 192, 1), "branch3x3_2": (192, 320, 3, 2),
        "branch7x7x3_1": (channels, 192, 1), "branch7x7x3_2": (192, 192, (1, 7)),
        "branch7x7x3_3": (192, 192, (7, 1)), "branch7x7x3_4": (192, 192, 3, 2),
    })  # fmt: skip


def _block_8(channels: int, pool: Literal["average", "maximum"]) -> _Block:
    row, column = (1, 3), (3, 1)
    return _Block(pool, {
        "branch1x1": (channels, 320, 1),
        "branch3x3_1": (channels, 384, 1), "branch3x3_2a": (384, 384, row), "branch3x3_2b": (384, 384, column),
        "branch3x3dbl_1": (channels, 448, 1), "branch3x3dbl_2": (448, 384, 3),
        "branch3x3dbl_3a": (384, 384, row), "branch3x3dbl_3b": (384, 384, column),
        "branch_pool": (channels, 192, 1),
    })  # fmt: skip


class _Block(nn.Module):
    """Parallel branches of `_Conv` layers. `layers`: {"BRANCH_NUMBER": arguments of a layer}; a branch may end with two
    parallel layers of one number. `pool` precedes the last branch; "reduce": this branch is max pooling of stride 2."""

    def __init__(self, pool: Literal["average", "maximum", "reduce"], layers: Mapping[str, tuple[Any, ...]]):
        super().__init__()
        self.pool, self.chains = pool, dict[str, dict[str, list[str]]]()
        for name, arguments in layers.items():
            self.add_module(name, _Conv(*arguments))
            branch, _, place = name.partition("_")
            if place != "pool":
                self.chains.setdefault(branch, {}).setdefault(place[:1], []).append(name)

    def forward(self, x_BCHW: Tensor) -> Tensor:
        parts = []
        for chain in self.chains.values():
            *inner, last = chain.values()
            x = x_BCHW
            for (name,) in inner:
                x = getattr(self, name)(x)
            parts += [getattr(self, name)(x) for name in last]
        if self.pool == "reduce":
            return torch.cat([*parts, F.max_pool2d(x_BCHW, 3, 2)], 1)
        average = self.pool == "average"
        pooled = F.avg_pool2d(x_BCHW, 3, 1, 1, count_include_pad=False) if average else F.max_pool2d(x_BCHW, 3, 1, 1)
        return torch.cat([*parts, self.branch_pool(pooled)], 1)


class _Conv(nn.Module):
    """Convolution with batch norm. With stride 1 and `padded`, the output has the size of the input."""

    def __init__(
        self, channels: int, out: int, kernel: int | tuple[int, int], stride: int = 1, padded: bool = True
    ) -> None:
        super().__init__()
        sizes = (kernel, kernel) if isinstance(kernel, int) else kernel
        padding = [size // 2 for size in sizes] if padded and stride == 1 else 0
        self.conv = nn.Conv2d(channels, out, kernel, stride, padding, bias=False)
        self.bn = nn.BatchNorm2d(out, eps=0.001)

    def forward(self, x_BCHW: Tensor) -> Tensor:
        return F.relu(self.bn(self.conv(x_BCHW)))
