"""Grouped speculative decoding (So et al., ICCV 2025, algorithm 3): a draft is judged by its cluster's mass.

The cluster C(x) is a slice of G tokens around x in rank order, filtered by probability and codebook distance.
Acceptance is min(1, p(C)/q(C)); clusters of different tokens overlap, so the result is lossy.
"""

from __future__ import annotations

import torch
from torch import Tensor

from specbench.decoding.context import Context
from specbench.decoding.sampling import rank, rank_kept
from specbench.decoding.verification.ratio_tests import DraftTests, RatioTest, Verdict, drift
from specbench.errors import SpecbenchError


class Grouped(RatioTest):
    """A draft with p(x) = 0 is rejected, and x always belongs to its own cluster."""

    def __init__(self, context: Context, G: int, d: float, delta: float, cluster: str, order: str, bounds: str):
        super().__init__(context)
        if context.codebook is None and (d != float("inf") or cluster == "embedding"):
            raise SpecbenchError("this model has no codebook, which --d and --cluster embedding need", "use --d inf")
        self._d, self._delta, self._rank_by, self._descending = d, delta, cluster, order == "descending"
        half = G // 2
        last = half + 1 if bounds == "inclusive" else max(half, 1)
        self._offsets = torch.arange(-half, last, device=context.device)
        self._codebook = context.codebook
        self._nearest = _nearest(context.codebook, G) if cluster == "embedding" else None

    def acceptance(self, p: Tensor, q: Tensor, x: Tensor, depth: int | Tensor = 1) -> Tensor:
        return self._judge(p, q, x)[0]

    def verify(self, tests: DraftTests, refined: Tensor) -> Verdict:
        a, size = self._judge(tests.p, tests.q, tests.draft[..., None])
        a = a.squeeze(-1)
        return Verdict(tests.coin < a, {"cluster_size": size.squeeze(-1).float(), **drift(tests, a)})

    def _judge(self, p: Tensor, q: Tensor, x: Tensor) -> tuple[Tensor, Tensor]:
        """Acceptance and cluster size [..., n] of candidates x [..., n]."""
        ids, valid = self._slice(p, q, x)
        members = ids.flatten(-2)
        p_member = p.gather(-1, members).view(ids.shape)
        q_member = q.gather(-1, members).view(ids.shape)
        p_x = p.gather(-1, x)
        near = (p_member > 0) & ((p_member - p_x[..., None]).abs() <= self._delta) & self._close(ids, x)
        kept = valid & (near | (ids == x[..., None]))
        p_cluster = torch.where(kept, p_member, 0.0).sum(-1)
        q_cluster = torch.where(kept, q_member, 0.0).sum(-1)
        return torch.where(p_x > 0, p_cluster / q_cluster, 0.0), kept.sum(-1)

    def _slice(self, p: Tensor, q: Tensor, x: Tensor) -> tuple[Tensor, Tensor]:
        """Ids [..., n, m] around each candidate in rank order, and which of them exist; each holds x exactly once."""
        if self._nearest is not None:
            others = self._nearest[x.clamp(max=len(self._nearest) - 1)][..., 1:]
            ids = torch.cat([x[..., None], others], dim=-1)
            return ids, torch.ones_like(ids, dtype=torch.bool)
        if x.shape[-1] == 1 and self._rank_by == "target":
            return self._slice_of_kept(p, x)
        weights = p if self._rank_by == "target" else q
        order = rank(weights, self._descending)
        place_of = torch.empty_like(order).scatter_(
            -1, order, torch.arange(p.shape[-1], device=p.device).expand(p.shape)
        )
        place = place_of.gather(-1, x)[..., None] + self._offsets
        valid = (place >= 0) & (place < p.shape[-1])
        place = place.clamp(0, p.shape[-1] - 1)
        return order.gather(-1, place.flatten(-2)).view(place.shape), valid

    def _slice_of_kept(self, p: Tensor, x: Tensor) -> tuple[Tensor, Tensor]:
        """The same around one candidate [..., 1] among the tokens of p > 0, as no others count; itself elsewhere."""
        order = rank_kept(p, self._descending)
        here = order == x
        place = here.int().argmax(-1, keepdim=True) + self._offsets
        ids = order.gather(-1, place.clamp(0, order.shape[-1] - 1))
        valid = here.any(-1, keepdim=True) & (place >= 0) & (place < order.shape[-1]) & (ids >= 0)
        own = self._offsets == 0
        return torch.where(valid, ids, x)[..., None, :], (valid | own)[..., None, :]

    def _close(self, ids: Tensor, x: Tensor) -> Tensor:
        """Whether members lie within d of x, in squared Euclidean distance of codebook rows."""
        if self._d == float("inf"):
            return torch.ones_like(ids, dtype=torch.bool)
        last = len(self._codebook) - 1
        difference = self._codebook[ids.clamp(max=last)] - self._codebook[x.clamp(max=last)][..., None, :]
        return difference.square().sum(-1) <= self._d


def _nearest(codebook: Tensor, count: int) -> Tensor:
    """[V, count] ids nearest to each token, itself first."""
    distance = torch.cdist(codebook, codebook).fill_diagonal_(-1.0)
    return distance.topk(min(count, len(codebook)), largest=False).indices
