"""CASCADE (arXiv 2605.07230) as its public code decodes with Lumina-mGPT (selinyldrm/Deepseek-JanusPro-EAGLE, commit
8c40c9c): EAGLE's test with a boosted p. p is the target or residual probability of a draft x.

If a coin r rejects x, p becomes min(q, p + r boost), and the same r is compared again: x is accepted with probability
min(1, p / [q - boost]+). The boost is 0 if p is below the smallest probability among the most probable tokens that make
up `mass` of the distribution. Otherwise it is the sum of

    the cosine of the target's softmaxed hidden states that predict x and its parent, if this cosine is above
       `parent-cosine` and x is below the first level
    p(y) of each other node y whose prediction by the head is similar to x's: their cosine is above `pair-cosine`

For the n-th and m-th nodes of a level, the released code (`pairs` released) compares predictions of other nodes: of the
n-th and m-th nodes with children in the level below (if these are more than the nodes of the level, the count of nodes
continues in the level below). With `pairs` level, the nodes' own predictions are compared. Lossy: acceptance depends on
other drafts. The paper's text was not read, so it is unknown whether the paper has this rule.
"""

from functools import lru_cache
from typing import Literal, NamedTuple

import torch
from torch import Tensor

from specbench.decoding.draft_tree import Routes, routes
from specbench.decoding.drafters.eagle import Eagle
from specbench.decoding.drafters.token_init import Init
from specbench.decoding.interfaces import Context, Proposal, Verification
from specbench.decoding.loop import Loop
from specbench.decoding.verification.chain_verification import verify_chain
from specbench.decoding.verification.ratio_tests import DraftTests, RatioTest
from specbench.decoding.verification.tree_verification import verify_tree
from specbench.models.interface import Tree


class CascadeEagle(Eagle):
    """EAGLE-1 drafter that also holds the settings of CASCADE's test."""

    def __init__(
        self,
        context: Context,
        init: Init | None,
        tree: str,
        head: str,
        mass: float,
        parent_cosine: float,
        pair_cosine: float,
        pairs: Literal["released", "level"],
    ):
        super().__init__(context, init, tree, head)
        self.context, self.mass, self.parent_cosine, self.pair_cosine = context, mass, parent_cosine, pair_cosine
        self.a_level_off = pairs == "released"


class Boosts(NamedTuple):
    """Boosts of a step's drafts, in the order of their tests. K tests, each with at most n other nodes."""

    parent: Tensor  # [B, K] cosine of the states, 0 if it is not added
    others: Tensor  # [B, K, n] tokens of the nodes of the draft's level
    alike: Tensor  # [B, K, n] bool, entries of `others` whose p is added to the boost


class BoostedTest(RatioTest):
    """Acceptance test of one step with given `boosts`."""

    def __init__(self, context: Context, mass: float, boosts: Boosts):
        super().__init__(context)
        self._mass, self._boosts = mass, boosts

    def of_drafts(self, tests: DraftTests) -> Tensor:
        p, q = (part.gather(-1, tests.draft[..., None]).squeeze(-1) for part in (tests.p, tests.q))
        boost = self._boosts.parent + (tests.p.gather(-1, self._boosts.others) * self._boosts.alike).sum(-1)
        left = q - torch.where(p >= least_of(tests.p, self._mass), boost, 0.0)
        return torch.where(p > 0, torch.where(left > 0, p / left, 1.0), 0.0)


def least_of(p: Tensor, mass: float) -> Tensor:
    """Return the smallest probability [...] among the most probable tokens of p [..., V] that make up `mass`."""
    ranked = p.sort(-1, descending=True).values
    before = (ranked.cumsum(-1) < mass).sum(-1, keepdim=True).clamp(max=p.shape[-1] - 1)
    return ranked.gather(-1, before).squeeze(-1)


class Pairs(NamedTuple):
    """Nodes that each node of a tree is compared with. C nodes (columns), k inner (with children), at most n others."""

    inner: Tensor  # [k] columns
    row: Tensor  # [C] index, among the inner columns, of the prediction that is compared
    others: Tensor  # [C, n] columns whose tokens can add to the boost
    rows: Tensor  # [C, n] index, among the inner columns, of each prediction of `others`
    exist: Tensor  # [C, n] bool, False for padding


@lru_cache(maxsize=64)
def pairs_of(tree: Tree, a_level_off: bool, device: torch.device) -> Pairs:
    """List the nodes that each column of `tree` is compared with. `a_level_off`: use predictions of the level below."""
    inner = [column for column in range(len(tree.parents)) if column in tree.parents]
    found: list[list[tuple[int, int, int]]] = []
    for column, depth in enumerate(tree.depth):
        deciding = [number for number, c in enumerate(inner) if tree.depth[c] == depth + a_level_off]
        nodes = [tree.depth.index(depth) + n if a_level_off else inner[row] for n, row in enumerate(deciding)]
        compared = [] if column not in nodes else list(zip(nodes, deciding, strict=True))
        found.append([(dict(compared)[column], node, row) for node, row in compared if node != column])
    most = max(1, *map(len, found))
    table = [[(*entry, 1) for entry in row] + [(0, 0, 0, 0)] * (most - len(row)) for row in found]
    row, others, rows, exist = torch.tensor(table, device=device).unbind(-1)
    return Pairs(torch.tensor(inner, device=device), row[:, 0], others, rows, exist.bool())


class CascadeLoop(Loop):
    """The draft-and-verify loop with the test of a `CascadeEagle`."""

    _drafter: CascadeEagle

    def _commit(self, logits: Tensor, proposal: Proposal) -> None:
        tree, device = proposal.tree, logits.device
        # The tables are built here, because `_judged` may be compiled, and compiled code cannot build them.
        self._order = routes(tree, device)
        self._pairs = pairs_of(tree, self._drafter.a_level_off, device) if len(tree.parents) > 1 else None
        super()._commit(logits, proposal)

    def _judged(self, p: Tensor, proposal: Proposal, tables: Routes | None, step: Tensor) -> Verification:
        if self._pairs is None:
            return super()._judged(p, proposal, tables, step)
        drafter = self._drafter
        verifier = BoostedTest(drafter.context, drafter.mass, self._boosts(proposal, self._order, self._pairs))
        parts = verifier, self._refinement, self._noise, step
        return verify_chain(p, proposal, *parts) if tables is None else verify_tree(p, proposal, tables, *parts)

    def _boosts(self, proposal: Proposal, tables: Routes, pairs: Pairs) -> Boosts:
        drafter, tokens = self._drafter, proposal.tokens
        states = self.session.features[: len(tokens)].float().softmax(-1)  # the conditional rows
        parent = torch.cosine_similarity(states, states[:, tables.parent], -1)[:, tables.tested_parent].clamp(max=1)
        close = (parent > drafter.parent_cosine) & (tables.tested_depth > 1)
        predicted = torch.nn.functional.normalize(proposal.q[:, pairs.inner].float(), dim=-1)
        cosine = (predicted @ predicted.mT).clamp(max=1)[:, pairs.row[:, None], pairs.rows]
        # If other rows have fewer tokens, this row's tree may reach past the image's end: ignore levels past the end.
        exist = pairs.exist & (proposal.positions[:, pairs.inner[pairs.rows]] < self._length)
        alike = (cosine > drafter.pair_cosine) & exist
        others = tokens[:, pairs.others]
        return Boosts(torch.where(close, parent, 0.0), others[:, tables.tested], alike[:, tables.tested])
