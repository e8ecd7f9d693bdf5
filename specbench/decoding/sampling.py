"""From guided logits to the target distribution p, and draws from distributions. All float32, no host reads."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from specbench.config import Sampling
from specbench.models.base import TokenLayout


def truncate(logits: Tensor, sampling: Sampling) -> Tensor:
    """Temperature, then top-k (ties with the k-th logit are kept), then top-p; dropped entries become -inf.

    Args:
        logits: [..., V] float32, guided.
    """
    if sampling.temperature != 1.0:
        logits = logits / sampling.temperature
    if 0 < sampling.top_k < logits.shape[-1]:
        # Shifting costs nothing, softmax being blind to it, and lets one fused threshold do the masking.
        shifted = logits - kth_largest(logits, sampling.top_k)
        logits = torch.nn.functional.threshold(shifted, -torch.finfo(shifted.dtype).tiny, -torch.inf)
    if sampling.top_p < 1.0:
        ranked, order = logits.softmax(-1).sort(dim=-1, descending=True)
        # A token stays while the mass strictly before it is below top_p, so the first always stays.
        dropped = ranked.cumsum(-1) - ranked >= sampling.top_p
        logits = logits.masked_fill(dropped.scatter(-1, order, dropped), -torch.inf)
    return logits


def kth_largest(values: Tensor, k: int) -> Tensor:
    """[..., 1] k-th largest entry of `values` [..., V]."""
    if values.device.type != "cpu":
        return values.topk(k, dim=-1, sorted=False).values.amin(-1, keepdim=True)
    # numpy selects with vector instructions where torch does not: six times faster at V = 8192.
    place = values.shape[-1] - k
    return torch.from_numpy(np.partition(values.numpy(), place, axis=-1)[..., place : place + 1].copy())


def rank_keys(probabilities: Tensor, descending: bool = False) -> Tensor:
    """[..., V] int64 that rise with `probabilities` [..., V] (not negative), or fall, ties by id: the low 32 bits."""
    # The bits of a non-negative float32 order as it does, so one integer settles value and tie.
    bits = probabilities.float().view(torch.int32).long()
    return (0x7FFFFFFF - bits if descending else bits) << 32 | torch.arange(bits.shape[-1], device=bits.device)


def rank(probabilities: Tensor, descending: bool = False) -> Tensor:
    """[..., V] ids sorted by `probabilities` [..., V] (not negative), ties by id."""
    keys = rank_keys(probabilities, descending)
    ordered = (
        torch.from_numpy(np.sort(keys.numpy(), axis=-1)) if keys.device.type == "cpu" else keys.sort(dim=-1).values
    )
    return ordered & 0xFFFFFFFF


def neighbours_in_rank(keys: Tensor, own: Tensor, before: int, after: int) -> Tensor:
    """[..., before + after] the `rank_keys` right before and right after `own` [..., 1] among `keys` [..., V], in any
    order; -1 where there are no so many."""
    lower = torch.where(keys < own, keys, -1)
    higher = torch.where(keys > own, _TOP - keys, -1)
    found = _largest(higher, after)
    return torch.cat([_largest(lower, before), torch.where(found < 0, -1, _TOP - found)], dim=-1)


_TOP = torch.iinfo(torch.int64).max
"""No key is above it."""


def _largest(keys: Tensor, k: int) -> Tensor:
    """[..., k] the k largest of `keys` [..., V], in any order; fewer where V is smaller."""
    k = min(k, keys.shape[-1])
    if keys.device.type != "cpu" or not k:
        return keys.topk(k, dim=-1, sorted=False).values
    return torch.from_numpy(np.partition(keys.numpy(), -k, axis=-1)[..., -k:].copy())


class Target:
    """Turns logits into p [B, T, vocab] over image and special ids; forced slots are one-hot."""

    def __init__(self, layout: TokenLayout, sampling: Sampling, device: torch.device):
        self._sampling = sampling
        self.vocab = layout.vocab
        self._specials = layout.vocab - layout.v_image
        self.forced = torch.tensor([*layout.forced, -1], device=device)
        """[N + 1] forced id per stream slot, -1 where free; the last entry stands for every slot past the end."""
        self.has_grammar = any(token >= 0 for token in layout.forced)
        """Whether any slot is forced."""

    def forced_at(self, positions: Tensor) -> Tensor:
        """[B, T] forced id at stream slots `positions`, -1 where free."""
        return self.forced[positions.clamp(max=len(self.forced) - 1)]

    def __call__(self, logits: Tensor, positions: Tensor) -> Tensor:
        """p for logits [B, T, v_image] predicting stream slots `positions` [B, T]."""
        p = truncate(logits.float(), self._sampling).softmax(-1)
        if not self._specials:
            return p
        p = torch.nn.functional.pad(p, (0, self._specials))
        forced = self.forced_at(positions)
        return torch.where((forced >= 0)[..., None], one_hot(forced.clamp(min=0), p.shape[-1]), p)


def one_hot(tokens: Tensor, vocab: int) -> Tensor:
    """[..., vocab] float32 with all mass on `tokens` [...]."""
    return torch.zeros(*tokens.shape, vocab, device=tokens.device).scatter_(-1, tokens[..., None], 1.0)


def at(distribution: Tensor, tokens: Tensor) -> Tensor:
    """[...] entries of `distribution` [..., V] at `tokens` [...]."""
    return distribution.gather(-1, tokens[..., None]).squeeze(-1)


def without(law: Tensor, tokens: Tensor) -> Tensor:
    """`law` [..., V] with `tokens` [...] removed, normalised; all zero when nothing is left."""
    left = law.scatter(-1, tokens[..., None], 0.0)
    return left / left.sum(-1, keepdim=True).clamp(min=torch.finfo(left.dtype).tiny)


def entropy(p: Tensor) -> Tensor:
    """[...] entropy in nats of p [..., V]."""
    # Not torch.special.entr, which takes one number at a time.
    return -(p * p.clamp(min=torch.finfo(p.dtype).tiny).log()).sum(-1)


_RUN = 64
"""Neighbouring tokens that `draw` adds up first; sums take vectors, running sums one number at a time."""


def draw(weights: Tensor, uniform: Tensor) -> Tensor:
    """[...] tokens from unnormalised `weights` [..., V] by inversion of `uniform` [...] in (0, 1)."""
    vocab = weights.shape[-1]
    runs = torch.nn.functional.pad(weights, (0, -vocab % _RUN)).unflatten(-1, (-1, _RUN))
    mass = runs.sum(-1).cumsum(-1)
    point = _below(uniform * mass[..., -1], mass[..., -1])
    run = _first_above(mass, point)
    left = point - at(torch.nn.functional.pad(mass, (1, 0)), run)
    within = runs.gather(-2, run[..., None, None].expand(*run.shape, 1, _RUN)).squeeze(-2).cumsum(-1)
    return (run * _RUN + _first_above(within, _below(left, within[..., -1]))).clamp(max=vocab - 1)


def _below(point: Tensor, total: Tensor) -> Tensor:
    """`point` in float32, below `total`: rounding may lift it there, where no token's mass exceeds it."""
    return torch.minimum(point.float(), torch.nextafter(total, torch.zeros_like(total)))


def _first_above(mass: Tensor, point: Tensor) -> Tensor:
    """[...] first place at which the rising `mass` [..., n] exceeds `point` [...]: never one that adds nothing."""
    return torch.searchsorted(mass, point[..., None], right=True).squeeze(-1).clamp(max=mass.shape[-1] - 1)


def run_race(weights: Tensor, race: Tensor) -> Tensor:
    """[...] tokens from unnormalised `weights` [..., V] by the exponential race `race` [..., V]."""
    return (weights / race).argmax(-1)
