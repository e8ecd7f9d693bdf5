"""Target distribution p from guided logits, sampling from distributions, and selection of a guided target's rows.
Everything is float32 and needs no host sync."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from functools import wraps
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from specbench.models.interface import TokenLayout
from specbench.specs.run_spec import Sampling

FEW = 8192  # Up to this size torch selects as fast as numpy called from compiled code
WIDE = 4096  # Vocabulary size from which compacting to tokens of positive weight is faster on a CPU
_ID = 0xFFFFFFFF  # Bits of a rank key that hold the token


class Target:
    """Target distribution p [B, T, vocab] from logits, over image and special ids; forced slots are one-hot."""

    def __init__(self, layout: TokenLayout, sampling: Sampling, device: torch.device):
        self.sampling = sampling
        self.vocab = layout.vocab
        self._specials = layout.vocab - layout.v_image
        self.forced = torch.tensor([*layout.forced, -1], device=device)
        """[N + 1] forced id per stream slot, -1 if free; the last entry is for every slot past the end."""
        self.has_grammar = any(token >= 0 for token in layout.forced)  # Whether the grammar forces any slot
        self._bounds = torch.tensor(layout.bounds, device=device).T if layout.ranges else None

    def forced_at(self, positions: Tensor) -> Tensor:
        """Return the forced id [B, T] at stream slots `positions`, -1 if free."""
        return self.forced[positions.clamp(max=len(self.forced) - 1)]

    def of_grid(self, logits: Tensor, positions: Tensor) -> Tensor:
        """Set logits to -inf for ids that are not in the grid of the slot."""
        if self._bounds is None:
            return logits
        low, high = self._bounds[:, positions.clamp(max=len(self.forced) - 1), None]
        ids = torch.arange(logits.shape[-1], device=logits.device)
        return torch.where((ids >= low) & (ids < high), logits, -torch.inf)

    def __call__(self, logits: Tensor, positions: Tensor) -> Tensor:
        """Return p for logits [B, T, v_image] that predict stream slots `positions` [B, T]."""
        p = truncate(self.of_grid(logits, positions).float(), self.sampling).softmax(-1)
        if not self._specials:
            return p
        p = torch.nn.functional.pad(p, (0, self._specials))
        forced = self.forced_at(positions)
        return torch.where((forced >= 0)[..., None], one_hot(forced.clamp(min=0), p.shape[-1]), p)


def truncate(logits: Tensor, sampling: Sampling) -> Tensor:
    """Apply the temperature, then the filters in the order of `Sampling`. Ties with the last kept entry are kept;
    dropped entries become -inf. An entropy-dependent temperature is applied after top-k. `logits`: [..., V] float32,
    guided."""
    if sampling.entropy_scale is None:
        logits = logits / sampling.temperature if sampling.temperature != 1.0 else logits
        # Other filters sum over tokens, and the order of the tokens may change the last digits.
        few = sampling.top_k > 0 and {*sampling.filters} <= {"top_k", "top_p", "min_p"}
        if few and selects(logits.shape[-1], sampling.top_k) and _compacts(logits):
            return _truncate_few(logits, sampling)
    logits = _filtered(logits, sampling, _FILTERS_FIRST)
    if sampling.entropy_scale is not None:
        logits = logits / (sampling.temperature * entropy_factor(logits, sampling.entropy_scale))
    return _filtered(logits, sampling, _FILTERS_LAST)


def _filtered(logits: Tensor, sampling: Sampling, filters: Mapping[str, Filter]) -> Tensor:
    for name, drops in filters.items():
        if name in sampling.filters:
            # On a CPU this is a third faster than masked_fill.
            logits = torch.where(drops(logits, getattr(sampling, name)), -torch.inf, logits)
    return logits


def _below_kth(logits: Tensor, k: int) -> Tensor:
    if not 0 < k < logits.shape[-1]:
        return torch.zeros_like(logits, dtype=torch.bool)
    return logits < kth_largest(logits, k)


def _below_deviations(logits: Tensor, number: float) -> Tensor:
    valid = logits > -torch.inf
    count, finite = valid.sum(-1, keepdim=True), torch.where(valid, logits, 0.0)
    mean = finite.sum(-1, keepdim=True) / count
    deviation = (torch.where(valid, finite - mean, 0.0).square().sum(-1, keepdim=True) / count).sqrt()
    return logits < logits.amax(-1, keepdim=True) - number * deviation


def _below_mass(logits: Tensor, mass: float) -> Tensor:
    probabilities = logits.softmax(-1)
    return probabilities < least_of_mass(probabilities, mass)


def _below_share(logits: Tensor, share: float) -> Tensor:
    return logits < logits.amax(-1, keepdim=True) + math.log(share)


Filter = Callable[[Tensor, Any], Tensor]
_FILTERS_FIRST: Mapping[str, Filter] = {"top_k": _below_kth, "top_n_sigma": _below_deviations}
_FILTERS_LAST: Mapping[str, Filter] = {"top_p": _below_mass, "min_p": _below_share}
FILTER_RULES = {**_FILTERS_FIRST, **_FILTERS_LAST}
"""Rules of the filters of `Sampling` in their order; `_FILTERS_FIRST` precede the entropy-dependent temperature. A rule
maps logits [..., V] and the filter's value to a mask [..., V] of the tokens to drop, which have the smallest logits."""


def _truncate_few(logits: Tensor, sampling: Sampling) -> Tensor:
    """Top-k, top-p and min-p, bitwise equal to `truncate`, with few passes over the whole vocabulary."""
    vocab = logits.shape[-1]
    chosen, largest, exists = candidates(logits.reshape(-1, vocab).numpy(), sampling.top_k)
    largest[largest < _kth(largest, sampling.top_k)] = -np.inf
    # Padding repeats the first entry, so that this entry is only written again.
    padded = (torch.from_numpy(np.where(exists, part, part[:, :1])) for part in (chosen, largest))
    token, value = (part.view(*logits.shape[:-1], -1) for part in padded)
    few = torch.full_like(logits, -torch.inf).scatter_(-1, token, value)
    if sampling.top_p < 1.0:
        probabilities = few.softmax(-1).gather(-1, token)
        counted = torch.where(torch.from_numpy(exists).view(token.shape), probabilities, 0.0)
        value = torch.where(probabilities < least_of_mass(counted, sampling.top_p), -torch.inf, value)
    if sampling.min_p:
        value = torch.where(_below_share(value, sampling.min_p), -torch.inf, value)
    return few if sampling.top_p >= 1.0 and not sampling.min_p else few.scatter_(-1, token, value)


def entropy_factor(logits: Tensor, scale: float) -> Tensor:
    """Return the factor [..., 1] on the temperature, 2.5 exp(-H/scale) + 0.6, with H the entropy of `logits` [..., V].

    ARsample (NeurIPS 2025, arXiv 2510.09012) samples so; its released code uses scale 3. The factor is 3.1 if the
    model is certain, 1 at H = 5.5 for scale 3, and 0.6 for large H.
    """
    scale = max(scale, torch.finfo(logits.dtype).tiny)  # for a smaller scale, 0 / scale is NaN
    return (2.5 * (-entropy(logits.softmax(-1)) / scale).exp() + 0.6)[..., None]


def entropy(p: Tensor) -> Tensor:
    """Return the entropy [...] of p [..., V] in nats."""
    # torch.special.entr is slower: it is not vectorised.
    return p.clamp(min=torch.finfo(p.dtype).tiny).log_().mul_(p).sum(-1).neg_()


def draw(weights: Tensor, uniform: Tensor) -> Tensor:
    """Draw tokens [...] from unnormalised `weights` [..., V] by inversion of `uniform` [...] in (0, 1)."""
    mass = weights.cumsum(-1)
    total = mass[..., -1]
    # Rounding may lift uniform * total to total, which no token's cumulative mass exceeds.
    point = torch.minimum((uniform * total).float(), torch.nextafter(total, -total))
    return torch.searchsorted(mass, point[..., None], right=True).squeeze(-1).clamp(max=weights.shape[-1] - 1)


def run_race(weights: Tensor, race: Tensor) -> Tensor:
    """Draw indices [...] of unnormalised `weights` [..., V] by the exponential race `race` [..., V]."""
    return (weights / race).argmax(-1)


def without(weights: Tensor, tokens: Tensor) -> Tensor:
    """Remove `tokens` [...] from `weights` [..., V] and normalise; all zero if no weight remains."""
    rest, tiny = weights.scatter(-1, tokens[..., None], 0.0), torch.finfo(weights.dtype).tiny
    # After a sharp q, weights may be subnormal; their sum must not be clamped. Powers of two scale without rounding.
    rest = torch.where(rest.sum(-1, keepdim=True) < tiny * 2.0**24, rest * 2.0**100, rest)
    return rest / rest.sum(-1, keepdim=True).clamp(min=tiny)


def one_hot(tokens: Tensor, vocab: int) -> Tensor:
    """Return float32 distributions [..., vocab] with all mass on `tokens` [...]."""
    return torch.zeros(*tokens.shape, vocab, device=tokens.device).scatter_(-1, tokens[..., None], 1.0)


def at(distribution: Tensor, tokens: Tensor) -> Tensor:
    """Gather entries [...] of `distribution` [..., V] at `tokens` [...]."""
    return distribution.gather(-1, tokens[..., None]).squeeze(-1)


def rows_at(distributions: Tensor, slots: Tensor) -> Tensor:
    """Gather rows [B, n, V] of `distributions` [B, K, V] at `slots` [B, n]."""
    if len(distributions) == 1:
        # On a CPU this copies whole rows, where `gather` moves single numbers.
        return distributions.index_select(1, slots[0])
    return distributions[torch.arange(len(slots), device=slots.device)[:, None], slots]


def for_rows(columns: Tensor, rows: int) -> Tensor:
    """Repeat [B, ...] for the R = `rows` rows of a target. Under guidance, the unconditional rows have the same slots
    and tokens as the conditional rows."""
    # `repeat` takes several times as long for a few numbers.
    return torch.cat([columns] * (rows // len(columns)))


def features_at(features: Tensor, columns: Tensor) -> Tensor:
    """Gather `features` [R, C, d] of a forward at `columns` [B, T]: [R, T, d]."""
    columns = for_rows(columns, len(features))
    return features.gather(1, columns[..., None].expand(-1, -1, features.shape[-1]))


class Kept(NamedTuple):
    """Sparse distribution: K of the V tokens in increasing order, including all tokens of nonzero weight."""

    ids: Tensor | None  # [..., K]; shorter rows are padded with token 0. None for all V tokens.
    mass: Tensor  # [..., K] their weights, 0 in the padding

    def token(self, place: Tensor) -> Tensor:
        """Return the tokens [...] at the indices `place` [...]."""
        return place if self.ids is None else at(self.ids, place)

    def weights(self, other: Tensor, rows: slice = slice(None)) -> Tensor:
        """Return the weights [B, T', K] of these tokens in the distribution `other` [B, T', V] of the slots `rows`."""
        return other if self.ids is None else other.gather(-1, self.ids[:, rows])


def kept(weights: Tensor) -> Kept:
    """Compact `weights` [..., V] to tokens of nonzero weight. Keep all V tokens if V is small or this is faster."""
    if weights.shape[-1] < WIDE or not _compacts(weights):
        return Kept(None, weights)
    flat = weights.reshape(-1, weights.shape[-1]).numpy()
    token, value, _ = _compact(flat, flat != 0)
    return Kept(*(torch.from_numpy(x).view(*weights.shape[:-1], -1) for x in (token, value)))


def rank(probabilities: Tensor, descending: bool = False) -> Tensor:
    """Sort token ids [..., V] by `probabilities` [..., V] (not negative), ties by id."""
    keys = _rank_keys(probabilities, torch.arange(probabilities.shape[-1], device=probabilities.device), descending)
    ordered = ascending(keys) if keys.device.type == "cpu" else keys.sort(dim=-1).values
    return ordered & _ID


def ranked_around(
    probabilities: Tensor, tokens: Tensor, before: int, after: int, descending: bool = False
) -> tuple[Tensor, Tensor, Tensor]:
    """Find the neighbours of `tokens` [..., 1] (of positive probability) in the order of `rank`: `before` previous and
    `after` next tokens. Return the ids [..., m] of neighbours and token, in order and padded with the token; a mask
    [..., m], False for padding; and the probability [..., 1] of the token."""
    ids, mass = _ends_and_kept(probabilities, before, after, descending)
    probability = probabilities.gather(-1, tokens)
    key, keys = _rank_keys(probability, tokens, descending), _rank_keys(mass, ids, descending)
    lower = torch.where(keys < key, keys, -1).topk(min(before, keys.shape[-1]), dim=-1).values.flip(-1)
    last = torch.iinfo(torch.int64).max
    upper = torch.where(keys > key, keys, last).topk(min(after, keys.shape[-1]), dim=-1, largest=False).values
    ids_around = torch.cat([lower, key, upper], dim=-1) & _ID
    exists = ids_around != _ID
    return torch.where(exists, ids_around, tokens), exists, probability


def kth_largest(values: Tensor, k: int) -> Tensor:
    """Return the k-th largest entry [..., 1] of `values` [..., V]."""
    leave = torch.compiler.is_compiling() and values.numel() <= FEW
    if values.device.type != "cpu" or leave:
        return values.topk(k, dim=-1, sorted=False).values.amin(-1, keepdim=True)
    return _kth_largest(values, k)


def least_of_mass(probabilities: Tensor, mass: float) -> Tensor:
    """Return the smallest probability [..., 1] in the smallest set of `probabilities` [..., V] that holds `mass`."""
    if probabilities.device.type == "cpu":
        return _least_of_mass(probabilities, mass)
    return _least_of_ranked(probabilities.sort(dim=-1).values.flip(-1), mass)


def _least_of_ranked(ranked: Tensor, mass: float) -> Tensor:
    # A token is kept if the mass strictly before it is below `mass`, so the first token is always kept.
    kept = (ranked.cumsum(-1) - ranked < mass).sum(-1, keepdim=True)
    # NaN keeps no token and would give index -1, which aborts all work on a GPU. The NaN is reported later, per image.
    return ranked.gather(-1, (kept - 1).clamp(min=0))


def _by_numpy(name: str, like: Callable[..., Tensor]) -> Callable[[Callable[..., Tensor]], Callable[..., Tensor]]:
    """Register a numpy function as an operator for compiled code; `like` allocates its result."""

    def wrap(function: Callable[..., Tensor]) -> Callable[..., Tensor]:
        compiled = torch.library.custom_op(f"specbench::{name}", function, mutates_args=())
        compiled.register_fake(like)
        return wraps(function)(lambda *args: (compiled if torch.compiler.is_compiling() else function)(*args))

    return wrap


@_by_numpy("least_of_mass", lambda probabilities, mass: probabilities.new_empty(*probabilities.shape[:-1], 1))
def _least_of_mass(probabilities: Tensor, mass: float) -> Tensor:
    flat = probabilities.reshape(-1, probabilities.shape[-1]).numpy()
    if flat.shape[1] >= WIDE:
        # Tokens below (1 - mass) / 2V hold at most half of 1 - mass; the other half is larger than rounding errors.
        least = (1 - mass) / 2 / flat.shape[1] if mass < 0.999 else 0.0
        _, flat, _ = _compact(flat, ~(flat <= least))
    ranked = torch.from_numpy(np.sort(flat, axis=-1)).flip(-1)
    return _least_of_ranked(ranked, mass).view(*probabilities.shape[:-1], 1)


@_by_numpy("kth_largest", lambda values, k: values.new_empty(*values.shape[:-1], 1))
def _kth_largest(values: Tensor, k: int) -> Tensor:
    flat = values.reshape(-1, values.shape[-1]).numpy()
    if selects(flat.shape[1], k):
        _, flat, _ = candidates(flat, k)
    return torch.from_numpy(_kth(flat, k).copy()).view(*values.shape[:-1], 1)


def _kth(values: np.ndarray, k: int) -> np.ndarray:
    """Return the k-th largest entry [rows, 1] of `values` [rows, V]."""
    # Unlike torch, numpy selects with vector instructions: six times faster at V = 8192.
    place = values.shape[1] - k
    return np.partition(values, place, axis=-1)[:, place : place + 1]


def selects(vocab: int, k: int) -> bool:
    """Return whether `candidates`, which estimates a bound from a part of the entries, finds the k largest faster."""
    return vocab >= WIDE and 4 * k <= vocab


def candidates(values: np.ndarray, k: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Select entries of `values` [rows, V] that include the k largest and their ties. Return tokens, values [rows, K]
    padded with -inf, and a mask of real entries. Entries from a bound on are selected. The bound is estimated from a
    part of the entries, so K is mostly much less than V. If a row has fewer than k such entries, all V are selected."""
    step = max(8, values.shape[1] // 4096)
    sample = values[:, ::step]
    expected = k / step
    bound = _kth(sample, min(int(expected + 4 * expected**0.5) + 8, sample.shape[1]))
    token, largest, exists = _compact(values, ~(values < bound))  # keeps NaN, which an image reports later
    if exists.sum(-1).min() < k:
        token, largest, exists = _compact(values, np.ones_like(values, bool))
    largest[~exists] = -np.inf
    return token, largest, exists


@_by_numpy("ascending", torch.empty_like)
def ascending(values: Tensor) -> Tensor:
    """Sort the entries [..., V] of a tensor on a CPU."""
    # Unlike torch, numpy sorts with vector instructions.
    return torch.from_numpy(np.sort(values.numpy(), axis=-1))


def _rank_keys(probabilities: Tensor, ids: Tensor, descending: bool) -> Tensor:
    """Return integers in the order of `rank`, for tokens `ids` of these `probabilities`."""
    # The bits of non-negative float32 numbers have the same order, so one integer orders by value, then by id.
    bits = probabilities.float().view(torch.int32).long()
    return (0x7FFFFFFF - bits if descending else bits) << 32 | ids


def _ends_and_kept(weights: Tensor, before: int, after: int, descending: bool) -> tuple[Tensor, Tensor]:
    """Return ids [..., K] or [V], padded with -1, and weights [..., K] of the tokens that can be among the `before`
    previous or `after` next neighbours of a token of positive weight, in the order of `rank`."""
    vocab = weights.shape[-1]
    if vocab < WIDE or not _compacts(weights):
        return torch.arange(vocab, device=weights.device), weights
    flat = weights.reshape(-1, vocab).numpy()
    here = flat != 0
    # Tokens of weight 0 come before or after all others, in order of their ids.
    absent, reach = (after if descending else before), 0
    while True:
        end = here[:, :reach] if descending else here[:, vocab - reach :]
        if reach == vocab or (~end).sum(-1).min(initial=absent) >= absent:
            break
        reach = min(2 * max(reach, absent), vocab)
    end[:] = True
    token, value, exists = _compact(flat, here)
    token[~exists] = -1
    shape = *weights.shape[:-1], -1
    return torch.from_numpy(token).view(shape), torch.from_numpy(value).view(shape)


def _compacts(weights: Tensor) -> bool:
    """Return whether compacting is faster. A GPU needs a host sync for the count; compiled code needs static sizes."""
    return weights.device.type == "cpu" and not torch.compiler.is_compiling()


def _compact(weights: np.ndarray, here: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Move the entries chosen by `here` [rows, V] to the front. Return tokens, `weights` [rows, K] and a mask."""
    rows, vocab = weights.shape
    # flatnonzero is four times faster on booleans than on floats.
    entry = np.flatnonzero(here)
    start = np.arange(rows)[:, None] * vocab
    first = np.searchsorted(entry, start)
    count = np.diff(first, axis=0, append=len(entry))
    place = np.arange(max(count.max(initial=0), 1))
    exists = place < count
    chosen: np.ndarray = np.append(entry, 0).take(first + place, mode="clip")
    token, value = chosen - start, weights.reshape(-1)[chosen]
    if not exists.all():
        token[~exists] = value[~exists] = 0
    return token, value, exists
