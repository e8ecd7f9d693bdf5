"""Grouped speculative decoding (So et al., ICCV 2025, algorithm 3): accept a draft x with min(1, p(C)/q(C)).

The cluster C(x) is a slice of G tokens around x in rank order, filtered by probability and codebook distance. Clusters
of different tokens overlap, so the result is lossy.

q(C) sums over the whole cluster, as the paper has it: members outside the target's top-k count, though their p is 0.
With `cluster_q` "support" they do not, which accepts more drafts near the edge of top-k.
"""

from __future__ import annotations

import torch
from torch import Tensor

from specbench.decoding.context import Context
from specbench.decoding.sampling import rank, rank_kept
from specbench.decoding.verification.codebook_neighbours import MOST, nearest, neighbour_table
from specbench.decoding.verification.ratio_tests import DraftTests, RatioTest, Verdict
from specbench.errors import SpecbenchError
from specbench.models.interface import TokenTableModel


class Grouped(RatioTest):
    """The grouped verifier. x belongs to its own cluster, and a draft with p(x) = 0 is rejected."""

    def __init__(
        self,
        context: Context,
        G: int,
        d: float,
        delta: float,
        cluster: str,
        order: str,
        bounds: str,
        cluster_q: str = "whole",
    ):
        super().__init__(context)
        if context.codebook is None and (d != float("inf") or cluster == "embedding"):
            raise SpecbenchError("this model has no codebook, which --d and --cluster embedding need", "use --d inf")
        self._d, self._delta, self._rank_by, self._descending = d, delta, cluster, order == "descending"
        half = G // 2
        last = half + 1 if bounds == "inclusive" else max(half, 1)
        self._whole = cluster_q == "whole"
        self._offsets = torch.arange(-half, last, device=context.device)
        self._codebook = context.codebook
        self._nearest = _neighbours(context.codebook, G - 1) if cluster == "embedding" else None

    def acceptance(self, p: Tensor, q: Tensor, x: Tensor, depth: int | Tensor = 1) -> Tensor:
        return self._judge(p, q, x)[0]

    def verify(self, tests: DraftTests, refined: Tensor) -> Verdict:
        a, size = self._judge(tests.p, tests.q, tests.draft[..., None])
        a = a.squeeze(-1)
        return Verdict(tests.coin < a, {"cluster_size": size.squeeze(-1).float(), **self.facts(tests, a)})

    def _judge(self, p: Tensor, q: Tensor, x: Tensor) -> tuple[Tensor, Tensor]:
        """Acceptance and cluster size [..., n] of candidates x [..., n]."""
        ids, valid = self._slice(p, q, x)
        members = ids.flatten(-2)
        p_member = p.gather(-1, members).view(ids.shape)
        q_member = q.gather(-1, members).view(ids.shape)
        p_x = p.gather(-1, x)
        near = ((p_member - p_x[..., None]).abs() <= self._delta) & self._close(ids, x)
        if not self._whole:
            near &= p_member > 0
        kept = valid & (near | (ids == x[..., None]))
        p_cluster = torch.where(kept, p_member, 0.0).sum(-1)
        q_cluster = torch.where(kept, q_member, 0.0).sum(-1)
        return torch.where(p_x > 0, p_cluster / q_cluster, 0.0), kept.sum(-1)

    def _slice(self, p: Tensor, q: Tensor, x: Tensor) -> tuple[Tensor, Tensor]:
        """Ids [..., n, m] around each candidate in rank order, x exactly once, and a mask of existing entries."""
        if self._nearest is not None:
            others = self._nearest[x.clamp(max=len(self._nearest) - 1)]
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
        """`_slice` around one candidate [..., 1], from the ranks of the tokens with p > 0; missing entries are x."""
        order = rank_kept(p, self._descending)
        here = order == x
        found = here.any(-1, keepdim=True)
        place = here.int().argmax(-1, keepdim=True) + self._offsets
        ids = order.gather(-1, place.clamp(0, order.shape[-1] - 1))
        valid = found & (place >= 0) & (place < order.shape[-1]) & (ids >= 0)
        if self._whole:
            beyond, exists = self._beyond_kept(p, order, place)
            ids, valid = torch.where(exists, beyond, ids), valid | (found & exists)
        own = self._offsets == 0
        return torch.where(valid, ids, x)[..., None, :], (valid | own)[..., None, :]

    def _beyond_kept(self, p: Tensor, order: Tensor, place: Tensor) -> tuple[Tensor, Tensor]:
        """Tokens of p = 0 at the places [..., m] before (ascending) or after (descending) the kept ones, and which of
        these places there are; ties stand in the order of their ids.
        """
        absent = (order < 0).sum(-1, keepdim=True)
        kept = order.shape[-1] - absent
        steps = place - kept if self._descending else absent - 1 - place
        most = min(len(self._offsets), p.shape[-1])
        numbers = torch.arange(p.shape[-1], device=p.device)
        keys = numbers.flip(0) if self._descending else numbers
        nearest = torch.where(p > 0, -1, keys).topk(most).values
        found = nearest.gather(-1, steps.clamp(0, most - 1))
        exists = (steps >= 0) & (steps < most) & (found >= 0)
        return (p.shape[-1] - 1 - found if self._descending else found), exists

    def _close(self, ids: Tensor, x: Tensor) -> Tensor:
        """Whether members are within d of x, in squared Euclidean distance of codebook rows."""
        if self._d == float("inf"):
            return torch.ones_like(ids, dtype=torch.bool)
        last = len(self._codebook) - 1
        difference = self._codebook[ids.clamp(max=last)] - self._codebook[x.clamp(max=last)][..., None, :]
        return difference.square().sum(-1) <= self._d


class ReleasedGrouped(RatioTest):
    """The acceptance of the released code (junhyukso/GSD, commit 4216c7c): clusters of 14 tokens, whatever G.

    Seven less likely tokens, the draft and six more likely ones; where there are no seven less likely ones, the draft
    is tested alone. Distances are between rows of the target's input embedding. Drafts with p(x) = 0 may be accepted
    for their neighbours, and so commit tokens outside top-k.

    The release ranks the words of text too, all of p = 0, and leaves the order of ties to the sort; here image tokens
    alone are ranked, ties by id.
    """

    HALF = 7

    def __init__(self, context: Context, d: float, delta: float, zero_p: bool):
        super().__init__(context)
        self._d, self._delta, self._zero_p = d, delta, zero_p
        self._table = _input_embedding(context) if d != float("inf") else None
        self._offsets = torch.arange(-self.HALF, self.HALF, device=context.device)

    def acceptance(self, p: Tensor, q: Tensor, x: Tensor, depth: int | Tensor = 1) -> Tensor:
        order = rank(p)
        count = torch.arange(p.shape[-1], device=p.device).expand(p.shape)
        place = torch.empty_like(order).scatter_(-1, order, count).gather(-1, x)[..., None] + self._offsets
        inside = (place[..., :1] >= 0) & (place < p.shape[-1])
        ids = order.gather(-1, place.clamp(0, p.shape[-1] - 1).flatten(-2)).view(place.shape)
        p_x, p_member = p.gather(-1, x), p.gather(-1, ids.flatten(-2)).view(ids.shape)
        member = inside & ((p_member - p_x[..., None]).abs() < self._delta)
        if self._table is not None:
            last = len(self._table) - 1
            gap = self._table[ids.clamp(max=last)] - self._table[x.clamp(max=last)][..., None, :]
            member &= gap.square().sum(-1) < self._d
        member |= (self._offsets == 0) & (place < p.shape[-1])
        p_cluster = torch.where(member, p_member, 0.0).sum(-1)
        q_cluster = torch.where(member, q.gather(-1, ids.flatten(-2)).view(ids.shape), 0.0).sum(-1)
        accepted = torch.where(p_cluster > 0, p_cluster / q_cluster, 0.0)
        return accepted if self._zero_p else torch.where(p_x > 0, accepted, 0.0)


def _input_embedding(context: Context) -> Tensor:
    """[v_image, d] float32 input embeddings of the image tokens; the codebook for models without such a table."""
    if isinstance(context.model, TokenTableModel):
        tokens = torch.arange(context.layout.v_image, device=context.device)
        return context.model.token_table()[context.model.table_ids(tokens)].float()
    if context.codebook is None:
        raise SpecbenchError("this model has no embedding of its tokens, which --d needs", "use --d inf")
    return context.codebook


def _neighbours(codebook: Tensor, count: int) -> Tensor:
    """Ids [V, min(count, V - 1)] of the nearest other tokens by Euclidean distance, on the codebook's device."""
    table = neighbour_table(codebook, raw=True) if count <= MOST else nearest(codebook.float().cpu(), count)
    return table[:, :count].long().to(codebook.device)
