"""EAGLE head that commits some drafts without a target forward (VVS, arXiv 2511.13587; the rule follows its released
code, commit 7790173).

A round drafts a tree. Round n, counted from 0 after the AR step, is verified by a target forward unless n mod
`interval` is 1 and n is at least `after`. Without the forward, a path of the tree is drawn (all leaves are equally
likely) and its first k drafts are committed; k is at most the mean number of drafts on a path. The head drafts the next
tree from these drafts, and from features of the target that are k tokens older. The forward of the next round feeds the
k tokens before its tree. Skipped tokens are never compared with p, so the decoder is lossy.

The released code requires more than five tokens before the first skip. Here six rounds are required, so that rows of a
batch skip together; at the code's interval of 5 both rules are equal. The code takes the most probable tokens on a tree
that changes from step to step, with LANTERN's acceptance; here the tree is EAGLE-1's, siblings are drawn, and any
verifier can be used.
"""

from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

from specbench.decoding.draft_tree import first_drafts_by_depth, routes
from specbench.decoding.drafters.eagle import Eagle, News
from specbench.decoding.drafters.token_init import Init
from specbench.decoding.interfaces import Batch, Context, Proposal, Verification
from specbench.decoding.loop import Loop
from specbench.decoding.noise import Stream
from specbench.decoding.sampling import features_at, for_rows
from specbench.models.interface import Tree


class EagleSkips(Eagle):
    """EAGLE-1 drafter that skips the verification of some drafts."""

    _news: Any
    # the tree that the forward of this step verifies, if tokens before its root were skipped; else None
    after_skip: Proposal | None

    def __init__(self, context: Context, init: Init | None, tree: str, interval: int, after: int, head: str):
        super().__init__(context, init, tree, head)
        self._interval, self._tree_window = interval, self.window
        paths = leaf_paths(self._tree)
        most = sum(map(len, paths)) // len(paths)
        padded = [[*path, *path[-1:] * most][:most] for path in paths]
        self._paths = torch.tensor(padded, device=context.device)
        """[leaves, most] columns of the first drafts of each path."""
        self._lengths = torch.tensor([min(len(path), most) for path in paths], device=context.device)
        self._after = max(after, most)  # each round commits at least one token, and up to `most` are fed again
        self.window, self.columns = self.window + most, self.columns + most

    def begin(self, batch: Batch) -> None:
        super().begin(batch)
        self._round, self.after_skip = 0, None
        shape = len(batch.session.draft_prompt().lengths), batch.tokens.shape[1], self._model.feature_size
        self._features = torch.zeros(shape, dtype=self._model.dtype, device=batch.tokens.device)
        """[R, L, d] target features that predict each slot."""

    def propose(self, committed: Tensor, width: int, step: Tensor) -> Proposal:
        width, most, self.after_skip = min(width, self._tree_window), self._paths.shape[1], None
        skips = self._round % self._interval == 1 and self._round >= self._after
        self._round += (self._news is not None) + skips
        proposal = super().propose(committed, width, step)
        if not skips:
            return proposal
        stream = self._batch.tokens
        taken = self._skip(proposal, committed, step)
        self.after_skip = proposal = super().propose(committed + taken, width, step)
        # Rows that skip fewer tokens than others feed their last tokens again.
        slots = proposal.positions[:, :1] - most + torch.arange(most, device=stream.device)
        tokens = torch.cat([stream.gather(1, slots - 1), proposal.tokens], 1)
        tree = grafted(proposal.tree, most)
        return Proposal(tokens, torch.cat([slots, proposal.positions], 1), proposal.q, tree, self.columns)

    def observe(self, verification: Verification, positions: Tensor, shift: Tensor, keep_tail: bool) -> None:
        super().observe(verification, positions, shift, keep_tail)
        self._store(self._news.features, positions)
        if self.after_skip is not None:
            columns = torch.arange(self._paths.shape[1], device=positions.device)
            self._store(self._batch.session.features[:, : len(columns)], positions[:, :1] - len(columns) + columns)

    def _skip(self, drafted: Proposal, committed: Tensor, step: Tensor) -> Tensor:
        """Write the first drafts of a random path, for the head with older features. Return their number [B]."""
        tokens, last = self._batch.tokens, committed[:, None] - 1
        chance = self._batch.noise.uniform(committed[:, None], Stream.FRESH, step).squeeze(1)
        path = (chance * len(self._paths)).long()
        # Near the end the tree has fewer columns, because columns past the last slot are omitted.
        columns = self._paths[path].clamp(max=drafted.tokens.shape[1] - 1)
        ahead = torch.arange(columns.shape[1] + 1, device=tokens.device)
        tokens.scatter_(1, committed[:, None] + ahead[:-1], drafted.tokens.gather(1, columns))
        taken = self._lengths[path].minimum(len(self._batch.target.forced) - 1 - committed)
        # The last committed token is fed again, so that complete rows, which skip nothing, also have a newest element.
        oldest = (committed - taken).clamp(min=1)[:, None]
        sources = torch.cat([last, (oldest + ahead[:-1]).minimum(last)], 1)
        slots = last + ahead
        self._news = News(tokens.gather(1, slots), features_at(self._features, sources), slots, taken + 1)
        return taken

    def _store(self, features: Tensor, slots: Tensor) -> None:
        rows = torch.arange(len(features), device=slots.device)[:, None]
        self._features[rows, for_rows(slots, len(features))] = features


def leaf_paths(tree: Tree) -> list[list[int]]:
    """List the columns of the drafts from the root to each leaf."""
    paths: list[list[int]] = []
    for column, parent in enumerate(tree.parents):
        before = paths[parent] if column else []
        paths.append([*before, column] if column else [])
    return [path for column, path in enumerate(paths) if column not in tree.parents]


@lru_cache
def grafted(tree: Tree, columns: int) -> Tree:
    """Attach the tree's root to the last column of a chain of `columns` columns."""
    return Tree((*range(-1, columns), *(parent + columns for parent in tree.parents[1:])))


class SkippingLoop(Loop):
    """The draft-and-verify loop of an `EagleSkips`, which commits tokens that were not verified."""

    _drafter: EagleSkips

    def _commit(self, logits: Tensor, proposal: Proposal) -> None:
        if (after := self._drafter.after_skip) is None:
            super()._commit(logits, proposal)
            return
        fed, taken = proposal.tokens.shape[1] - after.tokens.shape[1], after.positions[:, 0] - self.committed
        # Record p of the skipped tokens: `taken` [B] tokens from the first slot that is not committed.
        skipped, past = proposal.positions[:, :fed], self.tokens.shape[1] - 1
        slots = torch.where(skipped >= self.committed[:, None], skipped, past)
        p, tokens = self._target(logits[:, :fed], skipped), self.tokens.gather(1, skipped)
        self.recorder.slots(p, tokens, slots, self.steps)
        # The step also counts for images that it completes by skipping.
        self.recorder.count_forward((taken > 0) & (self.committed + taken == self._length))
        self.committed = self.committed + taken
        tables = None if after.tree.is_chain else routes(after.tree, logits.device)
        by_depth = first_drafts_by_depth(after.tree, logits.device)
        verified, positions, shift = self._verify(logits[:, fed:], after, tables, by_depth, self.committed, self.steps)
        verified = verified._replace(columns=verified.columns + fed)
        if proposal.branches:
            self.session.keep(verified.columns[:, 1:], positions[:, 1:])
        self._was_full = False
        self._drafter.observe(verified, positions, shift, self._refinement.keeps_tail)
        self.committed = self.committed + shift
