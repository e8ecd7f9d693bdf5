"""Drafters: what is fed to the target besides the last committed token, and which path of it verification walks."""

from __future__ import annotations

from functools import lru_cache
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from specbench.decoding.context import Context
from specbench.decoding.init import Init, Slots
from specbench.decoding.noise import Noise, Stream
from specbench.decoding.residuals import standard
from specbench.decoding.sampling import at, draw, one_hot
from specbench.decoding.verifiers import ratio
from specbench.models.base import Tree


class Columns(NamedTuple):
    """One target forward: C columns per row.

    Attributes:
        tokens: [B, C] token each column consumes.
        positions: [B, C] stream slot each column predicts.
        tree: their shape; None for a chain.
    """

    tokens: Tensor
    positions: Tensor
    tree: Tree | None


class Path(NamedTuple):
    """The chain of window slots that verification walks; slot j of a row is stream slot n + j. T slots.

    Attributes:
        p: [B, T, V] target distribution of each slot; true to the path for the first `limit` slots, of an abandoned
            branch after that (still a legal law to draft from: it looks at earlier slots only).
        tested_p, q: [B, T, V] the distributions to verify with: p and the drafts' laws, but for a slot 0 whose siblings
            were tested already, which they make come out as decided.
        draft: [B, T] draft tokens.
        limit: [B] slots of which at most this many can be committed.
        columns: [B, D] columns whose cache entries belong at slots 1 .. D of the path; None when all stand in place.
    """

    p: Tensor
    tested_p: Tensor
    q: Tensor
    draft: Tensor
    limit: Tensor
    columns: Tensor | None = None


class Drafter(Protocol):
    """Attributes: window W; columns, the most a forward can have; needs_history, as for `Init`."""

    window: int
    columns: int
    needs_history: bool

    def fill(self, slots: Slots, noise: Noise) -> tuple[Tensor, Tensor]:
        """Tokens [B, D] and laws q [B, D, V] for the fresh slots."""
        ...

    def expand(self, slots: Slots, q: Tensor, noise: Noise) -> Columns:
        """The forward for a filled window."""
        ...

    def choose(self, p: Tensor, fed: Columns, slots: Slots, q: Tensor, noise: Noise) -> Path:
        """The path to verify, given p [B, C, V] of every column that was fed."""
        ...


def _drafts(slots: Slots) -> Tensor:
    """[B, D] draft tokens."""
    return slots.tokens.gather(1, slots.positions)


class Jacobi:
    """A chain: the drafts the last iteration left, then fresh ones from the init."""

    def __init__(self, context: Context, init: Init, window: int):
        self.window = self.columns = window
        self.needs_history = init.needs_history
        self._init = init

    def fill(self, slots: Slots, noise: Noise) -> tuple[Tensor, Tensor]:
        return self._init.fill(slots, noise)

    def expand(self, slots: Slots, q: Tensor, noise: Noise) -> Columns:
        after = slots.start[:, None] + slots.positions.shape[1]
        positions = torch.cat([slots.positions, after], dim=1)
        return Columns(slots.tokens.gather(1, (positions - 1).clamp(min=0)), positions, None)

    def choose(self, p: Tensor, fed: Columns, slots: Slots, q: Tensor, noise: Noise) -> Path:
        width = slots.positions.shape[1] + 1
        trunk = p[:, :width]
        draft = torch.nn.functional.pad(_drafts(slots), (0, 1))
        return Path(trunk, trunk, q, draft, torch.full_like(slots.start, width))


class NoDraft(Jacobi):
    """Autoregressive sampling: a window of the last committed token alone."""

    def __init__(self, context: Context, init: Init):
        super().__init__(context, init, window=1)


class JacobiTree(Jacobi):
    """The Jacobi chain plus sibling branches at its first slot (SJD-PAC's proactive drafting, made exact).

    Sibling k follows q with its elder siblings removed; each branch repeats the chain's next drafts, whose laws do not
    depend on the first slot. Siblings are tested one after another against what the elder ones left of p (the recursive
    rejection of SpecInfer and EAGLE), so the first slot still follows p exactly.
    """

    def __init__(self, context: Context, init: Init, window: int, siblings: int, depth: int):
        super().__init__(context, init, window)
        self._siblings = siblings
        self._depth = depth
        self.columns = window + (siblings - 1) * min(depth, window - 1)

    def expand(self, slots: Slots, q: Tensor, noise: Noise) -> Columns:
        trunk = super().expand(slots, q, noise)
        drafts = _drafts(slots)
        depth = min(self._depth, drafts.shape[1])
        if depth == 0:
            return trunk
        tokens, positions = [trunk.tokens], [trunk.positions]
        law, elder = q[:, 0], drafts[:, 0]
        for sibling in range(1, self._siblings):
            law = _without(law, elder)
            elder = draw(law, self._coin(slots, noise, Stream.SIBLING, sibling))
            tokens += [elder[:, None], drafts[:, 1:depth]]
            positions.append(trunk.positions[:, 1 : depth + 1])
        tree = _tree(drafts.shape[1], self._siblings, depth)
        return Columns(torch.cat(tokens, 1), torch.cat(positions, 1), tree)

    def choose(self, p: Tensor, fed: Columns, slots: Slots, q: Tensor, noise: Noise) -> Path:
        path = super().choose(p, fed, slots, q, noise)
        if fed.tree is None:
            return path
        width = path.p.shape[1]
        depth = min(self._depth, width - 1)
        chosen, first, first_p, first_q = self._test_siblings(path, fed, width, depth, slots, noise)
        # Column of slot 1 + d of the path: in the trunk 1 + d, in branch k its d-th.
        start = torch.where(chosen > 0, width + (chosen - 1) * depth, 1)
        columns = start[:, None] + torch.arange(depth, device=start.device)
        rows = torch.arange(len(start), device=start.device)[:, None]
        later = torch.cat([p[rows, columns], path.p[:, depth + 1 :]], dim=1)
        return Path(
            p=torch.cat([path.p[:, :1], later], dim=1),
            tested_p=torch.cat([first_p[:, None], later], dim=1),
            q=torch.cat([first_q[:, None], q[:, 1:]], dim=1),
            draft=torch.cat([first[:, None], path.draft[:, 1:]], dim=1),
            limit=torch.where(chosen > 0, depth + 1, width),
            columns=columns,
        )

    def _test_siblings(self, path: Path, fed: Columns, width: int, depth: int, slots: Slots, noise: Noise):
        """Branch accepted [B] (0 is the trunk), its token, and the p and q that make slot 0's test come out so."""
        p, q, token = path.p[:, 0], path.q[:, 0], path.draft[:, 0]
        chosen = torch.zeros_like(slots.start)
        first, settled = token, torch.zeros_like(chosen, dtype=torch.bool)
        for sibling in range(self._siblings):
            if sibling:
                token = fed.tokens[:, width + (sibling - 1) * depth]
            coin = self._coin(slots, noise, Stream.SIBLING_COIN, sibling)
            wins = ~settled & (coin < ratio(p, q, token[:, None]).squeeze(1)) & (at(q, token) > 0)
            chosen = torch.where(wins, sibling, chosen)
            first = torch.where(wins, token, first)
            settled = settled | wins
            left = standard(p, q)
            p = torch.where(settled[:, None], p, left / left.sum(-1, keepdim=True))
            q = _without(q, token)
        # A ratio of one accepts, and a one-hot q on the rejected eldest leaves exactly the remaining p to draw from.
        sure = one_hot(first, p.shape[-1])
        return chosen, first, torch.where(settled[:, None], sure, p), sure

    def _coin(self, slots: Slots, noise: Noise, stream: Stream, sibling: int) -> Tensor:
        """[B] uniforms of one sibling at the window's first slot."""
        return noise.uniform(slots.start[:, None], stream, slots.step * self._siblings + sibling).squeeze(1)


def _without(law: Tensor, tokens: Tensor) -> Tensor:
    """`law` [B, V] with `tokens` [B] removed, normalised; all zero when nothing is left."""
    left = law.scatter(-1, tokens[:, None], 0.0)
    return left / left.sum(-1, keepdim=True).clamp(min=torch.finfo(left.dtype).tiny)


@lru_cache
def _tree(drafts: int, siblings: int, depth: int) -> Tree:
    """A trunk of `drafts` columns after the root, then `siblings - 1` chains of `depth` columns from the root."""
    parents = list(range(-1, drafts))
    for _ in range(siblings - 1):
        parents.append(0)
        parents.extend(range(len(parents) - 1, len(parents) + depth - 2))
    return Tree(tuple(parents))
