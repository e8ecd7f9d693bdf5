"""Drafters without a draft model: no drafts (AR), the Jacobi chain, and the Jacobi chain with sibling branches."""

from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

from specbench.decoding.draft_tree import chain, routes
from specbench.decoding.drafters.token_init import Init, Slots
from specbench.decoding.interfaces import Batch, Context, Earlier, Proposal, Verification
from specbench.decoding.noise import Stream
from specbench.decoding.sampling import draw, one_hot, rows_at, without
from specbench.models.interface import Tree
from specbench.models.transformer.compilation import call_eager


class Jacobi:
    """A chain: the refined drafts of the previous step, then fresh tokens from the initialisation."""

    def __init__(self, context: Context, init: Init, window: int):
        self.window = self.columns = window
        self._init = init
        self._needs_history = init.needs_history

    def begin(self, batch: Batch) -> None:
        self._batch = batch
        rows, slots = batch.tokens.shape
        device = batch.tokens.device
        self._rows = torch.arange(rows, device=device)[:, None]
        self._slots = torch.arange(self.window, device=device)
        self._drafted_to = torch.zeros(rows, dtype=torch.long, device=device)
        self._p: Tensor | None = None
        """[B, W, V] distributions from which the refined drafts of the previous step were drawn."""
        self._tested: Tensor | None = None  # [B, W - 1, V] distributions of the drafts that the previous step tested
        self._shift = self._drafted_to
        self._history: Any = None  # [B, L, V] last p of each slot, if needed
        if self._needs_history:
            self._history = torch.zeros(rows, slots, batch.target.vocab, device=device)

    def propose(self, committed: Tensor, width: int, step: Tensor) -> Proposal:
        # Compiled code needs all its tensors to exist, so steps before the first full window run eagerly.
        full = width == self.window and self._p is not None and self._p.shape[1] == width
        call = self._batch.call if full else call_eager
        earlier = None if self._tested is None else Earlier(self._tested, self._shift, self._drafted_to - committed)
        tokens, positions, self._tested = call(Jacobi._trunk, self, committed, width, step)
        trunk = Proposal(tokens, positions, self._tested, chain(width), self.columns, earlier)
        return self._expand(trunk, committed, step)

    def observe(self, verification: Verification, positions: Tensor, shift: Tensor, keep_tail: bool) -> None:
        if self._history is not None:
            self._history[self._rows, positions] = verification.p
        refined_from = verification.refined_from
        self._p, self._shift = verification.p if refined_from is None else refined_from, shift
        self._drafted_to = positions[:, -1] + 1 if keep_tail else positions[:, 0] + shift

    def restart(self, rows: Tensor) -> None:
        self._drafted_to[rows] = 0
        if self._history is not None:
            self._history[rows] = 0

    def _expand(self, trunk: Proposal, committed: Tensor, step: Tensor) -> Proposal:
        return trunk

    def _trunk(self, committed: Tensor, width: int, step: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Return tokens and positions [B, width] of a chain, and q [B, width - 1, V] of its drafts."""
        positions = committed[:, None] + self._slots[:width]
        # A step reads random numbers of these streams at every slot of its window.
        self._batch.noise.hash_together(positions, (Stream.FRESH, Stream.COIN, Stream.REDRAW), step)
        q = self._fill(committed, positions[:, :-1], step)
        return self._batch.tokens.gather(1, (positions - 1).clamp(min=0)), positions, q

    def _fill(self, committed: Tensor, positions: Tensor, step: Tensor) -> Tensor:
        """Draw a token for every fresh draft slot among `positions` [B, D]. Return q [B, D, V] of all `positions`."""
        tokens, target, drafts = self._batch.tokens, self._batch.target, positions.shape[1]
        if drafts == 0:
            return torch.zeros(len(positions), 0, target.vocab, device=positions.device)
        fresh = positions >= self._drafted_to[:, None]
        drawn, q = self._init.fill(Slots(committed, positions, fresh, tokens, self._history, step), self._batch.noise)
        if target.has_grammar:
            forced = target.forced_at(positions)
            drawn = torch.where(forced >= 0, forced, drawn)
            q = torch.where((forced >= 0)[..., None], one_hot(forced.clamp(min=0), q.shape[-1]), q)
        tokens.scatter_(1, positions, torch.where(fresh, drawn, tokens.gather(1, positions)))
        if self._p is None:
            return q.contiguous()  # same memory layout as in later steps, so that verification is compiled once
        # Put all distributions into one table: selecting whole rows is much faster than selecting single entries.
        slot, columns = self._slots[:drafts], self._p.shape[1]
        kept = (slot + self._shift[:, None]).clamp(max=columns - 1)
        return rows_at(torch.cat([self._p, q], dim=1), torch.where(fresh, slot + columns, kept))


class NoDraft(Jacobi):
    """No drafts, as in autoregressive sampling: a forward has one token, the last committed token."""

    def __init__(self, context: Context, init: Init):
        super().__init__(context, init, window=1)

    def begin(self, batch: Batch) -> None:
        super().begin(batch)
        self._no_q = torch.zeros(len(batch.tokens), 0, batch.target.vocab, device=batch.tokens.device)

    def propose(self, committed: Tensor, width: int, step: Tensor) -> Proposal:
        positions = committed[:, None]
        tokens = self._batch.tokens.gather(1, (positions - 1).clamp(min=0))
        return Proposal(tokens, positions, self._no_q, chain(1), 1)

    def observe(self, verification: Verification, positions: Tensor, shift: Tensor, keep_tail: bool) -> None:
        pass


class JacobiTree(Jacobi):
    """The Jacobi chain with sibling branches at its first slot (SJD-PAC's proactive drafting, made exact).

    Sibling k is drawn from q without the earlier siblings. Each branch repeats the chain's next drafts, because their q
    does not depend on the first slot.
    """

    def __init__(self, context: Context, init: Init, window: int, siblings: int, depth: int):
        super().__init__(context, init, window)
        self._siblings = siblings
        self._depth = depth
        self.columns = window + (siblings - 1) * min(depth, window - 1)

    def _expand(self, trunk: Proposal, committed: Tensor, step: Tensor) -> Proposal:
        drafts = trunk.tokens[:, 1:]
        depth = min(self._depth, drafts.shape[1])
        if depth == 0 or self._siblings == 1:
            return trunk
        tokens, positions = [trunk.tokens], [trunk.positions]
        q, earlier = trunk.q[:, 0], drafts[:, 0]
        for sibling in range(1, self._siblings):
            q = without(q, earlier)
            draws = step * self._siblings + sibling
            earlier = draw(q, self._batch.noise.uniform(committed[:, None], Stream.SIBLING, draws).squeeze(1))
            tokens += [earlier[:, None], drafts[:, 1:depth]]
            positions.append(trunk.positions[:, 1 : depth + 1])
        tree = _branches(drafts.shape[1], self._siblings, depth)
        # The chain's last column has no draft after it.
        by_column = routes(tree, earlier.device).depth.clamp(max=drafts.shape[1] - 1)
        q = trunk.q[:, by_column]
        return Proposal(torch.cat(tokens, 1), torch.cat(positions, 1), q, tree, self.columns, trunk.earlier)


@lru_cache
def _branches(drafts: int, siblings: int, depth: int) -> Tree:
    """Build a trunk of `drafts` columns after the root, then `siblings - 1` chains of `depth` columns from the root."""
    parents = list(range(-1, drafts))
    for _ in range(siblings - 1):
        parents.append(0)
        parents.extend(range(len(parents) - 1, len(parents) + depth - 2))
    return Tree(tuple(parents))
