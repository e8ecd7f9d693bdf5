"""Static trees of drafts, and the tables that let verification walk one without asking the host."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from typing import NamedTuple

import torch
from torch import Tensor

from specbench.models.interface import Tree
from specbench.specs.tree_paths import node_paths

DEPTHS = 8
"""Depths of a draft for which its distance to the target is kept apart."""


@lru_cache
def chain(columns: int) -> Tree:
    """The root and `columns - 1` drafts in a row."""
    return Tree(tuple(range(-1, columns - 1)))


class Level(NamedTuple):
    """The tests of one sibling rank: the `children` with that rank, and their parents, one each.

    Attributes:
        parents, children: columns, as a slice where they are consecutive.
        depth: [K] depth of the children, 1 for those of the root.
        within: [K] place of each parent among the previous rank's parents.
    """

    parents: slice | Tensor
    children: slice | Tensor
    depth: Tensor
    within: Tensor


class Routes:
    """Tables of one tree on one device. C columns, T = depth of the deepest column + 1.

    Attributes:
        levels: the tests by sibling rank, eldest first.
        depth: [C] of each column; rank: [C] of each among its siblings; parent: [C], 0 for the root too.
        peer: [C] number of each among the columns of its depth, which a narrower window does not change.
        ancestors: [C, C] float32, 1 where the second column is the first one or above it.
        by_depth: [C, DEPTHS] float32, 1 where a column has that depth, counted from 1.
        last_rank: [C] rank of a column's youngest child, -1 for a leaf.
        place: [C] place of a column among the parents of its youngest child's level, 0 for a leaf.
        route: [C, T] the columns by depth on the way to a column and, from there, along first children; where those
            end, along the trunk.
        next: [C] the column after it on its route, itself where the route ends.
        in_trunk, has_children, has_next: [C] bool.
    """

    def __init__(self, tree: Tree, device: torch.device):
        children: list[list[int]] = [[] for _ in tree.parents]
        for column, parent in enumerate(tree.parents[1:], start=1):
            children[parent].append(column)
        self.is_chain = tree.parents == chain(len(tree.parents)).parents
        self.depth = torch.tensor(tree.depth, device=device)
        peers = [tree.depth[:column].count(depth) for column, depth in enumerate(tree.depth)]
        self.peer = torch.tensor(peers, device=device)
        self.ancestors = tree.ancestors.float().to(device)
        self.in_trunk = torch.tensor(tree.in_trunk, device=device)
        self.has_children = torch.tensor([bool(own) for own in children], device=device)
        self.last_rank = torch.tensor([len(own) - 1 for own in children], device=device)
        self.parent = torch.tensor([0, *tree.parents[1:]], device=device)
        self.rank = torch.zeros_like(self.depth)
        self.place = torch.zeros_like(self.depth)
        self.levels: list[Level] = []
        before: list[int] = []
        for rank in range(max(map(len, children))):
            parents = [column for column, own in enumerate(children) if len(own) > rank]
            own = [children[parent][rank] for parent in parents]
            within = [before.index(parent) if rank else 0 for parent in parents]
            self.rank[own] = rank
            self.place[parents] = torch.arange(len(parents), device=device)
            places = torch.tensor(within, device=device)
            self.levels.append(Level(_index(parents, device), _index(own, device), self.depth[own], places))
            before = parents
        self.by_depth = (self.depth[:, None] == torch.arange(1, DEPTHS + 1, device=device)).float()
        route = [_route(column, tree, children) for column in range(len(children))]
        self.route = torch.tensor(route, device=device)
        after = [min(depth + 1, len(route[0]) - 1) for depth in tree.depth]
        self.next = torch.tensor([way[step] for way, step in zip(route, after, strict=True)], device=device)
        self.has_next = self.depth < len(route[0]) - 1


def _index(columns: Sequence[int], device: torch.device) -> slice | Tensor:
    if list(columns) == list(range(columns[0], columns[0] + len(columns))):
        return slice(columns[0], columns[0] + len(columns))
    return torch.tensor(columns, device=device)


def _route(column: int, tree: Tree, children: Sequence[Sequence[int]]) -> list[int]:
    trunk, way = [0], []
    while children[trunk[-1]]:
        trunk.append(children[trunk[-1]][0])
    trunk += [trunk[-1]] * (max(tree.depth) + 1 - len(trunk))
    step = column
    while step >= 0:
        way.insert(0, step)
        step = tree.parents[step]
    while children[way[-1]]:
        way.append(children[way[-1]][0])
    return way + trunk[len(way) :]


@lru_cache(maxsize=256)
def routes(tree: Tree, device: torch.device) -> Routes:
    """The tree's tables, made once."""
    return Routes(tree, device)


def parse_tree(text: str) -> Tree:
    """A tree by name or from its nodes' paths, as `node_paths` reads them."""
    nodes = node_paths(text)
    column = {"": 0} | {path: number for number, path in enumerate(nodes, start=1)}
    return Tree((-1, *(column[path[:-1]] for path in nodes)))


@lru_cache
def pruned(tree: Tree, depth: int) -> Tree:
    """The tree without nodes deeper than `depth`; its columns must be ordered by depth."""
    return Tree(tuple(parent for parent, own in zip(tree.parents, tree.depth, strict=True) if own <= depth))
