"""EAGLE-1 drafting: a trained head extrapolates the target's features along a static tree.

The head's KV cache holds features of the target only: one element per committed token, appended after each
verification. Draft trees use scratch slots, which the next tree overwrites. Conditional and unconditional rows have
their own features and cache, share their tokens, and are mixed by the session as the target's logits are.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from typing import NamedTuple

import torch
from torch import Tensor

from specbench.decoding.context import Context
from specbench.decoding.draft_tree import chain, parse_tree, pruned, routes
from specbench.decoding.drafters.token_init import Init
from specbench.decoding.interfaces import Batch, Proposal, Verification
from specbench.decoding.noise import Stream
from specbench.models.draft_head import EagleHead, head_for
from specbench.models.interface import Tree
from specbench.models.transformer.compilation import call_eager
from specbench.models.transformer.host_sync import to_host
from specbench.models.transformer.kv_cache import CacheExtent, PositionCache


class TreeLevel(NamedTuple):
    """The n columns of one depth that have children.

    Attributes:
        columns: [n] the columns.
        parents: [n] index of each parent among the previous level's columns.
        children: [m] columns of the children.
        place, rank: [m] per child, index of its parent among `columns`, and its sibling index.
        max_children: maximum number of children.
    """

    columns: Tensor
    parents: Tensor
    children: Tensor
    place: Tensor
    rank: Tensor
    max_children: int


class Eagle:
    """EAGLE-1 drafter: siblings are drawn from the head's distribution without replacement.

    An image's first step has no features to draft from and is an AR step.
    """

    def __init__(self, context: Context, init: Init | None, tree: str, head: str):
        self._tree = parse_tree(tree)
        self._model = context.model
        self._head: EagleHead = head_for(context.model, head)
        self.window = max(self._tree.depth) + 1
        self.columns = len(self._tree.parents)

    def begin(self, batch: Batch) -> None:
        self._batch = batch
        self._cache = HeadCache(self._head, batch.session, batch.tokens.shape[1], self.columns)
        self._news: tuple[Tensor, Tensor, Tensor, Tensor] | None = None

    def propose(self, committed: Tensor, width: int, step: Tensor) -> Proposal:
        known = self._learn()
        tree = chain(1) if known is None else pruned(self._tree, width - 1)
        positions = committed[:, None] + routes(tree, committed.device).depth
        tokens = torch.zeros_like(positions)
        tokens[:, :1] = self._batch.tokens.gather(1, (committed[:, None] - 1).clamp(min=0))
        q = torch.zeros(*tokens.shape, self._batch.target.vocab, device=tokens.device)
        if len(tree.parents) > 1:
            call = self._batch.call if len(tree.parents) == self.columns else call_eager
            self._cache.mark_length()
            ancestors = routes(tree, committed.device).ancestors > 0
            levels = _tree_levels(tree, committed.device)
            call(Eagle._draft, self, levels, ancestors, tokens, q, positions, known, step)
        return Proposal(tokens, positions, q[:, :-1] if tree.is_chain else q, tree, self.columns)

    def observe(self, verification: Verification, positions: Tensor, shift: Tensor, keep_tail: bool) -> None:
        features = self._batch.session.features
        columns = verification.columns.repeat(len(features) // len(verification.columns), 1)
        features = features.gather(1, columns[..., None].expand(-1, -1, features.shape[-1]))
        self._news = verification.tokens, features, positions, shift

    def _learn(self) -> Tensor | None:
        """Append the tokens committed by the last step; return the head's features [R, d] after the newest, or None."""
        if self._news is None:
            return None
        tokens, features, positions, shift = self._news
        seen = self._cache.append(self._model.table_ids(tokens), features, positions)
        newest = (shift - 1).clamp(min=0).repeat(len(seen) // len(shift))
        return seen[torch.arange(len(seen), device=seen.device), newest]

    def _draft(
        self,
        levels: Sequence[TreeLevel],
        ancestors: Tensor,
        tokens: Tensor,
        q: Tensor,
        positions: Tensor,
        known: Tensor,
        step: Tensor,
    ) -> None:
        """Draw the draft tokens and record their q, one depth at a time."""
        features = known[:, None]
        for depth, level in enumerate(levels):
            columns = level.columns
            if depth:
                fed = self._model.table_ids(tokens[:, columns])
                features = self._cache.branch(fed, features[:, level.parents], positions, ancestors, columns)
            slots = positions[:, columns]
            proposed = self._batch.target(self._batch.session.logits(features), slots)
            race = self._batch.noise.race(slots, Stream.SIBLING, step * self.columns + columns)
            available = min(level.max_children, proposed.shape[-1])
            drawn = (proposed / race).topk(available, dim=-1).indices
            # With more siblings than tokens, extra siblings repeat an earlier one: q is 0 there, and they are skipped.
            tokens[:, level.children] = drawn[:, level.place, level.rank.clamp(max=available - 1)]
            q[:, columns] = proposed


class HeadCache:
    """The head's KV cache for one batch: element i of a row, of prompt or stream, is at slot i.

    The element that pairs stream token s with the feature before it has index P - 1 + s, P being the prompt's length.
    """

    def __init__(self, head: EagleHead, session, slots: int, columns: int):
        """`session`: the target's; `slots`: maximum stream slots; `columns`: maximum tree size."""
        self._head = head
        prompt = session.draft_prompt()
        self._last = prompt.lengths[:, None] - 1
        longest = max(to_host(self._last[:, 0]))
        self._scratch = longest + slots + 1
        self._cache = PositionCache(1, self._scratch + columns)
        self._extent = CacheExtent()
        self._index = torch.arange(self._scratch + columns, device=self._last.device)
        if longest:
            slots = self._index[:longest].expand(len(self._last), -1)
            mask = self._index[:longest] <= slots[..., None]
            self._run(prompt.ids[:, 1:], prompt.features, slots, slots, mask, longest)

    def mark_length(self) -> None:
        """Mark the cache length dynamic, so that one compiled form serves all prompt lengths."""
        torch._dynamo.mark_dynamic(self._index, 0)
        for buffers in self._cache.buffers():
            for buffer in buffers:
                torch._dynamo.mark_dynamic(buffer, 2)

    def append(self, ids: Tensor, features: Tensor, positions: Tensor) -> Tensor:
        """Append committed tokens [B, T] at stream slots `positions` [B, T] and their target features [R, T, d].

        Entries past the committed ones are harmless: their slots are overwritten before anything attends to them.
        """
        ids, positions = self._repeat(ids), self._repeat(positions)
        slots = self._last + positions
        end, _ = self._extent.of(slots[:, 0], slots.shape[1])
        visible = min(end, self._scratch)
        return self._run(ids, features, slots, slots, self._index[:visible] <= slots[..., None], visible)

    def branch(self, ids: Tensor, features: Tensor, positions: Tensor, ancestors: Tensor, columns: Tensor) -> Tensor:
        """Run the head on the drafts [B, n] of tree `columns` [n]; `positions` [B, C] are the stream slots that the
        tree's columns predict, `ancestors` [C, C] is True where the second column is the first one or an ancestor of
        it.
        """
        ids, positions = self._repeat(ids), self._repeat(positions)
        # Counted from the end, so that code compiled for one prompt length is valid for another.
        scratch = len(self._index) - len(ancestors)
        slots = (scratch + columns).expand(len(ids), -1)
        before = self._last + positions[:, :1]
        mask = (self._index < before[..., None]).expand(-1, len(columns), -1).clone()
        seen = ancestors[columns]
        seen[:, 0] = False
        mask[:, :, scratch:] = seen
        numbers = self._last + positions[:, columns] - 1
        return self._run(ids, features, slots, numbers, mask, len(self._index))

    def _repeat(self, rows: Tensor) -> Tensor:
        return rows.repeat(len(self._last) // len(rows), 1)

    def _run(self, ids: Tensor, features: Tensor, slots: Tensor, numbers: Tensor, mask: Tensor, visible: int) -> Tensor:
        self._cache.place(slots, visible)
        return self._head.extrapolate(
            ids,
            features,
            position_ids=numbers,
            attention_mask=mask[:, None],
            past_key_values=self._cache,
        )


@lru_cache(maxsize=64)
def _tree_levels(tree: Tree, device: torch.device) -> tuple[TreeLevel, ...]:
    """Group the columns with children by depth."""
    levels, before = [], [0]
    for depth in range(max(tree.depth)):
        own = [c for c, d in enumerate(tree.depth) if d == depth and c in tree.parents]
        children = [c for c, parent in enumerate(tree.parents) if parent in own]
        place = [own.index(tree.parents[child]) for child in children]
        rank = [tree.parents[:child].count(tree.parents[child]) for child in children]
        parents = [before.index(tree.parents[c]) if depth else 0 for c in own]
        lists = (own, parents, children, place, rank)
        levels.append(TreeLevel(*(torch.tensor(x, device=device) for x in lists), max(rank) + 1))
        before = own
    return tuple(levels)
