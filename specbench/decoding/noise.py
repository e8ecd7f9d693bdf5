"""Counter-based random numbers: each is addressed, not drawn in sequence.

Every random number is a pure function of (run seed, prompt id, sample, stream slot, stream, draw), so batch, order,
resuming and workers cannot change an image, and decoders can share noise. The hash is SplitMix64's finaliser on a
counter.
"""

from __future__ import annotations

import copy
import hashlib
from collections.abc import Sequence
from enum import IntEnum
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from specbench.decoding.sampling import kept, run_race

Bits = np.ndarray | Tensor
"""int64 hash states: arrays on a CPU, where numpy's integer arithmetic is two to five times as fast as torch's."""

_GOLDEN = -7046029254386353131
_MIX_1 = -4658895280553007687
_MIX_2 = -7723592293110705685


class Stream(IntEnum):
    """Purpose of a random number; two streams at one slot are independent."""

    TOKEN = 0
    COIN = 1
    RESIDUAL = 2
    REDRAW = 3
    FRESH = 4
    SIBLING = 5
    SIBLING_COIN = 6


def row_key(seed: int, prompt_id: str, sample: int) -> int:
    """Hash (run seed, prompt id, sample) to the signed 64-bit key of an image."""
    name = f"{seed}\0{prompt_id}\0{sample}".encode()
    return int.from_bytes(hashlib.blake2b(name, digest_size=8).digest(), "little", signed=True)


def _mix(x: Bits) -> Bits:
    """SplitMix64's finaliser, in place. int64 arithmetic wraps; the masks turn arithmetic shifts into logical ones."""
    x ^= (x >> 30) & 0x3FFFFFFFF
    x *= _MIX_1
    x ^= (x >> 27) & 0x1FFFFFFFFF
    x *= _MIX_2
    x ^= (x >> 31) & 0x1FFFFFFFF
    return x


class _Together(NamedTuple):
    """Uniforms of several streams at the same `positions` [B, T] and `draw` [B, 1], by stream."""

    positions: Tensor
    draw: Tensor
    uniforms: dict[Stream, Tensor]

    def holds(self, positions: Tensor, stream: Stream | Tensor, draw: int | Tensor) -> bool:
        """Whether the numbers asked for are these: the same `draw`, and `positions` or a view of its first slots."""
        if draw is not self.draw or isinstance(stream, Tensor) or stream not in self.uniforms:
            return False
        own = self.positions
        return positions.data_ptr() == own.data_ptr() and positions.stride() == own.stride()


class Noise:
    """The random numbers of a batch of images."""

    def __init__(self, keys: Sequence[int], vocab: int, device: torch.device | str = "cpu"):
        """`keys`: one `row_key` per row; `vocab`: tokens V in a race."""
        self._device = torch.device(device)
        # Distinguishes the tokens of one address.
        self._counter = torch.arange(2, vocab + 2, device=self._device) * _GOLDEN
        self._keys = self._column(keys)
        self._together: _Together | None = None

    def rekey(self, rows: Tensor, keys: Sequence[int]) -> None:
        """Give `rows` [K] to other images."""
        self._keys[rows] = self._column(keys)
        self._together = None

    def repeated(self, times: int) -> Noise:
        """The noise of the same images, each in `times` consecutive rows."""
        other = copy.copy(self)
        other._keys, other._together = self._keys.repeat_interleave(times, 0), None
        return other

    def branched(self, times: int) -> Noise:
        """Noise for `times` consecutive rows of each image, independent of each other; the first is the image's."""
        other = self.repeated(times)
        branch = torch.arange(times, device=self._device).repeat(len(self._keys))[:, None]
        # An odd number that is no small multiple of the slots' own step.
        other._keys = other._keys + branch * _MIX_2
        return other

    def _column(self, keys: Sequence[int]) -> Tensor:
        return torch.tensor(list(keys), dtype=torch.int64, device=self._device)[:, None]

    def _bits(self, numbers: Tensor) -> Bits:
        """Convert integers to the type that this device hashes fastest."""
        return numbers.numpy() if self._device.type == "cpu" else numbers

    def _counted(self, numbers: Bits | int) -> Bits | int:
        """(numbers + 1) * golden; a single number is wrapped on the host, to avoid a sync."""
        if isinstance(numbers, int):
            return ((numbers + 1) * _GOLDEN + 2**63) % 2**64 - 2**63
        return (numbers + 1) * _GOLDEN

    def _base(self, positions: Tensor, stream: Stream | Tensor, draw: int | Tensor) -> Bits:
        """[B, T] hash state of each address."""
        stream, draw = (self._bits(x) if isinstance(x, Tensor) else int(x) for x in (stream, draw))
        return _mix(self._slots(positions) + self._counted(draw * len(Stream) + stream))

    def _slots(self, positions: Tensor) -> Bits:
        """[B, T] hash state of each image's stream slot."""
        return _mix(self._bits(self._keys) + self._counted(self._bits(positions)))

    def uniform(self, positions: Tensor, stream: Stream | Tensor, draw: int | Tensor = 0) -> Tensor:
        """[B, T] float64 uniforms in (0, 1) for stream slots `positions` [B, T]; `draw` numbers repeated draws."""
        # Compiled code must not depend on what eager steps hashed.
        together = None if torch.compiler.is_compiling() else self._together
        if together and together.holds(positions, stream, draw):
            return together.uniforms[stream][:, : positions.shape[1]]
        return self._to_uniform(self._base(positions, stream, draw))

    def hash_together(self, positions: Tensor, streams: Sequence[Stream], draw: Tensor) -> None:
        """Hash the numbers of several `streams` at `positions` [B, T] and `draw` [B, 1] in one pass, of which `uniform`
        will be asked for the first slots of `positions`. Eager steps on a CPU: there the calls cost, not the numbers.
        """
        if self._device.type != "cpu" or torch.compiler.is_compiling():
            return
        addresses = draw.numpy() * len(Stream) + np.array(streams)[:, None, None]
        uniforms = self._to_uniform(_mix(self._slots(positions) + self._counted(addresses)))
        self._together = _Together(positions, draw, dict(zip(streams, uniforms, strict=True)))

    @staticmethod
    def _to_uniform(base: Bits) -> Tensor:
        """Float64 uniforms in (0, 1) of hash states."""
        bits = _top_bits(_mix(base + _GOLDEN))
        if isinstance(bits, np.ndarray):
            return torch.from_numpy((bits + 0.5) * 2.0**-53)
        return bits.double().add_(0.5).mul_(2.0**-53)

    def tie_break(self, positions: Tensor) -> Tensor:
        """[B, T] uniforms v of the Rosenblatt transform; no draw of decoding has a negative number."""
        return self.uniform(positions, Stream.TOKEN, -1)

    def race(self, positions: Tensor, stream: Stream | Tensor, draw: int | Tensor = 0) -> Tensor:
        """[B, T, V] float32 standard exponentials, one per token.

        argmax(p / race) is a draw from p (the exponential race, the same as the Gumbel-max trick), and two nearby
        distributions racing with the same numbers mostly agree.
        """
        return self._exponentials(positions, self._counter, stream, draw)

    def run_race(self, weights: Tensor, positions: Tensor, stream: Stream | Tensor, draw: int | Tensor = 0) -> Tensor:
        """[B, T] tokens drawn from unnormalised `weights` [B, T, V] by their `race`, run by tokens of positive weight
        only.
        """
        runners = kept(weights)
        all_run = runners.mass.shape[-1] == weights.shape[-1]
        counter = self._counter if all_run else (runners.ids + 2) * _GOLDEN
        return runners.token(run_race(runners.mass, self._exponentials(positions, counter, stream, draw)))

    def _exponentials(self, positions: Tensor, counter: Tensor, stream: Stream | Tensor, draw: int | Tensor) -> Tensor:
        """[B, T, K] exponentials of tokens with counters `counter` [K] or [B, T, K]."""
        bits = _mix(self._base(positions, stream, draw)[..., None] + self._bits(counter))
        top = _top_bits(bits)
        uniform = (torch.from_numpy(top) if isinstance(top, np.ndarray) else top).float().mul_(2.0**-53)
        # log1p keeps the small values, which win races, at full relative precision; the clamp keeps both ends finite.
        return uniform.clamp_(2.0**-54, 1 - 2.0**-24).neg_().log1p_().neg_()


def _top_bits(bits: Bits) -> Bits:
    """The upper 53 bits of hash states, as int64; uses up `bits`."""
    bits >>= 11
    bits &= 0x1FFFFFFFFFFFFF
    return bits
