"""Log p of given tokens under many sampling settings, from one sort of the logits. Every filter is a logit threshold.

The largest logits of each slot are sorted once. A sampling setting then only needs sums of the sorted exponentials,
which all settings with the same temperature share. Only a distribution without top-k also needs the sum over
the rest of the vocabulary.
"""

from __future__ import annotations

import math
from copy import copy
from dataclasses import dataclass, replace
from functools import cached_property
from typing import NamedTuple

import torch
from torch import Tensor

from specbench.decoding.sampling import ascending, at, candidates, selects, truncate
from specbench.specs.run_spec import Sampling

_ALL = 4096  # Vocabulary size up to which all logits are sorted
_HELD = 3  # Number of temperatures whose sums are kept
_BLOCK = 2**20  # Numbers per block of a pass over the whole vocabulary; a block fits in the cache


@dataclass(frozen=True)
class Alternative:
    """A way to sample tokens."""

    sampling: Sampling
    early: bool = False  # whether top-p and min-p are applied before the temperature
    repetition: float = 1.0  # divides positive logits of tokens that the image contains, and multiplies negative logits
    frequency: float = 0.0  # subtracted from the logit of a token once per occurrence in the image
    # shares of tokens that are drawn without these settings (floor), are the likeliest token (greedy), or are uniform
    floor: float = 0.0
    greedy: float = 0.0
    uniform: float = 0.0

    @property
    def penalises(self) -> bool:
        """Return whether there is a penalty on tokens that the image contains."""
        return self.repetition != 1 or self.frequency != 0


class KeptWords(NamedTuple):
    """The tokens that filters keep at each slot."""

    least: Tensor  # [B, T, 1] smallest logit of the kept tokens
    norm: Tensor  # [B, T, 1] logarithm of the sum of exp(logit / temperature) over the kept tokens


class Held:
    """Count how often tokens occur in an image before a slot."""

    def __init__(self, tokens: Tensor, vocab: int):
        """`tokens`: [B, N]."""
        images, slots = tokens.shape
        order = torch.arange(slots, device=tokens.device).expand(images, -1)
        self._place = torch.full((images, vocab), slots, device=tokens.device).scatter_(1, tokens, order)
        once = torch.zeros(images, slots + 1, slots + 1, dtype=torch.int16, device=tokens.device)
        place = self._place.gather(1, tokens)
        once[torch.arange(images)[:, None], order + 1, place] = 1
        self._count = once.cumsum(1, dtype=torch.int16)

    def __call__(self, tokens: Tensor, positions: Tensor) -> Tensor:
        """[B, T, K] counts of `tokens` [B, T, K] before the slots `positions` [B, T]."""
        place = self._place.gather(1, tokens.flatten(1)).view(tokens.shape)
        counts = self._count[torch.arange(len(tokens))[:, None], positions]
        return counts.gather(-1, place).float()


class SlotLogits:
    """Logits [B, T, V] of slots, and the tokens in these slots."""

    def __init__(self, logits: Tensor, chosen: Tensor, few: int):
        """`few`: number of largest logits that the sampling settings may need; 0: all."""
        self.logits, self._chosen = logits, chosen.clamp(max=logits.shape[-1] - 1)[..., None]
        self._ids: Tensor | None = None
        self._before: SlotLogits | None = None
        values = logits
        if few and logits.shape[-1] > _ALL and selects(logits.shape[-1], few):
            if logits.device.type == "cpu":
                ids, largest, _ = candidates(logits.reshape(-1, logits.shape[-1]).numpy(), few)
                parts = torch.from_numpy(ids), torch.from_numpy(largest)
                self._ids, values = (part.view(*logits.shape[:-1], -1) for part in parts)
            else:
                values, self._ids = logits.topk(few, dim=-1)
        self._sort(values, logits.gather(-1, self._chosen))

    def _sort(self, values: Tensor, x: Tensor) -> None:
        """Store `values` [B, T, K], and their negatives in ascending order. `x` [B, T, 1]: the tokens' logits."""
        self.x, self._values, self._sums, self._totals = x, values, dict[float, Tensor](), dict[float, Tensor]()
        self._ordered = ascending(-values) if values.device.type == "cpu" else (-values).sort(-1).values
        # NaN, caused by overflow in a number format, is sorted last and makes its whole slot NaN.
        last = self._ordered[..., -1:]
        self._first = torch.where(last.isnan(), last, -self._ordered[..., :1])

    def penalised(self, way: Alternative, held: Held, positions: Tensor) -> SlotLogits:
        """The same slots, with penalties on tokens that the images contain."""
        other, ids = copy(self), self._ids
        if ids is None:
            ids = torch.arange(self.logits.shape[-1], device=self.x.device).expand(self.logits.shape)
        other._before = self
        values = _penalised(self._values, held(ids, positions), way)
        other._sort(values, _penalised(self.x, held(self._chosen, positions), way))
        return other

    def _sums_at(self, temperature: float) -> Tensor:
        """[B, T, K] cumulative sums of exp(logit / temperature) from the largest logit on; the largest term is 1."""
        if temperature not in self._sums:
            while len(self._sums) >= _HELD:
                self._sums.pop(next(iter(self._sums)))
            self._sums[temperature] = ((-self._first - self._ordered) / temperature).exp().cumsum(-1)
        return self._sums[temperature]

    def _total_at(self, temperature: float) -> Tensor:
        """[B, T, 1] sum as in `_sums_at`, over the whole vocabulary."""
        if self._ids is None:
            return self._sums_at(temperature)[..., -1:]
        if temperature not in self._totals:
            self._totals[temperature] = self._total(temperature)
        return self._totals[temperature]

    def _total(self, temperature: float) -> Tensor:
        if self._before:  # only the sorted logits have changed
            first = self._before._first
            now, then = (((part - first) / temperature).exp() for part in (self._values, self._before._values))
            whole = self._before._total_at(temperature) + (now - then).sum(-1, keepdim=True)
            return whole * ((first - self._first) / temperature).exp()
        rows = self.logits.flatten(0, 1).split(max(1, _BLOCK // self.logits.shape[-1]))
        firsts = self._first.flatten(0, 1).split(len(rows[0]))
        sums = [(row - first).div_(temperature).exp_().sum(-1) for row, first in zip(rows, firsts, strict=True)]
        return torch.cat(sums).view(self._first.shape)

    @cached_property
    def every(self) -> Tensor:
        """[B, T] probability of the tokens without filters, at temperature 1."""
        return ((self.x - self._first).exp() / self._total_at(1.0))[..., 0]

    def kept(self, way: Alternative) -> KeptWords:
        """The tokens that the filters keep."""
        sampling, vocab = way.sampling, self.logits.shape[-1]
        temperature = 1.0 if way.early else sampling.temperature
        limited, sums = 0 < sampling.top_k < vocab, self._sums_at(temperature)
        if not {*sampling.filters} <= {"top_k", "top_p", "min_p"}:
            return self._kept_of_all(way)
        least, total = torch.full_like(self._first, -torch.inf), None
        if limited:
            least = -self._ordered[..., sampling.top_k - 1 : sampling.top_k]
            total = sums.gather(-1, self._count(least) - 1)
        if sampling.top_p < 1.0:
            # A token is kept if the total probability of the tokens of higher rank is below top-p.
            last = torch.searchsorted(sums, sampling.top_p * (self._total_at(temperature) if total is None else total))
            if self._ids is not None and not limited and (last >= sums.shape[-1]).any():
                return self._kept_of_all(way)
            least = torch.maximum(least, -self._ordered.gather(-1, last.clamp(max=sums.shape[-1] - 1)))
        if sampling.min_p:
            least = torch.maximum(least, self._first + temperature * math.log(sampling.min_p))
        if not limited and sampling.top_p >= 1.0 and not sampling.min_p:
            sum_kept = self._total_at(sampling.temperature)
        else:
            sum_kept = self._sums_at(sampling.temperature).gather(-1, self._count(least) - 1)
        return KeptWords(least, sum_kept.log() + self._first / sampling.temperature)

    def _kept_of_all(self, way: Alternative) -> KeptWords:
        sampling, logits = way.sampling, self.logits
        few = truncate(logits, replace(sampling, temperature=1.0) if way.early else sampling)
        least = torch.where(few > -torch.inf, logits, torch.inf).amin(-1, keepdim=True)
        scaled = (logits / sampling.temperature).masked_fill_(logits < least, -torch.inf)
        return KeptWords(least, scaled.logsumexp(-1, keepdim=True))

    def _count(self, least: Tensor) -> Tensor:
        """[B, T, 1] number of sorted logits that are at least `least`; never 0."""
        return torch.searchsorted(self._ordered, -least, right=True).clamp(min=1)

    def p(self, way: Alternative, every: Tensor) -> Tensor:
        """[B, T] probability of the tokens. `every`: the probability without filters, at temperature 1."""
        if way.sampling.entropy_scale is None:
            kept = self.kept(way)
            p = torch.where(self.x < kept.least, 0.0, (self.x / way.sampling.temperature - kept.norm).exp())[..., 0]
        else:
            p = at(truncate(self.logits, way.sampling).softmax(-1), self._chosen[..., 0])
        p = (1 - way.floor) * p + way.floor * every
        return p.nan_to_num(1 / self.logits.shape[-1])  # after an overflow of float16, any token may have been drawn

    @property
    def likeliest(self) -> Tensor:
        """[B, T] bool, whether no token has a larger logit."""
        return (self.x >= self._first)[..., 0]

    @property
    def rank(self) -> Tensor:
        """[B, T] one more than the number of larger logits."""
        return (self.logits > self.x).sum(-1) + 1

    def given(self, least: Tensor, temperature: float) -> Tensor:
        """[B, T] log p of the tokens, conditional on a logit of at least `least`; 0 for tokens with a smaller logit."""
        kept = self._sums_at(temperature).gather(-1, self._count(least) - 1).log() + self._first / temperature
        return torch.where(self.x < least, 0.0, self.x / temperature - kept)[..., 0]

    def masses(self, way: Alternative) -> tuple[Tensor, Tensor]:
        """[B, T] probabilities before and through the tokens in the order by p, descending."""
        kept, temperature, vocab = self.kept(way), way.sampling.temperature, self.logits.shape[-1]
        norm, share = kept.norm - self._first / temperature, 1 - way.greedy - way.uniform
        masses = []
        for right in (False, True):
            rank = torch.searchsorted(self._ordered, -self.x, right=right)
            last = (rank - 1).clamp(min=0)
            mass, beyond = self._sums_at(temperature).gather(-1, last) / norm.exp(), rank
            if self._ids is not None and (way.uniform or not 0 < way.sampling.top_k < vocab):
                more = self.logits >= self.x if right else self.logits > self.x  # not all logits are sorted
                beyond = more.sum(-1, keepdim=True)
                mass = torch.where(more, (self.logits / temperature - kept.norm).exp(), 0.0).sum(-1, keepdim=True)
            mass = torch.where(self.x < kept.least, 1.0, mass)
            unfiltered = self._sums_at(1.0).gather(-1, last) / self._total_at(1.0)
            mass = share * ((1 - way.floor) * mass + way.floor * unfiltered) + way.greedy
            masses.append((torch.where(rank > 0, mass, 0.0) + way.uniform * beyond / vocab)[..., 0].clamp(max=1))
        return masses[0], masses[1]

    def spread(self, way: Alternative) -> tuple[Tensor, Tensor]:
        """[B, T] entropy and variance of log p over the sorted logits."""
        kept = self.kept(way)
        log_p = -self._ordered / way.sampling.temperature - kept.norm
        log_p = torch.where(-self._ordered < kept.least, -torch.inf, log_p)
        p, log_p = log_p.exp(), log_p.clamp(min=-1e30)
        entropy = -(p * log_p).sum(-1)
        return entropy, ((p * log_p.square()).nan_to_num().sum(-1) - entropy.square()).clamp(min=0)


def _penalised(values: Tensor, count: Tensor, way: Alternative) -> Tensor:
    repeated = torch.where(values > 0, values / way.repetition, values * way.repetition)
    return torch.where(count > 0, repeated, values) - way.frequency * count
