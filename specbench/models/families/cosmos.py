"""Image decoder of SimpleAR: NVIDIA's discrete video tokenizer Cosmos DV8x16x16 (arXiv:2501.03575) on a single frame.

It is published as a TorchScript archive of a network over time, height and width. For a single frame it becomes a
network over images with the published tensors. The frame is padded with copies, so all taps of a convolution over time
act on the same values and are summed. Attention over time attends to a single value. The inverse wavelet transform
gives several frames; only the last is kept.
"""

from collections import OrderedDict
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor, nn
from torch.nn import functional

from specbench.models.checkpoint_files import CheckpointFiles
from specbench.models.checkpoint_loading import build_network, drop, fill, randomise, read_tensors, rename

FSQ_LEVELS = (8, 8, 8, 5, 5, 5)
VqSizes = tuple[int, Sequence[int], int]
PUBLISHED: VqSizes = (16, (256, 512, 512), 3)
"""Channels of the latent, channels of the levels from the image down, blocks per level."""
SMALL: VqSizes = (16, (16, 16, 16), 1)
_SUBBANDS = 3 * 4**3  # Channels after two Haar transforms of three colours over time, height and width
_HAAR = ((1.0, 1.0, 1.0, 1.0), (1.0, -1.0, 1.0, -1.0), (1.0, 1.0, -1.0, -1.0), (1.0, -1.0, -1.0, 1.0))
"""Signs of the subbands (low or high by height, then by width) in the four pixels of a square."""


def fsq_codebook() -> Tensor:
    """Return the codes [64000, 6] of finite scalar quantisation, centred and scaled to about [-1, 1] per dimension."""
    levels = torch.tensor(FSQ_LEVELS)
    basis = torch.cat([torch.ones(1, dtype=torch.long), levels[:-1].cumprod(0)])
    digits = torch.arange(int(levels.prod()))[:, None] // basis % levels
    return (digits - levels // 2) / (levels // 2)


class CosmosDecoder:
    """Image decoder on the network that the function `network` builds, in float32."""

    def __init__(self, network: nn.Module, device: str):
        self._network = network
        self.codebook = fsq_codebook().to(device)

    def decode(self, codes: Tensor) -> Tensor:
        return last_frame(last_frame(self._network(self.codebook[codes].permute(0, 3, 1, 2))))


def last_frame(x: Tensor) -> Tensor:
    """Invert one Haar transform: from subbands [B, 8 C, H, W] of two frames to the later frame [B, C, 2 H, 2 W]."""
    low, high = x.unflatten(1, (2, 4, -1)).unbind(1)
    pixels = torch.einsum("ps,bschw->bcphw", x.new_tensor(_HAAR), low - high)
    return functional.pixel_shuffle(pixels.flatten(1, 2), 2)


def network(latent: int, widths: Sequence[int], blocks: int) -> nn.Module:
    """Build the network that maps codes [B, 6, h, w] to subbands [B, 192, 4 h, 4 w]. Sizes: see `PUBLISHED`."""
    deepest, levels = widths[-1], {}
    for level in reversed(range(len(widths))):
        inner, width = ([*widths, deepest][level + 1], widths[level])
        parts = {"block": nn.Sequential(*(_Block(width if place else inner, width) for place in range(blocks)))}
        if level:
            # The published network scales time by 2 in the second of its three levels only.
            parts["upsample"] = _Upsample(width, over_time=level == len(widths) - 2)
        levels[str(level)] = _chain(parts)
    decoder = {
        "conv_in": _factorised(latent, deepest),
        "mid": _chain(
            {
                "block_1": _Block(deepest, deepest),
                "attn_1": nn.Sequential(_Attention(deepest, over_time=False), _Attention(deepest, over_time=True)),
                "block_2": _Block(deepest, deepest),
            }
        ),
        "up": _chain(levels),
        "norm_out": _norm(widths[0]),
        "activation": nn.SiLU(),
        "conv_out": _factorised(widths[0], _SUBBANDS),
    }
    return _chain({"post_quant_conv": nn.Conv2d(len(FSQ_LEVELS), latent, 1), "decoder": _chain(decoder)})


class _Block(nn.Module):
    def __init__(self, inner: int, outer: int):
        super().__init__()
        self.norm1, self.conv1 = _norm(inner), _factorised(inner, outer)
        self.norm2, self.conv2 = _norm(outer), _factorised(outer, outer)
        self.nin_shortcut = nn.Conv2d(inner, outer, 1) if inner != outer else nn.Identity()

    def forward(self, x: Tensor) -> Tensor:
        y = self.conv1(functional.silu(self.norm1(x)))
        return self.nin_shortcut(x) + self.conv2(functional.silu(self.norm2(y)))


class _Attention(nn.Module):
    """Attention between the positions of a frame, or between the frames at a position."""

    def __init__(self, width: int, over_time: bool):
        super().__init__()
        self.over_time = over_time
        self.norm = _norm(width)
        self.q, self.k, self.v, self.proj_out = (nn.Conv2d(width, width, 1) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        y = self.norm(x)
        if self.over_time:
            return x + self.proj_out(self.v(y))
        query, key, value = (part(y).flatten(2).mT for part in (self.q, self.k, self.v))
        return x + self.proj_out(functional.scaled_dot_product_attention(query, key, value).mT.reshape(x.shape))


class _Upsample(nn.Module):
    """Upsampling of height and width by 2. Every level stores `conv1`, but only levels that also scale time use it."""

    def __init__(self, width: int, over_time: bool):
        super().__init__()
        self.over_time = over_time
        self.conv1 = nn.Conv2d(width, width, 1)
        self.conv2 = nn.Conv2d(width, width, 3, padding=1)
        self.conv3 = nn.Conv2d(width, width, 1)

    def forward(self, x: Tensor) -> Tensor:
        if self.over_time:
            x = self.conv1(x) + x
        x = functional.interpolate(x, scale_factor=2)
        return self.conv3(self.conv2(x) + x)


def _chain(parts: Mapping[str, nn.Module]) -> nn.Sequential:
    return nn.Sequential(OrderedDict(parts))


def _factorised(inner: int, outer: int) -> nn.Sequential:
    """Build a convolution over the frame, then a convolution over time."""
    return nn.Sequential(nn.Conv2d(inner, outer, 3, padding=1), nn.Conv2d(outer, outer, 1))


def _norm(width: int) -> nn.GroupNorm:
    return nn.GroupNorm(1, width, eps=1e-6)


def load_cosmos(files: CheckpointFiles, device: str) -> CosmosDecoder:
    """Load the decoder of a published `decoder.jit`, in float32."""
    kept = drop(read_tensors(files), ("inv_quant.", "decoder.unpatcher3d."))
    tensors = rename(kept, lambda name: name.replace(".conv3d.", ".").replace(".norm.", ".", 1))
    flat = {name: tensor.float().sum(2) if tensor.dim() == 5 else tensor for name, tensor in tensors.items()}
    ups = {tuple(name.split(".")[2:5:2]) for name in flat if name.startswith("decoder.up.") and ".block." in name}
    levels = len({level for level, _ in ups})
    try:
        widths = [len(flat[f"decoder.up.{level}.block.0.norm2.weight"]) for level in range(levels)]
        sizes: VqSizes = len(flat["post_quant_conv.weight"]), widths or list(PUBLISHED[1]), len(ups) // max(levels, 1)
    except KeyError:
        sizes = PUBLISHED
    return CosmosDecoder(fill(build_network(network, *sizes), flat, files, device, torch.float32), device)


def random_cosmos(sizes: VqSizes, device: str) -> CosmosDecoder:
    return CosmosDecoder(randomise(build_network(network, *sizes), device, torch.float32), device)
