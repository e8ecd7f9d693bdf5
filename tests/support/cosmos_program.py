"""A discrete video decoder over time, height and width, with the parameter names of NVIDIA's `decoder.jit`."""

import itertools

import torch
from torch import Tensor, nn
from torch.nn import functional

LEVELS = torch.tensor([8, 8, 8, 5, 5, 5])


class Conv(nn.Module):
    """Causal: the first frame is repeated before the clip, zeros surround every frame."""

    def __init__(self, inner: int, outer: int, time: int = 1, space: int = 1):
        super().__init__()
        self.time, self.space = time, space
        self.conv3d = nn.Conv3d(inner, outer, (time, space, space))

    def forward(self, x: Tensor) -> Tensor:
        x = torch.cat([x[:, :, :1]] * (self.time - 1) + [x], 2)
        return self.conv3d(functional.pad(x, (self.space // 2,) * 4))


class Norm(nn.Module):
    """Over channels and places of each frame."""

    def __init__(self, width: int):
        super().__init__()
        self.norm = nn.GroupNorm(1, width, eps=1e-6)

    def forward(self, x: Tensor) -> Tensor:
        return torch.stack([self.norm(frame) for frame in x.unbind(2)], 2)


class Block(nn.Module):
    def __init__(self, inner: int, outer: int):
        super().__init__()
        self.norm1, self.norm2 = Norm(inner), Norm(outer)
        self.conv1, self.conv2 = both(inner, outer), both(outer, outer)
        self.nin_shortcut = nn.Identity() if inner == outer else Conv(inner, outer)

    def forward(self, x: Tensor) -> Tensor:
        y = self.norm1(x)
        y = self.norm2(self.conv1(y * y.sigmoid()))
        return self.nin_shortcut(x) + self.conv2(y * y.sigmoid())


class Attention(nn.Module):
    def __init__(self, width: int, equation: tuple[str, str], causal: bool):
        super().__init__()
        self.equation, self.causal = equation, causal
        self.norm = Norm(width)
        self.q, self.k, self.v, self.proj_out = (Conv(width, width) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        y = self.norm(x).flatten(3)
        q, k, v = (part(y[..., None]).flatten(3) for part in (self.q, self.k, self.v))
        scores = torch.einsum(self.equation[0], q, k) * x.shape[1] ** -0.5
        if self.causal:
            scores = scores.masked_fill(torch.ones_like(scores).triu(1).bool(), -torch.inf)
        return x + self.proj_out(torch.einsum(self.equation[1], scores.softmax(-1), v).reshape(x.shape))


class Upsample(nn.Module):
    def __init__(self, width: int, frames: bool):
        super().__init__()
        self.frames = frames
        self.conv1, self.conv2, self.conv3 = Conv(width, width, time=3), Conv(width, width, space=3), Conv(width, width)

    def forward(self, x: Tensor) -> Tensor:
        if self.frames:
            x = torch.cat([x[:, :, :1], x[:, :, 1:].repeat_interleave(2, 2)], 2)
            x = x + self.conv1(x)
        x = x.repeat_interleave(2, 3).repeat_interleave(2, 4)
        return self.conv3(x + self.conv2(x))


class InverseHaar(nn.Module):
    """Two inverse transforms; of the first latent frame only the last of its four is kept."""

    def __init__(self):
        super().__init__()
        self.register_buffer("wavelets", torch.tensor([0.5**0.5, 0.5**0.5]))
        self.register_buffer("_arange", torch.arange(2))

    def forward(self, x: Tensor) -> Tensor:
        low = self.wavelets
        pair = (low, low * (1 - 2 * self._arange))
        kernels = [torch.einsum("t,h,w->thw", *filters) for filters in itertools.product(pair, repeat=3)]
        for _ in range(2):
            batch, channels, time, height, width = x.shape
            bands = x.view(batch, 8, channels // 8, time, height, width).transpose(1, 2).flatten(0, 1)
            x = functional.conv_transpose3d(bands, torch.stack(kernels)[:, None] * 8**0.5, stride=2)
            x = x.view(batch, channels // 8, 2 * time, 2 * height, 2 * width)
        return x[:, :, 3:]


class Decoder(nn.Module):
    def __init__(self, latent: int, widths: tuple[int, ...], blocks: int):
        super().__init__()
        deep = widths[-1]
        self.conv_in = both(latent, deep)
        self.mid = nn.Module()
        self.mid.block_1, self.mid.block_2 = Block(deep, deep), Block(deep, deep)
        self.mid.attn_1 = nn.Sequential(
            Attention(deep, ("bctp,bctq->btpq", "btpq,bctq->bctp"), causal=False),
            Attention(deep, ("bctp,bcsp->bpts", "bpts,bcsp->bctp"), causal=True),
        )
        self.up = nn.ModuleList(nn.Module() for _ in widths)
        for level, width in enumerate(widths):
            inner = widths[min(level + 1, len(widths) - 1)]
            self.up[level].block = nn.ModuleList(Block(width if place else inner, width) for place in range(blocks))
            self.up[level].attn = nn.ModuleList()
            if level:
                self.up[level].upsample = Upsample(width, frames=level == 1)
        self.norm_out, self.conv_out = Norm(widths[0]), both(widths[0], 192)
        self.unpatcher3d = InverseHaar()

    def forward(self, x: Tensor) -> Tensor:
        x = self.mid.block_2(self.mid.attn_1(self.mid.block_1(self.conv_in(x))))
        for level in reversed(self.up):
            for block in level.block:
                x = block(x)
            x = level.upsample(x) if hasattr(level, "upsample") else x
        x = self.norm_out(x)
        return self.unpatcher3d(self.conv_out(x * x.sigmoid()))


class Codes(nn.Module):
    """Indices [B, T, h, w] to codes [B, 6, T, h, w]."""

    def __init__(self):
        super().__init__()
        self.quantizer = nn.Module()
        self.quantizer.register_buffer("_levels", LEVELS.int())
        self.quantizer.register_buffer("_basis", torch.cat([torch.ones(1), LEVELS[:-1].cumprod(0)]).int())

    def forward(self, indices: Tensor) -> Tensor:
        levels = self.quantizer._levels
        digits = indices[..., None] // self.quantizer._basis % levels
        return ((digits - levels // 2) / (levels // 2)).movedim(-1, 1)


def both(inner: int, outer: int) -> nn.Sequential:
    """Over the frame, then over time."""
    return nn.Sequential(Conv(inner, outer, space=3), Conv(outer, outer, time=3))


def program(latent: int = 4, widths: tuple[int, ...] = (8, 16, 16), blocks: int = 2) -> nn.Module:
    """The decoder as a module that `torch.jit.trace` makes a program of."""
    parts = nn.Sequential()
    parts.add_module("inv_quant", Codes())
    parts.add_module("post_quant_conv", Conv(6, latent))
    parts.add_module("decoder", Decoder(latent, widths, blocks))
    return parts
