"""Verification of the best of several independent chains of a draft head (greedy multi-path block verification, arXiv
2602.16961; the rule here is derived from a summary of its text).

K chains of drafts, the paths, are drawn independently from the head. At every prefix the tokens are ranked by p/q, the
largest first, ties by id. The best path is the first in lexicographic order: it has the best first token; among paths
with the same first token it has the best second token, and so on. Its distribution is known, because the best path is x
if all paths are x or worse, but not all are worse:

    q*(x_1 .. x_i) = (W_i + Q_i)^K - W_i^K

with Q_i the probability of the prefix under the head, and W_i the probability of all worse prefixes of its length:

    Q_0 = 1, W_0 = 0,  Q_{i+1} = Q_i q_{i+1}(x_{i+1}),  W_{i+1} = W_i + Q_i sum of q_{i+1}(v) over v worse than x_{i+1}

The best path is verified as one chain of drafts with q* in place of q, by any rule for chains: block verification in
the paper. This is lossless, because q* is the true distribution of the verified path and all paths are discarded
afterwards. (Committing the path with most accepted drafts, as `path_jacobi` does, is lossy: it depends on the coins.)
"""

import torch
from torch import Tensor

from specbench.decoding.draft_tree import chain, columns_by_path, independent_paths
from specbench.decoding.drafters.eagle import Eagle, TreeLevel
from specbench.decoding.drafters.token_init import Init
from specbench.decoding.interfaces import Context, Proposal
from specbench.decoding.loop import Loop
from specbench.decoding.noise import Stream
from specbench.decoding.sampling import at
from specbench.decoding.verification.chain_verification import verify_chain


class EaglePaths(Eagle):
    """An EAGLE-1 head that draws K independent chains of `window` - 1 drafts."""

    def __init__(self, context: Context, init: Init | None, window: int, paths: int, head: str):
        super().__init__(context, init, "chain", head)
        self.paths, self.window, self.columns = paths, window, 1 + paths * (window - 1)
        self._tree = independent_paths(paths, window - 1)

    def _draw_children(self, p: Tensor, race: Tensor, level: TreeLevel, slots: Tensor, step: Tensor) -> Tensor:
        if len(level.children) > race.shape[1]:  # the root: paths after path 0 use noise of the leaves
            leaves = self.columns - torch.arange(1, self.paths, device=slots.device)
            root = slots[:, :1].expand(-1, self.paths - 1)
            race = torch.cat([race, self._batch.noise.race(root, Stream.SIBLING, step * self.columns + leaves)], 1)
        return (p / race).argmax(-1)


def best_path(ratio: Tensor, drafts: Tensor) -> Tensor:
    """Return the number [B] of the first path in lexicographic order, given drafts and p/q `ratio`, both [B, K, D]."""
    path, other = (drafts[:, :, None], ratio[:, :, None]), (drafts[:, None], ratio[:, None])
    differ = path[0] != other[0]
    before = (path[1] > other[1]) | ((path[1] == other[1]) & (path[0] < other[0]))
    here = differ & (differ.cumsum(-1) == 1)  # first slot in which two paths differ
    return (here & before).any(-1).sum(1).argmin(1)


def best_path_q(p: Tensor, q: Tensor, drafts: Tensor, paths: int) -> Tensor:
    """q* [B, D, V] along the best path, float64. `p`, `q`: [B, D, V] float64 distributions of its slots. `drafts`: [B,
    D] its tokens. `paths`: K."""
    ratio = torch.where(q > 0, p / q, -1.0)  # a token that is never drawn ranks last
    order = torch.sort(ratio, dim=-1, descending=True, stable=True).indices
    ranked = q.gather(-1, order)
    worse = torch.empty_like(q).scatter_(-1, order, ranked.flip(-1).cumsum(-1).flip(-1) - ranked)
    reach = torch.nn.functional.pad(at(q, drafts).cumprod(1)[:, :-1], (1, 0), value=1.0)
    below = torch.nn.functional.pad((reach * at(worse, drafts)).cumsum(1)[:, :-1], (1, 0))
    # a^K - b^K is (a - b) times the sum of the a^j b^(K - 1 - j), which avoids differences of nearly equal numbers.
    whole = below + reach
    below, reach = (below / whole)[..., None], (reach / whole)[..., None]
    return q * _powers(below + reach * (worse + q), below + reach * worse, paths) / _powers(1.0, below, paths)


def _powers(a: Tensor | float, b: Tensor, paths: int) -> Tensor:
    """Sum of a^j b^(K - 1 - j) over j < K."""
    return sum((a**power * b ** (paths - 1 - power) for power in range(paths)), torch.zeros_like(b))


class GreedyPathLoop(Loop):
    """The draft-and-verify loop that verifies the best path of an `EaglePaths`."""

    _drafter: EaglePaths

    def _commit(self, logits: Tensor, proposal: Proposal) -> None:
        p, width = self._target(logits, proposal.positions), 1 + (proposal.tokens.shape[1] - 1) // self._drafter.paths
        best, columns = self._best_chain(p, proposal, width)
        p_path = p[torch.arange(len(p), device=p.device)[:, None], columns]
        verified = verify_chain(p_path, best, self._verifier, self._refinement, self._noise, self.steps)
        shift = self._commit_chain(verified, best, columns if proposal.branches else None)
        verified = verified._replace(columns=columns)
        self._drafter.observe(verified, best.positions, shift, self._refinement.keeps_tail)
        self.committed = self.committed + shift

    def _best_chain(self, p: Tensor, proposal: Proposal, width: int) -> tuple[Proposal, Tensor]:
        """Return the best path as a chain of `width` columns with q* as q, and its columns [B, width] in the tree."""
        paths, rows = self._drafter.paths, torch.arange(len(p), device=p.device)
        if paths == 1 or width == 1:
            return proposal, torch.arange(width, device=p.device).expand(len(p), -1)
        columns = columns_by_path(paths, width - 1, p.device)
        before, drafts = columns[:, :-1], proposal.tokens[:, columns[:, 1:]]
        p_drafts, q_drafts = (at(x[:, before], drafts).double() for x in (p, proposal.q))
        chosen = best_path(p_drafts / q_drafts, drafts)
        before, drafts, columns = before[chosen], drafts[rows, chosen], columns[chosen]
        p, q = (x[rows[:, None], before].double() for x in (p, proposal.q))
        q = best_path_q(p, q, drafts, paths).to(proposal.q.dtype)
        tokens, positions = (x.gather(1, columns) for x in (proposal.tokens, proposal.positions))
        return Proposal(tokens, positions, q, chain(width), proposal.max_columns), columns
