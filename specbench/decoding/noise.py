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
from functools import lru_cache
from typing import Any, NamedTuple, TypeAlias

import numpy as np
import torch
from torch import Tensor

from specbench.decoding.sampling import kept, run_race

Bits: TypeAlias = np.ndarray | Tensor
"""int64 hash states: arrays on a CPU, where numpy's integer arithmetic is two to five times as fast as torch's."""

_GOLDEN = -7046029254386353131
_MIX_1 = -4658895280553007687
_MIX_2 = -7723592293110705685
# For few numbers numpy spends most of its time on converting Python numbers. Shifts of unsigned arrays need no mask.
_ARRAY = {number: np.array(number % 2**64, np.uint64) for number in (11, 27, 30, 31, _MIX_1, _MIX_2)}
_ONE, _STEP = np.array(1), np.array(_GOLDEN)
_HALF, _ULP = np.array(0.5), np.array(2.0**-53)


class Stream(IntEnum):
    """Purpose of a random number; two streams at one slot are independent."""

    TOKEN = 0
    COIN = 1
    RESIDUAL = 2
    REDRAW = 3
    FRESH = 4
    SIBLING = 5
    SIBLING_COIN = 6


_STREAMS = len(Stream)
AHEAD, SLOTS_AHEAD = 16, 32  # Draws hashed at once, and slots in addition to the requested slots


def row_key(seed: int, prompt_id: str, sample: int) -> int:
    """Hash (run seed, prompt id, sample) to the signed 64-bit key of an image."""
    name = f"{seed}\0{prompt_id}\0{sample}".encode()
    return int.from_bytes(hashlib.blake2b(name, digest_size=8).digest(), "little", signed=True)


def _mix(x: Bits) -> Bits:
    """SplitMix64's finaliser, in place. int64 arithmetic wraps; the masks make arithmetic shifts logical."""
    if isinstance(x, np.ndarray):
        word: Any = x.view(np.uint64)
        word ^= word >> _ARRAY[30]
        word *= _ARRAY[_MIX_1]
        word ^= word >> _ARRAY[27]
        word *= _ARRAY[_MIX_2]
        word ^= word >> _ARRAY[31]
        return x
    x ^= (x >> 30) & 0x3FFFFFFFF
    x *= _MIX_1
    x ^= (x >> 27) & 0x1FFFFFFFFF
    x *= _MIX_2
    x ^= (x >> 31) & 0x1FFFFFFFF
    return x


def _mix_one(x: int) -> int:
    """`_mix` of a single number in Python's integers, ten times as fast as numpy's calls."""
    x %= 2**64
    x = (x ^ (x >> 30)) * _MIX_1 % 2**64
    x = (x ^ (x >> 27)) * _MIX_2 % 2**64
    return x ^ (x >> 31)


class _Ahead(NamedTuple):
    """Uniforms of one image for the slots and draws that are likely to be requested next."""

    streams: tuple[Stream, ...]  # S streams
    # slot, draw: the first slot and draw
    slot: int
    draw: int
    uniforms: np.ndarray  # [S, draws, slots] float64

    def at(self, streams: tuple[Stream, ...], slot: int, slots: int, draw: int) -> np.ndarray | None:
        """Return uniforms [S, 1, slots] of consecutive slots; None if any is missing."""
        row, column = draw - self.draw, slot - self.slot
        if streams != self.streams or not 0 <= row < self.uniforms.shape[1]:
            return None
        if not 0 <= column <= self.uniforms.shape[2] - slots:
            return None
        return self.uniforms[:, row : row + 1, column : column + slots]


class _Together(NamedTuple):
    """Uniforms of several streams at the same `positions` [B, T] and `draw` [B, 1], by stream."""

    positions: Tensor
    place: tuple[int, tuple[int, ...]]  # address and strides of `positions`; valid because `positions` is kept alive
    draw: Tensor
    uniforms: dict[Stream, Tensor]

    def holds(self, positions: Tensor, stream: Stream | Tensor, draw: int | Tensor) -> bool:
        """True if this stream and draw are stored, for `positions` or for a tensor that begins with `positions`."""
        if draw is not self.draw or isinstance(stream, Tensor) or stream not in self.uniforms:
            return False
        return _place(positions) == self.place


def _place(positions: Tensor) -> tuple[int, tuple[int, ...]]:
    return positions.data_ptr(), positions.stride()


class Noise:
    """The random numbers of a batch of images."""

    def __init__(self, keys: Sequence[int], vocab: int, device: torch.device | str = "cpu"):
        """`keys`: one `row_key` per row; `vocab`: tokens V in a race."""
        self._device = torch.device(device)
        # The counter distinguishes the tokens of an address.
        self._counter = torch.arange(2, vocab + 2, device=self._device) * _GOLDEN
        self._keys = self._column(keys)
        self._together: _Together | None = None
        self._ahead: _Ahead | None = None

    def rekey(self, rows: Tensor, keys: Sequence[int]) -> None:
        """Assign other images to `rows` [K]."""
        self._keys[rows] = self._column(keys)
        self._together = self._ahead = None

    def repeated(self, times: int) -> Noise:
        """Return the noise of the same images, each in `times` consecutive rows."""
        other = copy.copy(self)
        other._keys, other._together, other._ahead = self._keys.repeat_interleave(times, 0), None, None
        return other

    def branched(self, times: int) -> Noise:
        """Independent noise for `times` consecutive rows of each image; the first row has the image's noise."""
        other = self.repeated(times)
        branch = torch.arange(times, device=self._device).repeat(len(self._keys))[:, None]
        # _MIX_2 is odd, and no small multiple of the step between slots.
        other._keys = other._keys + branch * _MIX_2
        return other

    def _column(self, keys: Sequence[int]) -> Tensor:
        return torch.tensor(list(keys), dtype=torch.int64, device=self._device)[:, None]

    def _bits(self, numbers: Tensor) -> Bits:
        """Convert integers to the fastest form: tensors in compiled steps, which cannot guard numpy arrays."""
        on_host = self._device.type == "cpu" and not torch.compiler.is_compiling()
        return numbers.numpy() if on_host else numbers

    def _counted(self, numbers: Bits | int) -> Bits | int:
        """(numbers + 1) * golden; a single number is wrapped on the host, to avoid a sync."""
        if isinstance(numbers, int):
            return ((numbers + 1) * _GOLDEN + 2**63) % 2**64 - 2**63
        if isinstance(numbers, np.ndarray):
            return (numbers + _ONE) * _STEP
        return (numbers + 1) * _GOLDEN

    def _base(self, positions: Tensor, stream: Stream | Tensor, draw: int | Tensor) -> Bits:
        """Return the hash state [B, T] of each address."""
        if positions.numel() == 1 and self._device.type == "cpu" and not torch.compiler.is_compiling():
            slot = _mix_one(int(self._keys) + (int(positions) + 1) * _GOLDEN)
            state = _mix_one(slot + (int(draw) * _STREAMS + int(stream) + 1) * _GOLDEN)
            return np.array([[state]], np.uint64).view(np.int64)
        stream, draw = (self._bits(x) if isinstance(x, Tensor) else int(x) for x in (stream, draw))
        return _mix(self._slots(positions) + self._counted(draw * _STREAMS + stream))

    def _slots(self, positions: Tensor) -> Bits:
        """Return the hash state [B, T] of each image's stream slot."""
        return _mix(self._bits(self._keys) + self._counted(self._bits(positions)))

    def uniform(self, positions: Tensor, stream: Stream | Tensor, draw: int | Tensor = 0) -> Tensor:
        """Return float64 uniforms [B, T] in (0, 1) for stream slots `positions` [B, T]. `draw`: number of the draw."""
        # Compiled code must not depend on what eager steps hashed.
        together = None if torch.compiler.is_compiling() else self._together
        if together and together.holds(positions, stream, draw):
            return together.uniforms[stream][:, : positions.shape[1]]
        return self._to_uniform(self._base(positions, stream, draw))

    def hash_together(self, positions: Tensor, streams: tuple[Stream, ...], draw: Tensor) -> None:
        """Hash the numbers of several `streams` at consecutive slots `positions` [B, T] and `draw` [B, 1] in one pass,
        for later calls of `uniform` with the first slots of `positions`. Compiled steps do not use it. On a GPU it
        saves two thirds of the launches. On a CPU the call costs more than hashing a few numbers, so for a single
        image several draws and further slots are hashed as well."""
        if torch.compiler.is_compiling():
            return
        if len(positions) == 1 and self._device.type == "cpu":
            uniforms = torch.from_numpy(self._found_ahead(positions.numpy(), streams, int(draw)))
        else:
            addresses = self._bits(draw) * _STREAMS + self._bits(_column_of(streams, self._device))
            uniforms = self._to_uniform(_mix(self._slots(positions) + self._counted(addresses)))
        self._together = _Together(
            positions, _place(positions), draw, dict(zip(streams, uniforms.unbind(), strict=True))
        )

    def _found_ahead(self, positions: np.ndarray, streams: tuple[Stream, ...], draw: int) -> np.ndarray:
        """Return uniforms [S, 1, T] at `positions` [1, T] of a single image, hashed together with later slots."""
        slot, slots = int(positions[0, 0]), positions.shape[1]
        ahead = None if self._ahead is None else self._ahead.at(streams, slot, slots, draw)
        if ahead is not None:
            return ahead
        draws = np.arange(draw, draw + AHEAD)[:, None]
        after = torch.arange(slot, slot + slots + SLOTS_AHEAD)[None]
        addresses = draws * _STREAMS + _column_of(streams, self._device).numpy()
        uniforms = self._to_uniform(_mix(self._slots(after) + self._counted(addresses))).numpy()
        self._ahead = _Ahead(streams, slot, draw, uniforms)
        return uniforms[:, :1, :slots]

    @staticmethod
    def _to_uniform(base: Bits) -> Tensor:
        """Float64 uniforms in (0, 1) of hash states."""
        if isinstance(base, np.ndarray):
            bits = _top_bits(_mix(base + _STEP)) + _HALF
            bits *= _ULP
            return torch.from_numpy(bits)
        top: Any = _top_bits(_mix(base + _GOLDEN))
        return top.double().add_(0.5).mul_(2.0**-53)

    def tie_break(self, positions: Tensor) -> Tensor:
        """Return the uniforms v [B, T] of the Rosenblatt transform, at a negative `draw` that decoding never uses."""
        return self.uniform(positions, Stream.TOKEN, -1)

    def race(self, positions: Tensor, stream: Stream | Tensor, draw: int | Tensor = 0) -> Tensor:
        """Return float32 standard exponentials [B, T, V], one per token.

        argmax(p / race) is a draw from p (the exponential race, the same as the Gumbel-max trick), and two nearby
        distributions racing with the same numbers mostly agree.
        """
        return self._exponentials(positions, self._counter, stream, draw)

    def run_race(self, weights: Tensor, positions: Tensor, stream: Stream | Tensor, draw: int | Tensor = 0) -> Tensor:
        """Draw tokens [B, T] from unnormalised `weights` [B, T, V] by `race`, for tokens of positive weight only."""
        runners = kept(weights)
        counter = self._counter if runners.ids is None else (runners.ids + 2) * _GOLDEN
        return runners.token(run_race(runners.mass, self._exponentials(positions, counter, stream, draw)))

    def _exponentials(self, positions: Tensor, counter: Tensor, stream: Stream | Tensor, draw: int | Tensor) -> Tensor:
        """Return exponentials [B, T, K] of tokens with counters `counter` [K] or [B, T, K]."""
        bits = _mix(self._base(positions, stream, draw)[..., None] + self._bits(counter))
        top = _top_bits(bits)
        negative = (torch.from_numpy(top) if isinstance(top, np.ndarray) else top).float().mul_(-(2.0**-53))
        # log1p keeps the small values, which win races, at full relative precision; the clamp keeps both ends finite.
        return negative.clamp_(2.0**-24 - 1, -(2.0**-54)).log1p_().neg_()


@lru_cache
def _column_of(streams: tuple[Stream, ...], device: torch.device) -> Tensor:
    """[S, 1, 1] numbers of the streams."""
    return torch.tensor(streams, device=device)[:, None, None]


def _top_bits(bits: Bits) -> Bits:
    """Return the upper 53 bits of hash states as int64. Overwrites `bits`."""
    if isinstance(bits, np.ndarray):
        word: Any = bits.view(np.uint64)
        word >>= _ARRAY[11]
        return bits
    bits >>= 11
    bits &= 0x1FFFFFFFFFFFFF
    return bits
