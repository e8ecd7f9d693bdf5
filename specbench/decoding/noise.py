"""Noise that is addressed, not drawn in order.

Every random number is a pure function of (run seed, prompt id, sample, stream slot, stream, draw), so batch, order,
resuming and workers cannot change an image, and decoders can share noise. The hash is SplitMix64's finaliser on a
counter.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from enum import IntEnum

import torch
from torch import Tensor

_GOLDEN = -7046029254386353131
_MIX_1 = -4658895280553007687
_MIX_2 = -7723592293110705685


class Stream(IntEnum):
    """What a number is used for; two streams at one slot are independent."""

    TOKEN = 0
    COIN = 1
    RESIDUAL = 2
    REDRAW = 3
    FRESH = 4
    SIBLING = 5
    SIBLING_COIN = 6


def row_key(seed: int, prompt_id: str, sample: int) -> int:
    """Signed 64-bit key of one image."""
    name = f"{seed}\0{prompt_id}\0{sample}".encode()
    return int.from_bytes(hashlib.blake2b(name, digest_size=8).digest(), "little", signed=True)


def _mix(x: Tensor) -> Tensor:
    """SplitMix64's finaliser, in place. int64 arithmetic wraps; the masks turn arithmetic shifts into logical ones."""
    x ^= (x >> 30) & 0x3FFFFFFFF
    x *= _MIX_1
    x ^= (x >> 27) & 0x1FFFFFFFFF
    x *= _MIX_2
    x ^= (x >> 31) & 0x1FFFFFFFF
    return x


class Noise:
    """The random numbers of a batch of images."""

    def __init__(self, keys: Sequence[int], device: torch.device | str = "cpu"):
        """`keys`: one `row_key` per row."""
        self._keys = torch.tensor(list(keys), dtype=torch.int64, device=device)

    def _base(self, positions: Tensor, stream: Stream | Tensor, draw: int | Tensor) -> Tensor:
        """[B, T] int64 hash state of each address."""
        state = _mix(self._keys[:, None] + (positions + 1) * _GOLDEN)
        purpose = torch.as_tensor(draw * len(Stream) + stream + 1, device=state.device)
        return _mix(state + purpose * _GOLDEN)

    def uniform(self, positions: Tensor, stream: Stream, draw: int | Tensor = 0) -> Tensor:
        """[B, T] float64 uniforms in (0, 1) for stream slots `positions` [B, T]; `draw` tells repeats apart."""
        bits = _mix(self._base(positions, stream, draw) + _GOLDEN)
        return ((bits >> 11) & 0x1FFFFFFFFFFFFF).double().add_(0.5).mul_(2.0**-53)

    def race(self, positions: Tensor, vocab: int, stream: Stream | Tensor, draw: int | Tensor = 0) -> Tensor:
        """[B, T, vocab] float32 standard exponentials, one per token.

        argmax(p / race) is a draw from p (the exponential race, the same as the Gumbel-max trick), and two nearby
        distributions racing with the same numbers mostly agree.
        """
        base = self._base(positions, stream, draw)[..., None]
        counter = torch.arange(2, vocab + 2, device=base.device) * _GOLDEN
        bits = _mix(base + counter)
        uniform = ((bits >> 11) & 0x1FFFFFFFFFFFFF).float().mul_(2.0**-53)
        # log1p keeps the small values, which win races, at full relative precision; the clamp keeps both ends finite.
        return uniform.clamp_(2.0**-54, 1 - 2.0**-24).neg_().log1p_().neg_()
