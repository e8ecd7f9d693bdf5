"""EAGLE-1 drafting: a trained head extrapolates the target's features along a static tree.

The head's KV cache holds features of the target only: one element per committed token, appended after each
verification. Draft trees use scratch slots, which the next tree overwrites. Conditional and unconditional rows share
their tokens, but have separate features and caches. The session applies guidance to their logits as to the target's.
"""

from functools import lru_cache
from typing import Any, NamedTuple

import torch
from torch import Tensor

from specbench.decoding.draft_tree import chain, parse_tree, pruned, routes
from specbench.decoding.drafters.token_init import Init
from specbench.decoding.interfaces import Batch, Context, Proposal, Verification
from specbench.decoding.noise import Stream
from specbench.decoding.sampling import features_at, for_rows
from specbench.models.draft_head import EagleHead, eagle3_head_for, head_for
from specbench.models.interface import FeatureSession, Session, Tree
from specbench.models.transformer.compilation import call_eager
from specbench.models.transformer.host_sync import to_host
from specbench.models.transformer.kv_cache import CacheExtent, PositionCache


class TreeLevel(NamedTuple):
    """The n columns of one depth that have children. Inner columns are all columns with children, in order of depth."""

    place: slice  # indices among the inner columns
    columns: Tensor  # [n] indices among all columns
    parents: Tensor  # [n] index of each parent among the previous level's columns
    children: Tensor  # [m] columns of the children
    drawn: Tensor  # [m] index of each child's token in the tokens drawn for this level, `most` tokens per column
    most: int  # maximum number of different children


class TreeLevels(NamedTuple):
    """Index tables for drafting a tree level by level."""

    inner: Tensor  # [k] inner columns
    ancestors: Tensor  # [k, C] bool, whether the second column is the inner column or its ancestor
    levels: tuple[TreeLevel, ...]  # by depth


class News(NamedTuple):
    """The verified path of the last step."""

    # tokens, positions: [B, T] tokens of the path and their stream slots
    tokens: Tensor
    features: Tensor  # [R, T, d] target features that predict these tokens
    positions: Tensor
    shift: Tensor  # [B] number of the path's tokens, from the first, that were committed


class Eagle:
    """EAGLE-1 drafter: siblings are drawn from the head's distribution without replacement.

    An image's first step has no features to draft from and is an AR step.
    """

    def __init__(self, context: Context, init: Init | None, tree: str, head: str):
        self._tree = parse_tree(tree)
        self._model = context.model
        self._head: EagleHead = self._load(context.model, head)
        self.window, self.columns = max(self._tree.depth) + 1, len(self._tree.parents)

    @staticmethod
    def _load(model: Any, head: str) -> EagleHead:
        return head_for(model, head)

    def begin(self, batch: Batch) -> None:
        self._batch = batch
        self._cache = HeadCache(self._head, batch.session, batch.tokens.shape[1], len(self._tree.parents))
        self._news: News | None = None

    def propose(self, committed: Tensor, width: int, step: Tensor) -> Proposal:
        news, whole = self._news, self._tree
        tree = chain(1) if news is None else self._tree_of(width - 1)
        positions = committed[:, None] + routes(tree, committed.device).depth
        tokens = torch.zeros_like(positions)
        tokens[:, :1] = self._batch.tokens.gather(1, (committed[:, None] - 1).clamp(min=0))
        q = torch.zeros(*tokens.shape, self._batch.target.vocab, device=tokens.device)
        # After a tree without drafts, no later tree has drafts, so the head can skip the committed tokens.
        if news is not None and len(tree.parents) > 1:
            readable, call = self._cache.readable(news.positions), call_eager
            # Compiled code supports one size of tree and path. Near an image's start and end they are smaller.
            if tree == whole and news.tokens.shape[1] == max(whole.depth) + 1:
                call = self._batch.call
                self._cache.mark_lengths(readable)
            levels = tree_levels(tree, self._batch.target.vocab, committed.device)
            call(Eagle._draft, self, levels, tokens, q, positions, news, readable, step)
        return Proposal(tokens, positions, q[:, :-1] if tree.is_chain else q, tree, len(whole.parents))

    def _tree_of(self, depth: int) -> Tree:
        """Return the tree for a step in which a path can hold at most `depth` drafts."""
        return pruned(self._tree, depth)

    def observe(self, verification: Verification, positions: Tensor, shift: Tensor, keep_tail: bool) -> None:
        features = features_at(self._batch.session.features, verification.columns)
        self._news = News(verification.tokens, features, positions, shift)

    def _learn(self, news: News, readable: Tensor) -> Tensor:
        """Append the tokens committed by the last step; return the head's features [R, d] after the last token."""
        seen = self._cache.append(self._model.table_ids(news.tokens), news.features, news.positions, readable)
        newest = (news.shift - 1).clamp(min=0).repeat(len(seen) // len(news.shift))
        return seen[torch.arange(len(seen), device=seen.device), newest]

    def _draft(
        self, tree: TreeLevels, tokens: Tensor, q: Tensor, positions: Tensor, news: News, readable: Tensor, step: Tensor
    ) -> None:
        """Append the last step's tokens to the head's cache, then draw drafts and fill `q` one depth at a time."""
        batch, features, proposed = self._batch, self._learn(news, readable)[:, None], []
        slots = positions[:, tree.inner]
        race = batch.noise.race(slots, Stream.SIBLING, step * len(self._tree.parents) + self._addresses(tree))
        branches = self._cache.branches(tree, slots, positions[:, :1])
        for depth, level in enumerate(tree.levels):
            if depth:
                fed = self._model.table_ids(tokens[:, level.columns])
                features = self._cache.branch(branches, level.place, fed, features[:, level.parents])
            p = batch.target(self._head_logits(features), slots[:, level.place])
            tokens[:, level.children] = self._draw_children(p, race[:, level.place], level, slots, step)
            proposed.append(p)
        q[:, tree.inner] = torch.cat(proposed, 1)

    def _addresses(self, tree: TreeLevels) -> Tensor:
        """Return the noise index [k] of each inner column within a step."""
        return tree.inner

    def _head_logits(self, features: Tensor) -> Tensor:
        """Guided logits [B, n, v_image] of the head's features [R, n, d]."""
        return self._batch.session.logits(features)

    def _draw_children(self, p: Tensor, race: Tensor, level: TreeLevel, slots: Tensor, step: Tensor) -> Tensor:
        """Draw the children [B, m] of a level's columns from p [B, n, V] and its race, siblings without replacement."""
        return (p / race).topk(level.most, dim=-1).indices.flatten(1)[:, level.drawn]


class Eagle3(Eagle):
    """EAGLE's tree with an EAGLE-3 head. The target's sessions then keep the hidden states of several layers."""

    @staticmethod
    def _load(model: Any, head: str) -> EagleHead:
        return eagle3_head_for(model, head)

    def open(self, prefix: Any, guidance: float) -> Session:
        return self._model.tapped(self._head.taps).begin(prefix, guidance, self.columns)

    def _head_logits(self, features: Tensor) -> Tensor:
        return super()._head_logits(self._head.read(features))


class AdjacentEagle(Eagle):
    """EAGLE-1 drafter whose tree adapts to the acceptance in earlier slots (ADT-Tree).

    The tree is a chain of first children, each with siblings that have no children. If at least half of the chain was
    accepted, the next tree is one draft deeper and one sibling narrower; otherwise it is one draft shallower and one
    sibling wider. Each row has its own shape: the batch's tree contains the shapes of all rows, and a row has no drafts
    in nodes outside its own shape. A shape depends on earlier steps only.
    """

    def __init__(self, context: Context, init: Init | None, window: int, siblings: int, head: str):
        super().__init__(context, init, "chain", head)
        self._tree = comb(window - 1, siblings)
        self.window, self.columns = window, len(self._tree.parents)
        self._most = window - 1, siblings

    def begin(self, batch: Batch) -> None:
        super().begin(batch)
        self._shape = torch.tensor(self._most, device=batch.tokens.device).add(1).div(2, rounding_mode="floor")
        self._shape = self._shape.expand(len(batch.tokens), 2)  # [B, 2] depth and width

    def propose(self, committed: Tensor, width: int, step: Tensor) -> Proposal:
        proposal = super().propose(committed, width, step)
        tables = routes(proposal.tree, committed.device)
        deep = tables.depth[: proposal.q.shape[1]] >= self._shape[:, :1]
        first = proposal.tokens[:, torch.arange(len(tables.peer), device=committed.device) - tables.peer]
        tokens = torch.where(tables.peer < self._shape[:, 1:], proposal.tokens, first)  # a repeat is no draft (q = 0)
        return proposal._replace(tokens=tokens, q=proposal.q.masked_fill(deep[..., None], 0.0))

    def _tree_of(self, depth: int) -> Tree:
        deepest, widest = to_host(self._shape.amax(0))
        return comb(min(depth, deepest), widest)

    def _addresses(self, tree: TreeLevels) -> Tensor:
        return torch.arange(len(tree.inner), device=tree.inner.device)  # the same for all tree widths

    def observe(self, verification: Verification, positions: Tensor, shift: Tensor, keep_tail: bool) -> None:
        super().observe(verification, positions, shift, keep_tail)
        if verification.tokens.shape[1] > 1:
            enough = 2 * verification.first[:, None] >= self._shape[:, :1]
            change = torch.where(enough, 1, -1) * self._shape.new_tensor([1, -1])
            self._shape = (self._shape + change).clamp(min=1).minimum(self._shape.new_tensor(self._most))


@lru_cache
def comb(depth: int, siblings: int) -> Tree:
    """Build a chain of `depth` first children, each followed by its siblings."""
    if depth < 1:
        return chain(1)
    return Tree(
        (-1, *(0 if not level else 1 + (level - 1) * siblings for level in range(depth) for _ in range(siblings)))
    )


class Branches(NamedTuple):
    """Positions of a tree's k inner columns in the head's cache."""

    slots: Tensor  # [R, k] slots that are written
    # cosine, sine: [R, 1, k, d'] of the rotary positions
    cosine: Tensor
    sine: Tensor
    mask: Tensor  # [R, 1, k, S] bool, slots that each draft attends to


class HeadCache:
    """The head's KV cache for one batch. Element i of a row (prompt, then stream) is at slot i.

    The element that combines stream token s with the preceding feature has index P - 1 + s; P is the prompt's length.
    """

    def __init__(self, head: EagleHead, session: FeatureSession, slots: int, columns: int):
        """`session`: the target's session; `slots`: maximum number of stream slots; `columns`: maximum tree size."""
        self._head = head
        prompt = head.seen_prompt(session.draft_prompt())
        self._last = prompt.lengths[:, None] - 1
        longest = max(to_host(self._last[:, 0]))
        self._scratch = longest + slots + 1
        self._cache = PositionCache(1, self._scratch + columns)
        self._extent = CacheExtent()
        self._index = torch.arange(self._scratch + columns, device=self._last.device)
        if longest and prompt.ids is not None:
            places = self._index[:longest].expand(len(self._last), -1)
            mask = self._index[:longest] <= places[:, None, :, None]
            self._run(prompt.ids[:, 1:], head.fused(prompt.features), places, head.rotary(places), mask, longest)

    def mark_lengths(self, readable: Tensor) -> None:
        """Declare the lengths of `readable` and of the cache dynamic: one compiled version then covers all lengths."""
        torch._dynamo.mark_dynamic(readable, 0)
        torch._dynamo.mark_dynamic(self._index, 0)
        for buffers in self._cache.buffers():
            for buffer in buffers:
                torch._dynamo.mark_dynamic(buffer, 2)

    def readable(self, positions: Tensor) -> Tensor:
        """Return the cache slots [S] that `append` reads for stream slots `positions` [B, T]."""
        first = self._last + self._repeat(positions[:, :1])
        end, _ = self._extent.of(first[:, 0], positions.shape[1])
        return self._index[: min(end, self._scratch)]

    def append(self, ids: Tensor, features: Tensor, positions: Tensor, readable: Tensor) -> Tensor:
        """Append committed tokens [B, T] of stream slots `positions` [B, T] with their target features [R, T, d].
        `readable`: result of the method `readable` for these slots.

        Entries after the committed tokens are harmless: their slots are overwritten before anything attends to them.
        """
        slots = self._last + self._repeat(positions)
        mask = readable <= slots[:, None, :, None]
        fused = self._head.fused(features)
        return self._run(self._repeat(ids), fused, slots, self._head.rotary(slots), mask, len(readable))

    def branches(self, tree: TreeLevels, positions: Tensor, root: Tensor) -> Branches:
        """Return the cache positions of the tree's inner columns, which predict stream slots `positions` [B, k]. The
        root predicts stream slot `root` [B, 1]."""
        # Counted from the end, so that compiled code is valid for every prompt length.
        scratch = len(self._index) - tree.ancestors.shape[1]
        slots = (scratch + tree.inner).expand(len(self._last), -1)
        before = self._last + self._repeat(root)
        mask = (self._index < before[..., None]).expand(-1, len(tree.inner), -1).clone()
        # The root's token is the last committed token, which is already in the cache.
        mask[:, :, scratch + 1 :] = tree.ancestors[:, 1:]
        rotary = self._head.rotary(self._last + self._repeat(positions) - 1)
        return Branches(slots, *rotary, mask[:, None])

    def branch(self, branches: Branches, level: slice, ids: Tensor, features: Tensor) -> Tensor:
        """Run the head on the drafts [B, n] of the inner columns `level`, after it has run on their ancestors."""
        cosine, sine, mask = (places[:, :, level] for places in branches[1:])
        return self._run(self._repeat(ids), features, branches.slots[:, level], (cosine, sine), mask, len(self._index))

    def _repeat(self, rows: Tensor) -> Tensor:
        return for_rows(rows, len(self._last))

    def _run(
        self, ids: Tensor, features: Tensor, slots: Tensor, rotary: tuple[Tensor, Tensor], mask: Tensor, visible: int
    ) -> Tensor:
        self._cache.place(slots, visible)
        return self._head.extrapolate(ids, features, rotary, mask, self._cache)


@lru_cache(maxsize=64)
def tree_levels(tree: Tree, vocab: int, device: torch.device) -> TreeLevels:
    """Group the columns with children by depth.

    If there are more siblings than tokens in the vocabulary, the extra siblings repeat earlier siblings. Verification
    skips them, because their q is 0.
    """
    inner: list[int] = []
    levels, before = [], [0]
    for depth in range(max(tree.depth)):
        here = [c for c, d in enumerate(tree.depth) if d == depth and c in tree.parents]
        children = [c for c, parent in enumerate(tree.parents) if parent in here]
        rank = [tree.parents[:child].count(tree.parents[child]) for child in children]
        parents = [before.index(tree.parents[c]) if depth else 0 for c in here]
        most = min(max(rank) + 1, vocab)
        place = [here.index(tree.parents[child]) for child in children]
        drawn = [at * most + min(number, most - 1) for at, number in zip(place, rank, strict=True)]
        columns, above, below, chosen = (torch.tensor(x, device=device) for x in (here, parents, children, drawn))
        levels.append(TreeLevel(slice(len(inner), len(inner) + len(here)), columns, above, below, chosen, most))
        inner += here
        before = here
    columns = torch.tensor(inner, device=device)
    return TreeLevels(columns, tree.ancestors.to(device)[columns], tuple(levels))
