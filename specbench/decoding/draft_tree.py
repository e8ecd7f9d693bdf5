"""Static draft trees, and the index tables with which tree verification runs without host syncs."""

from collections.abc import Sequence
from functools import lru_cache
from itertools import pairwise
from typing import NamedTuple

import torch
from torch import Tensor

from specbench.models.interface import Tree
from specbench.specs.components import node_paths

RECORDED_DEPTHS = 8  # Draft depths for which the distance to the target is recorded separately


@lru_cache
def chain(columns: int) -> Tree:
    """Build a chain: the root and `columns - 1` drafts."""
    return Tree(tuple(range(-1, columns - 1)))


@lru_cache
def independent_paths(paths: int, drafts: int) -> Tree:
    """Build a root and `paths` chains of `drafts` columns from it, ordered by depth."""
    return Tree((-1, *[0] * paths, *range(1, 1 + paths * (drafts - 1))) if drafts else (-1,))


def columns_by_path(paths: int, drafts: int, device: torch.device) -> Tensor:
    """Return the columns [paths, 1 + drafts] of `independent_paths` on each path."""
    columns = 1 + torch.arange(paths * drafts, device=device).view(drafts, paths).T
    return torch.cat([columns.new_zeros(paths, 1), columns], 1)


class Level(NamedTuple):
    """Tests of all drafts of one sibling index above 0. They follow the tests of the previous index."""

    # index of the preceding sibling's test among the tests of the previous level, as a slice if consecutive
    within: slice | Tensor
    earlier: Tensor  # [K] column of the preceding sibling
    depth: Tensor  # [K] depth of the siblings, 1 for children of the root


class Routes:
    """Index tables of one tree on one device. C columns (tokens), T = largest depth + 1.

    Column d + 1 consumes draft d. Drafts are tested in the order of their sibling index; drafts with the same sibling
    index are tested in the order of their columns.

    Attributes:
        levels: tests by sibling index, from index 1 on.
        first_parents: parents of the first siblings, as a slice if consecutive.
        tested: [C - 1] columns in the order of the tests.
        tested_parent, tested_depth: [C - 1] parents and depths of these columns.
        test: [C - 1] position of each draft's test in this order.
        last_test: [C] position of the test of a column's last child, 0 for a leaf.
        before: [C - 1, C - 1] float32, 1 if the second draft is an earlier sibling of the first draft.
        depth: [C] depth of each column; parent: [C] its parent, 0 also for the root.
        peer: [C] index of each column among the columns of its depth. Pruning the tree does not change it.
        ancestors: [C, C] float32, 1 if the second column is the first column or an ancestor of it.
        by_rank: [C - 1, ranks] float32, 1 if the draft has this sibling index.
        route: [C, T] path through each column, by depth: its ancestors, the column, then first children. After the
            last first child it continues with the trunk's columns.
        next: [C] column at the next depth of this path; at the last depth the column itself.
        in_trunk, has_children, has_next: [C] bool.
    """

    def __init__(self, tree: Tree, device: torch.device):
        children: list[list[int]] = [[] for _ in tree.parents]
        for column, parent in enumerate(tree.parents[1:], start=1):
            children[parent].append(column)
        self.depth = torch.tensor(tree.depth, device=device)
        peers = [tree.depth[:column].count(depth) for column, depth in enumerate(tree.depth)]
        self.peer = torch.tensor(peers, device=device)
        self.ancestors = tree.ancestors.float().to(device)
        self.in_trunk = torch.tensor(tree.in_trunk, device=device)
        self.has_children = torch.tensor([bool(below) for below in children], device=device)
        self.parent = torch.tensor([0, *tree.parents[1:]], device=device)
        by_rank = [[below[rank] for below in children if len(below) > rank] for rank in range(max(map(len, children)))]
        tested = [column for level in by_rank for column in level]
        parents = [tree.parents[column] for column in tested]
        self.first_parents = _index(parents[: len(by_rank[0])] if by_rank else [], device)
        self.levels: list[Level] = []
        for before, later in pairwise(by_rank):
            siblings = {tree.parents[column]: column for column in before}
            earlier = [siblings[tree.parents[column]] for column in later]
            depth = torch.tensor([tree.depth[column] for column in later], device=device)
            within = _index([before.index(column) for column in earlier], device)
            self.levels.append(Level(within, torch.tensor(earlier, device=device), depth))
        depths = [tree.depth[column] for column in tested]
        last_test = [max((tested.index(child) for child in below), default=0) for below in children]
        ranks = [0] * len(children)
        for rank, level in enumerate(by_rank):
            for column in level:
                ranks[column] = rank
        self.tested, self.tested_parent, self.tested_depth, self.last_test, rank_of = (
            torch.tensor(numbers, dtype=torch.long, device=device)
            for numbers in (tested, parents, depths, last_test, ranks)
        )
        self.test = self.tested.argsort()
        parent, rank = self.parent[1:], rank_of[1:]
        self.before = ((parent[:, None] == parent) & (rank[:, None] > rank)).float()
        self.by_rank = (rank[:, None] == torch.arange(len(by_rank), device=device)).float()
        route = [_route(column, tree, children) for column in range(len(children))]
        self.route = torch.tensor(route, device=device)
        after = [min(depth + 1, len(route[0]) - 1) for depth in tree.depth]
        self.next = torch.tensor([way[step] for way, step in zip(route, after, strict=True)], device=device)
        self.has_next = self.depth < len(route[0]) - 1


def _index(columns: Sequence[int], device: torch.device) -> slice | Tensor:
    if not columns:
        return slice(0)
    if list(columns) == list(range(columns[0], columns[0] + len(columns))):
        return slice(columns[0], columns[0] + len(columns))
    return torch.tensor(columns, device=device)


def _route(column: int, tree: Tree, children: Sequence[Sequence[int]]) -> list[int]:
    trunk, way = [0], [column]
    while children[trunk[-1]]:
        trunk.append(children[trunk[-1]][0])
    trunk += [trunk[-1]] * (max(tree.depth) + 1 - len(trunk))
    while way[0]:
        way.insert(0, tree.parents[way[0]])
    while children[way[-1]]:
        way.append(children[way[-1]][0])
    return way + trunk[len(way) :]


@lru_cache(maxsize=256)
def routes(tree: Tree, device: torch.device) -> Routes:
    """Return the tree's tables, which are built once per device."""
    return Routes(tree, device)


@lru_cache(maxsize=256)
def first_drafts_by_depth(tree: Tree, device: torch.device) -> Tensor:
    """Return [C - 1, RECORDED_DEPTHS] float32, 1 if draft d (column d + 1) is a first child at this depth."""
    first = [parent not in tree.parents[:column] for column, parent in enumerate(tree.parents)]
    depths = [depth if is_first else 0 for depth, is_first in zip(tree.depth, first, strict=True)]
    depth = torch.tensor(depths[1:], device=device)
    return (depth[:, None] == torch.arange(1, RECORDED_DEPTHS + 1, device=device)).float()


def parse_tree(text: str) -> Tree:
    """Parse a tree from its name or from the paths of its nodes; see `node_paths`."""
    nodes = node_paths(text)
    column = {"": 0} | {path: number for number, path in enumerate(nodes, start=1)}
    return Tree((-1, *(column[path[:-1]] for path in nodes)))


@lru_cache
def pruned(tree: Tree, depth: int) -> Tree:
    """Remove the nodes deeper than `depth` from a tree whose columns are ordered by depth."""
    return Tree(tuple(parent for parent, level in zip(tree.parents, tree.depth, strict=True) if level <= depth))
