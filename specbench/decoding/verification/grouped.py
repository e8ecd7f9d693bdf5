"""Grouped speculative decoding (So et al., ICCV 2025, algorithm 3): accept x with probability min(1, p(C)/q(C)).

The cluster C(x) is a slice of G tokens around x in rank order, filtered by probability and codebook distance. Clusters
overlap, so the result is lossy. q(C) sums over the whole cluster, as in the paper. With `cluster_q` "support" it sums
over the members within the target's top-k only, which accepts more drafts near the top-k cut-off.
"""

from typing import Literal

import torch
from torch import Tensor

from specbench.decoding.interfaces import Context
from specbench.decoding.sampling import rank, ranked_around
from specbench.decoding.verification.lantern import MOST_NEIGHBOURS, nearest, neighbour_table
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
        cluster: Literal["target", "draft", "embedding"],
        order: Literal["ascending", "descending"],
        bounds: Literal["half-open", "inclusive"],
        cluster_q: Literal["whole", "support"] = "whole",
    ):
        super().__init__(context)
        self._d, self._delta, self._rank_by, self._descending = d, delta, cluster, order == "descending"
        half = G // 2
        self._before, self._after = half, half if bounds == "inclusive" else max(half - 1, 0)
        self._whole = cluster_q == "whole"
        self._codebook = context.codebook
        self._nearest = _neighbours(context.codebook, G - 1) if cluster == "embedding" else None

    def acceptance(self, p: Tensor, q: Tensor, x: Tensor, depth: int | Tensor = 1) -> Tensor:
        return self._of_candidates(p, q, x)[0]

    def verify(self, tests: DraftTests, refined: Tensor) -> Verdict:
        a, size = self._of_draft(tests.p, tests.q, tests.draft[..., None])
        return Verdict(tests.coin < a, {"cluster_size": size.float(), **self.facts(tests, a)})

    def _of_candidates(self, p: Tensor, q: Tensor, x: Tensor) -> tuple[Tensor, Tensor]:
        """Acceptance and cluster size [..., n] of candidates x [..., n]."""
        ids, exists = self._slice(p, q, x)
        members = ids.flatten(-2)
        p_member, q_member = (weights.gather(-1, members).view(ids.shape) for weights in (p, q))
        return self._judge(x[..., None], p.gather(-1, x)[..., None], ids, exists, p_member, q_member)

    def _of_draft(self, p: Tensor, q: Tensor, x: Tensor) -> tuple[Tensor, Tensor]:
        """`_of_candidates` [...] of a single candidate x [..., 1], with fewer and smaller operations."""
        if self._rank_by != "target":
            a, size = self._of_candidates(p, q, x)
            return a.squeeze(-1), size.squeeze(-1)
        ids, exists, p_x = ranked_around(p, x, self._before, self._after, self._descending)
        return self._judge(x, p_x, ids, exists, p.gather(-1, ids), q.gather(-1, ids))

    def _judge(
        self, x: Tensor, p_x: Tensor, ids: Tensor, exists: Tensor, p_member: Tensor, q_member: Tensor
    ) -> tuple[Tensor, Tensor]:
        """Acceptance and cluster size [...] of x [..., 1], given the slice of `ids` [..., m] around it, the mask of
        existing ids, and their p and q; the cluster of an x with p(x) = 0 is x only."""
        member = exists & ((p_member - p_x).abs_() <= self._delta)
        if self._d != float("inf"):
            last = len(self._codebook) - 1
            difference = self._codebook[ids.clamp(max=last)] - self._codebook[x.clamp(max=last)]
            member &= difference.square_().sum(-1) <= self._d
        if not self._whole:
            member &= p_member > 0
        p_cluster, q_cluster = torch.where(member, torch.stack([p_member, q_member]), 0.0).sum(-1)
        drawn = p_x.squeeze(-1) > 0
        return torch.where(drawn, p_cluster / q_cluster, 0.0), torch.where(drawn, member.sum(-1), 1)

    def _slice(self, p: Tensor, q: Tensor, x: Tensor) -> tuple[Tensor, Tensor]:
        """Return ids [..., n, m] around each candidate in rank order, x exactly once, and a mask of existing ids."""
        if self._nearest is not None:
            others = self._nearest[x.clamp(max=len(self._nearest) - 1)]
            ids = torch.cat([x[..., None], others], dim=-1)
            return ids, torch.ones_like(ids, dtype=torch.bool)
        weights = p if self._rank_by == "target" else q
        order = rank(weights, self._descending)
        count = torch.arange(p.shape[-1], device=p.device)
        place_of = torch.empty_like(order).scatter_(-1, order, count.expand(p.shape))
        place = place_of.gather(-1, x)[..., None] + torch.arange(-self._before, self._after + 1, device=p.device)
        valid = (place >= 0) & (place < p.shape[-1])
        place = place.clamp(0, p.shape[-1] - 1)
        return order.gather(-1, place.flatten(-2)).view(place.shape), valid


class ReleasedGrouped(RatioTest):
    """The acceptance of the released code (junhyukso/GSD, commit 4216c7c): clusters of 14 tokens for any G.

    A cluster has seven less likely tokens, the draft, and six more likely tokens. If there are fewer than seven less
    likely tokens, the draft is tested alone. Distances are between rows of the target's input embedding. Drafts with
    p(x) = 0 may be accepted because of their neighbours, which commits tokens outside top-k.

    The release also ranks text tokens, all with p = 0, and the sort decides ties; here only image tokens are ranked,
    ties by id.
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
    """Return float32 input embeddings [v_image, d] of the image tokens; the codebook if a model has no such table."""
    if isinstance(context.model, TokenTableModel):
        tokens = torch.arange(context.layout.v_image, device=context.device)
        return context.model.token_table()[context.model.table_ids(tokens)].float()
    if context.codebook is None:
        raise SpecbenchError("--d needs input embeddings of the tokens, which this model does not have", "use --d inf")
    return context.codebook


def _neighbours(codebook: Tensor, count: int) -> Tensor:
    """Return ids [V, min(count, V - 1)] of the nearest other tokens by Euclidean distance, on the codebook's device."""
    table = neighbour_table(codebook, raw=True) if count <= MOST_NEIGHBOURS else nearest(codebook.float().cpu(), count)
    return table[:, :count].long().to(codebook.device)
