"""Drafters: what is fed to the target besides the last committed token."""

from __future__ import annotations

from functools import lru_cache
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from specbench.decoding.context import Context
from specbench.decoding.draft_tree import chain, routes
from specbench.decoding.drafters.token_init import Init, Slots
from specbench.decoding.interfaces import Batch, Proposal
from specbench.decoding.noise import Stream
from specbench.decoding.sampling import draw, one_hot, without
from specbench.models.interface import Tree
from specbench.models.transformer.compilation import call_eager

if TYPE_CHECKING:
    from specbench.decoding.interfaces import Verification


class Jacobi:
    """A chain: the drafts that the last step left, then fresh ones from the init."""

    def __init__(self, context: Context, init: Init, window: int):
        self.window = self.columns = window
        self._init = init

    def begin(self, batch: Batch) -> None:
        self._batch = batch
        rows, slots = batch.tokens.shape
        device = batch.tokens.device
        self._rows = torch.arange(rows, device=device)[:, None]
        self._drafted_to = torch.zeros(rows, dtype=torch.long, device=device)
        self._q: Tensor | None = None
        self._shift = self._drafted_to
        needs_history = self._init.needs_history
        self._history = torch.zeros(rows, slots, batch.target.vocab, device=device) if needs_history else None

    def propose(self, committed: Tensor, width: int, step: Tensor) -> Proposal:
        # Compiled code must not find anything new: there must be laws, of a full window.
        full = width == self.window and self._q is not None and self._q.shape[1] == width
        call = self._batch.call if full else call_eager
        trunk = Proposal(*call(Jacobi._trunk, self, committed, width, step), chain(width), self.columns)
        return self._expand(trunk, committed, step)

    def observe(self, verification: Verification, positions: Tensor, shift: Tensor, keep_tail: bool) -> None:
        if self._history is not None:
            self._history[self._rows, positions] = verification.p
        self._q, self._shift = verification.p, shift
        kept = torch.full_like(shift, positions.shape[1]) if keep_tail else shift
        self._drafted_to = positions[:, 0] + kept

    def restart(self, rows: Tensor) -> None:
        self._drafted_to[rows] = 0
        if self._history is not None:
            self._history[rows] = 0

    def _expand(self, trunk: Proposal, committed: Tensor, step: Tensor) -> Proposal:
        return trunk

    def _trunk(self, committed: Tensor, width: int, step: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Tokens [B, width] of a chain, their positions, and the laws of its drafts."""
        laws = self._fill(committed, width, step)
        positions = committed[:, None] + torch.arange(width, device=committed.device)
        return self._batch.tokens.gather(1, (positions - 1).clamp(min=0)), positions, laws

    def _fill(self, committed: Tensor, width: int, step: Tensor) -> Tensor:
        """Fill every fresh one of the `width - 1` draft slots; all slots' laws q [B, width, V]."""
        tokens, target = self._batch.tokens, self._batch.target
        positions = committed[:, None] + torch.arange(width - 1, device=committed.device)
        fresh = positions >= self._drafted_to[:, None]
        slots = Slots(committed, positions, fresh, tokens, self._history, step)
        if width == 1:
            return torch.zeros(len(positions), 1, target.vocab, device=positions.device)
        drawn, q = self._init.fill(slots, self._batch.noise)
        if target.has_grammar:
            forced = target.forced_at(positions)
            drawn = torch.where(forced >= 0, forced, drawn)
            q = torch.where((forced >= 0)[..., None], one_hot(forced.clamp(min=0), q.shape[-1]), q)
        tokens.scatter_(1, positions, torch.where(fresh, drawn, tokens.gather(1, positions)))
        if self._q is None:
            return torch.nn.functional.pad(q, (0, 0, 0, 1))
        kept = torch.arange(width, device=positions.device) + self._shift[:, None]
        laws = self._q[self._rows, kept.clamp(max=self._q.shape[1] - 1)]
        laws[:, :-1] = torch.where(fresh[..., None], q, laws[:, :-1])
        return laws


class NoDraft(Jacobi):
    """Autoregressive sampling: a window of the last committed token alone."""

    def __init__(self, context: Context, init: Init):
        super().__init__(context, init, window=1)

    def begin(self, batch: Batch) -> None:
        super().begin(batch)
        self._no_law = torch.zeros(len(batch.tokens), 1, batch.target.vocab, device=batch.tokens.device)

    def propose(self, committed: Tensor, width: int, step: Tensor) -> Proposal:
        positions = committed[:, None]
        tokens = self._batch.tokens.gather(1, (positions - 1).clamp(min=0))
        return Proposal(tokens, positions, self._no_law, chain(1), 1)

    def observe(self, verification: Verification, positions: Tensor, shift: Tensor, keep_tail: bool) -> None:
        pass


class JacobiTree(Jacobi):
    """The Jacobi chain plus sibling branches at its first slot (SJD-PAC's proactive drafting, made exact).

    Sibling k follows q with its elder siblings removed; each branch repeats the chain's next drafts, whose laws do not
    depend on the first slot.
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
        law, elder = trunk.q[:, 0], drafts[:, 0]
        for sibling in range(1, self._siblings):
            law = without(law, elder)
            draws = step * self._siblings + sibling
            elder = draw(law, self._batch.noise.uniform(committed[:, None], Stream.SIBLING, draws).squeeze(1))
            tokens += [elder[:, None], drafts[:, 1:depth]]
            positions.append(trunk.positions[:, 1 : depth + 1])
        tree = _branches(drafts.shape[1], self._siblings, depth)
        laws = trunk.q[:, routes(tree, elder.device).depth]
        return Proposal(torch.cat(tokens, 1), torch.cat(positions, 1), laws, tree, self.columns)


@lru_cache
def _branches(drafts: int, siblings: int, depth: int) -> Tree:
    """A trunk of `drafts` columns after the root, then `siblings - 1` chains of `depth` columns from the root."""
    parents = list(range(-1, drafts))
    for _ in range(siblings - 1):
        parents.append(0)
        parents.extend(range(len(parents) - 1, len(parents) + depth - 2))
    return Tree(tuple(parents))
