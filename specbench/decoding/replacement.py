"""Random replacement of a given share of sampled tokens (GSD, section 3.1 and figure 4)."""

import torch
from torch import Tensor

from specbench.decoding.draft_tree import Routes
from specbench.decoding.drafters.jacobi import NoDraft
from specbench.decoding.drafters.token_init import Init
from specbench.decoding.interfaces import Context, Proposal, Verification
from specbench.decoding.loop import Loop
from specbench.decoding.noise import Stream
from specbench.decoding.sampling import at


class Replacement(NoDraft):
    """No drafts: a share of AR's tokens is replaced by random tokens among the `top` most probable."""

    def __init__(self, context: Context, init: Init, share: float, top: int):
        super().__init__(context, init)
        self.share, self.top = share, top


class ReplacementLoop(Loop):
    """AR that replaces each token with probability `share` before the next forward reads it.

    The replacement is uniform over the most probable tokens, without tokens of probability 0, so that the image stays
    within top-k, top-p and the grammar.
    """

    _drafter: Replacement

    def _judged(self, p: Tensor, proposal: Proposal, tables: Routes | None, step: Tensor) -> Verification:
        sampled = super()._judged(p, proposal, tables, step)
        coin, place = (self._noise.uniform(proposal.positions, kind) for kind in (Stream.COIN, Stream.REDRAW))
        candidates = p.topk(min(self._drafter.top, p.shape[-1]), dim=-1)
        possible = (candidates.values > 0).sum(-1).clamp(min=1)  # NaN does not count
        other = at(candidates.indices, (place * possible).long().minimum(possible - 1))
        return sampled._replace(tokens=torch.where(coin < self._drafter.share, other, sampled.tokens))
