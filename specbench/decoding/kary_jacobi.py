"""SJD-PAC as its released code decodes (KangJialiang/SJD-PAC, commit 4fbc099): a K-ary tree inside the Jacobi window.

The first `levels` levels of the window are a full K-ary tree, the root included; a chain continues below its first
branch. All parents of a level have the same K children. Every node is tested with a separate coin, siblings against
the residual distribution after earlier siblings. The path with the most accepted drafts is committed; ties take the
first. Later slots keep a passed first child, with siblings from [p - q]+, or redraw all children from the residual.

Lossy for K > 1: siblings come from residual distributions, but are tested as draws from p without earlier siblings,
and the path depends on the outcome of the coins. After a path without a rejection the next token is uniform.
"""

from functools import lru_cache

import torch
from torch import Tensor

from specbench.decoding.draft_tree import first_drafts_by_depth, routes
from specbench.decoding.drafters.jacobi import Jacobi
from specbench.decoding.drafters.token_init import Init
from specbench.decoding.interfaces import Batch, Context, Proposal, Verification
from specbench.decoding.loop import Loop
from specbench.decoding.noise import Noise, Stream
from specbench.decoding.recorded_step import RecordedStep
from specbench.decoding.sampling import at, draw, rows_at, without
from specbench.models.interface import Tree


class KaryJacobi(Jacobi):
    """The Jacobi chain with a K-ary tree at its beginning. Every forward has all its tokens, also at an image's end."""

    def __init__(self, context: Context, init: Init, window: int, siblings: int, levels: int):
        super().__init__(context, init, window)
        self.siblings, self.levels = siblings, min(levels, window)
        self.tree = kary_tree(window, siblings, self.levels)
        self.columns = len(self.tree.parents)
        self._rank = torch.tensor(child_numbers(self.tree), device=context.device)
        self.uniform = torch.zeros(context.layout.vocab, device=context.device)
        self.uniform[: context.layout.v_image] = 1 / context.layout.v_image

    def begin(self, batch: Batch) -> None:
        super().begin(batch)
        rows, slots = batch.tokens.shape
        # [B, slots, K - 1] children of a slot after the first child
        self._others = batch.tokens.new_zeros(rows, slots + self.window, self.siblings - 1)

    def propose(self, committed: Tensor, width: int, step: Tensor) -> Proposal:
        return super().propose(committed, self.window, step)

    def _expand(self, trunk: Proposal, committed: Tensor, step: Tensor) -> Proposal:
        if self.tree.is_chain:
            return trunk
        noise, tables = self._batch.noise, routes(self.tree, committed.device)
        slots, first = trunk.positions[:, : self.levels - 1], trunk.tokens[:, 1 : self.levels]
        drawn = self.others_of(without(self.uniform.expand(*first.shape, -1), first), slots, step, 0, noise)
        others = torch.where((slots >= self._drafted_to[:, None])[..., None], drawn, self._others[self._rows, slots])
        children = torch.cat([first[..., None], others], -1)
        depth, drafts = tables.depth, self.window - 1
        tokens = children[:, (depth - 1).clamp(0, self.levels - 2), self._rank]
        # In the first step each node is drawn separately.
        lone = noise.uniform(committed[:, None] + depth - 1, Stream.SIBLING, -1 - tables.peer)
        tokens = torch.where(step == 1, (lone / self.uniform[0]).long(), tokens)
        trunk_columns = trunk.tokens[:, depth.clamp(max=drafts)]
        tokens = torch.where(tables.in_trunk, trunk_columns, tokens)
        q = trunk.q[:, depth.clamp(max=drafts - 1)]
        return Proposal(tokens, committed[:, None] + depth, q, self.tree, self.columns, trunk.earlier)

    def others_of(self, weights: Tensor, slots: Tensor, step: Tensor, kind: int, noise: Noise) -> Tensor:
        """Draw K - 1 different tokens [B, n, K - 1] from `weights` [B, n, V] for each of `slots` [B, n], padded with 0.
        `kind`: number of the draw within a step."""
        drawn = []
        for number in range(self.siblings - 1):
            uniform = noise.uniform(slots, Stream.SIBLING, 2 * (step * self.siblings + number) + kind)
            drawn.append(torch.where(weights.sum(-1) > 0, draw(weights, uniform), 0))
            weights = weights.scatter(-1, drawn[-1][..., None], 0.0)
        return torch.stack(drawn, -1) if drawn else slots.new_zeros(*slots.shape, 0)

    def observe_tree(self, verified: Verification, others: Tensor, positions: Tensor, shift: Tensor) -> None:
        """Store a step's outcome and the later siblings `others` [B, levels - 1, K - 1] of the next tree."""
        self.observe(verified, positions, shift, True)
        self._drafted_to = positions[:, -1]  # the p of the last column is not used
        after = positions[:, :1] + verified.first[:, None] + 1 + torch.arange(others.shape[1], device=shift.device)
        self._others[self._rows, after] = others


@lru_cache
def kary_tree(window: int, siblings: int, levels: int) -> Tree:
    """Build a trunk of `window` columns, then the other nodes by level, and within a level in the order of their
    paths."""
    parents, level = list(range(-1, window - 1)), [0]
    for depth in range(1, levels):
        below = []
        for parent in level:
            for child in range(siblings):
                on_trunk = parent == depth - 1 and child == 0
                below.append(depth if on_trunk else len(parents))
                if not on_trunk:
                    parents.append(parent)
        level = below
    return Tree(tuple(parents))


def child_numbers(tree: Tree) -> list[int]:
    """Return the number of each column among its parent's children, from 0."""
    return [tree.parents[:column].count(parent) for column, parent in enumerate(tree.parents)]


class KaryLoop(Loop):
    """The draft-and-verify loop with the tree of a `KaryJacobi`, verified as the released code does."""

    _drafter: KaryJacobi

    def _commit(self, logits: Tensor, proposal: Proposal) -> None:
        tree, device = proposal.tree, logits.device
        p = self._target(logits, proposal.positions)
        verified, others = self._verified(p, proposal)
        positions = self.committed[:, None] + torch.arange(self._drafter.window, device=device)
        self.tokens.scatter_(1, positions, verified.tokens)
        if proposal.branches:
            self.session.keep(verified.columns[:, 1:], positions[:, 1:])
        tables = routes(tree, device) if proposal.branches else None
        by_depth = first_drafts_by_depth(tree, device)
        self.recorder.step(
            RecordedStep(verified, proposal, tables=tables, by_depth=by_depth, positions=positions, steps=self.steps)
        )
        shift = (verified.first + 1).minimum(self._length - self.committed)
        self._drafter.observe_tree(verified, others, positions, shift)
        self.committed = self.committed + shift

    def _verified(self, p: Tensor, proposal: Proposal) -> tuple[Verification, Tensor]:
        """Return the outcome of a forward, and the later siblings of the next step's tree."""
        tables, tokens, slots, step = routes(proposal.tree, p.device), proposal.tokens, proposal.positions, self.steps
        q = proposal.q if proposal.q.shape[1] == p.shape[1] else torch.nn.functional.pad(proposal.q, (0, 0, 0, 1))
        tested_p, tested_q = self._tests(p, q, tokens)
        stream = torch.where(tables.in_trunk, int(Stream.COIN), int(Stream.SIBLING_COIN))
        number = torch.where(tables.in_trunk, step, step * proposal.max_columns + tables.peer)
        coin = self._noise.uniform(slots - 1, stream, number)[:, 1:]
        p_x, q_x = (at(part, tokens[:, tables.tested])[:, tables.test] for part in (tested_p, tested_q))
        # Drafts past the end do not count: their number depends on the other rows of the batch.
        exists = (tested_q.sum(-1) > 0)[:, tables.test] & (slots[:, 1:] <= self._length)
        passed = exists & (p_x > coin * q_x)
        alive = (~passed).float() @ tables.ancestors[:, 1:].T == 0
        stop = torch.where(alive, tables.depth * len(tables.depth) - tables.peer, -1).argmax(1)
        first, path = tables.depth[stop], tables.route[stop]
        # Per column: whether its first child is kept, and the residual after the test of its last child.
        inner, last = tables.has_children, tables.last_test
        keep = inner & passed[:, (tables.next - 1).clamp(min=0)]
        left = (tested_p[:, last] - tested_q[:, last]).clamp(min=0)
        left = torch.where(inner[:, None] & (left.sum(-1, keepdim=True) > 0), left, p)
        along = rows_at(left, path), keep.gather(1, path), tokens.gather(1, tables.next[path])
        token, others = self._redrawn(*along, rows_at(p, path), rows_at(q, path), first)
        drafts = torch.nn.functional.pad(tokens.gather(1, path[:, 1:]), (0, 1))
        token = torch.where(torch.arange(path.shape[1], device=p.device) < first[:, None], drafts, token)
        tested = exists & alive[:, tables.parent[1:]]
        ratio = torch.where(p_x > 0, p_x / q_x, 0.0)
        facts = {"acceptance": ratio, "ratio": ratio}
        return Verification(first, path, token, rows_at(p, path), tested, tested & passed, facts), others

    def _tests(self, p: Tensor, q: Tensor, tokens: Tensor) -> tuple[Tensor, Tensor]:
        """Return p and q [B, C - 1, V] by test; for later siblings, [p - q]+ and q without the earlier siblings."""
        tables = routes(self._drafter.tree, p.device)
        p, q = p[:, tables.first_parents], q[:, tables.first_parents]
        pairs = [(p, q)]
        for level in tables.levels:
            p = (p[:, level.within] - q[:, level.within]).clamp(min=0)
            p = p / p.sum(-1, keepdim=True).clamp(min=torch.finfo(p.dtype).tiny)
            q = without(q[:, level.within], tokens[:, level.earlier])
            pairs.append((p, q))
        return torch.cat([p for p, _ in pairs], 1), torch.cat([q for _, q in pairs], 1)

    def _redrawn(
        self, left: Tensor, keep: Tensor, draft: Tensor, p: Tensor, q: Tensor, first: Tensor
    ) -> tuple[Tensor, Tensor]:
        """Return the next token [B, T] of each slot of the path, and later siblings for the slots after `first` [B]."""
        drafter, step = self._drafter, self.steps
        slots = self.committed[:, None] + torch.arange(p.shape[1], device=p.device)
        token = torch.where(keep, draft, draw(left, self._noise.uniform(slots, Stream.REDRAW, step)))
        after = first[:, None] + 1 + torch.arange(drafter.levels - 1, device=p.device)
        there = after.clamp(max=p.shape[1] - 1)
        rest, excess = rows_at(left, there), (rows_at(p, there) - rows_at(q, there)).clamp(min=0)
        rest = rest.scatter(-1, token.gather(1, there)[..., None], 0.0)
        weights = torch.where(keep.gather(1, there)[..., None], excess, rest)
        others = drafter.others_of(weights, self.committed[:, None] + after, step, 1, self._noise)
        # The last slot is not drawn from its p, even if it is committed.
        forced = self._target.forced_at(slots[:, -1:])
        bonus = draw(drafter.uniform.expand(len(p), 1, -1), self._noise.uniform(slots[:, -1:], Stream.RESIDUAL, step))
        return torch.cat([token[:, :-1], torch.where(forced >= 0, forced, bonus)], 1), others
