"""Token initialisation: tokens for fresh window slots, each with the distribution q that it was drawn from.

A fresh slot copies a neighbour in the image grid (q is one-hot), is drawn from its neighbour's distribution (which is
then q), copies a preview with some probability, or is uniformly random. If the neighbour is also fresh, the neighbour's
source is used; a slot without a source is uniformly random.
"""

from functools import partial
from typing import Any, Literal, NamedTuple, Protocol

import torch
from torch import Tensor

from specbench.decoding.interfaces import Context
from specbench.decoding.noise import Noise, Stream
from specbench.decoding.sampling import draw, one_hot

FreshQ = Literal["uniform", "onehot"]


class Slots(NamedTuple):
    """Draft slots of a step, D per row."""

    start: Tensor  # [B] stream slot of the first draft, which equals the number of committed tokens
    positions: Tensor  # [B, D] stream slots
    fresh: Tensor  # [B, D] bool, slots that need a token
    tokens: Tensor  # [B, L] committed tokens and drafts so far, by stream slot
    history: Any  # [B, N, V] the last target distribution seen at each stream slot; None unless the init needs it
    step: Tensor  # [B, 1] number of this step per row, from 1


class Init(Protocol):
    needs_history: bool

    def fill(self, slots: Slots, noise: Noise) -> tuple[Tensor, Tensor]:
        """Draw tokens [B, D] and return them with their q [B, D, V]. The caller reads fresh slots only."""
        ...


class Uniform:
    """A uniformly random image token; q is uniform or, as in the released SJD code, one-hot. Both are lossless."""

    needs_history = False

    def __init__(self, context: Context, fresh_q: FreshQ = "uniform"):
        self._layout = context.layout
        self._one_hot = fresh_q == "onehot"
        self._q = torch.zeros(context.layout.vocab, device=context.device)
        self._q[: context.layout.v_image] = 1 / context.layout.v_image

    def fill(self, slots: Slots, noise: Noise) -> tuple[Tensor, Tensor]:
        v_image, vocab = self._layout.v_image, self._layout.vocab
        tokens = (noise.uniform(slots.positions, Stream.FRESH, slots.step) * v_image).long()
        if self._one_hot:
            return tokens, one_hot(tokens, vocab)
        return tokens, self._q.expand(*tokens.shape, vocab)


class Spatial:
    """A copy of a neighbour in the image grid, or a token of the neighbour's distribution (SJD sec. 4.2)."""

    def __init__(self, context: Context, rows: int, columns: int, sample: bool, top1: bool = False):
        """`rows`, `columns`: offset of the neighbour above and to the left; `sample`: draw instead of copying; `top1`:
        take the most probable token instead of drawing; q is then one-hot."""
        layout = context.layout
        neighbour = layout.neighbour(rows, columns)
        self._neighbour = torch.tensor([*neighbour, -1], device=context.device)
        self._random = Uniform(context)
        self._vocab = layout.vocab
        self.needs_history = sample
        self._top1 = top1

    def fill(self, slots: Slots, noise: Noise) -> tuple[Tensor, Tensor]:
        random_tokens, uniform = self._random.fill(slots, noise)
        source, root = self._trace(slots)
        has_source = source >= 0
        if self.needs_history:
            rows = torch.arange(len(source), device=source.device)[:, None]
            distribution = slots.history[rows, source.clamp(0, slots.history.shape[1] - 1)]
            if self._top1:
                tokens = distribution.argmax(-1)
                distribution = one_hot(tokens, self._vocab)
            else:
                tokens = draw(distribution, noise.uniform(slots.positions, Stream.FRESH, slots.step))
            q = torch.where(has_source[..., None], distribution, uniform)
            return torch.where(has_source, tokens, random_tokens), q
        # If the chain of neighbours ends at a random fresh slot, the token of that slot is copied.
        tokens = torch.where(has_source, slots.tokens.gather(1, source.clamp(min=0)), random_tokens.gather(1, root))
        copied = has_source | (root != torch.arange(root.shape[1], device=root.device))
        return tokens, torch.where(copied[..., None], one_hot(tokens, self._vocab), uniform)

    def _trace(self, slots: Slots) -> tuple[Tensor, Tensor]:
        """Follow the neighbours of each slot up to a slot that is not fresh. Return this stream slot [B, D] (-1 if
        the chain ends at a fresh slot without a neighbour), and the last window slot [B, D] of the chain."""
        width = slots.positions.shape[1]
        slot = torch.arange(width, device=slots.positions.device).expand_as(slots.positions)
        neighbour = self._neighbour[slots.positions.clamp(max=len(self._neighbour) - 1)]
        neighbour = torch.where(slots.fresh, neighbour, slots.positions)
        in_window = neighbour - slots.start[:, None]
        root = torch.where(slots.fresh & (in_window >= 0), in_window, slot)
        for _ in range(width.bit_length()):
            root = root.gather(1, root)
        return neighbour.gather(1, root), root


class Preview:
    """With probability `weight` the token at the same place of the previous grid, such as a preview, else a uniformly
    random token. q is this mixture. Slots whose preview is absent or not committed are uniformly random."""

    needs_history = False

    def __init__(self, context: Context, preview_weight: float):
        self._nearest = torch.tensor([*context.layout.nearest_before(), -1], device=context.device)
        self._v_image, self._vocab, self._weight = context.layout.v_image, context.layout.vocab, preview_weight

    def fill(self, slots: Slots, noise: Noise) -> tuple[Tensor, Tensor]:
        source = self._nearest[slots.positions.clamp(max=len(self._nearest) - 1)]
        weight = torch.where((source >= 0) & (source < slots.start[:, None]), self._weight, 0.0)
        seen = slots.tokens.gather(1, source.clamp(min=0))
        uniform = noise.uniform(slots.positions, Stream.FRESH, slots.step)
        # If the uniform number rejects the preview, its rescaled remainder is again uniform.
        rest = ((uniform - weight) / (1 - weight).clamp(min=1e-6)).clamp(0, 1 - 2.0**-24)
        q = one_hot(seen, self._vocab) * weight[..., None]
        q[..., : self._v_image] += (1 - weight[..., None]) / self._v_image
        return torch.where(uniform < weight, seen, (rest * self._v_image).long()), q


left_repeat = partial(Spatial, rows=0, columns=1, sample=False)
left_sample = partial(Spatial, rows=0, columns=1, sample=True)
left_top1 = partial(Spatial, rows=0, columns=1, sample=True, top1=True)
"""The initialisation that SJD's released code names horizontal "sample"."""
above_repeat = partial(Spatial, rows=1, columns=0, sample=False)
above_sample = partial(Spatial, rows=1, columns=0, sample=True)
