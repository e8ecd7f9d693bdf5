"""CASCADE's test against the rule written out slowly, and against the authors' function."""

import ast
import copy
import os
import random
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from specbench.decoding.cascade import CascadeEagle, CascadeLoop, pairs_of
from specbench.decoding.draft_tree import parse_tree, routes
from specbench.decoding.interfaces import Context, Proposal
from specbench.decoding.verification.ratio_tests import standard
from specbench.models.interface import TokenLayout

V, WIDTH, TREE = 12, 6, "0 1 2 00 01 10 11 20 000 001 010 100 101 110"
SOURCE = Path(os.environ.get("CASCADE_FOLDER", ""), "models", "ea_model_lumina_mgpt.py")
PARTS = {"safe_topk_cosine_similarity", "compute_confidence_gate", "pad_path", "generate_tree_buffers"}
CPU = torch.device("cpu")


def a_step(rng: np.random.Generator):
    """p, states and a proposal of a single row, and a coin per column."""
    tree = parse_tree(TREE)
    count = len(tree.parents)
    p = torch.from_numpy(rng.dirichlet(np.full(V, 1.0), (1, count))).float()
    q = torch.from_numpy(rng.dirichlet(np.full(V, 0.8), (1, count))).float()
    states = torch.from_numpy(rng.normal(size=(1, count, WIDTH)) * 0.3).float()
    tokens = torch.zeros(1, count, dtype=torch.long)
    for parent in set(tree.parents[1:]):
        children = [c for c, above in enumerate(tree.parents) if above == parent]
        tokens[0, children] = torch.from_numpy(rng.permutation(V)[: len(children)])
    return p, states, Proposal(tokens, torch.tensor(tree.depth)[None], q, tree, count), rng.random(count)


def slowly(p, states, proposal, coin, pairs, mass=0.8, parent_cosine=0.9, pair_cosine=0.5) -> list[int]:
    """Columns of the accepted drafts."""
    tree, tokens, q = proposal.tree, proposal.tokens[0].tolist(), proposal.q[0].double()
    level = [[c for c, depth in enumerate(tree.depth) if depth == d] for d in range(max(tree.depth) + 2)]
    parents = [[c for c in columns if c in tree.parents] for columns in level]
    states, here, accepted = states[0].double().softmax(-1), 0, []
    while children := [c for c, parent in enumerate(tree.parents) if parent == here and c]:
        left, proposed = p[0, here].double(), q[here].clone()
        for child in children:
            x, r, depth = tokens[child], coin[child], tree.depth[child]
            boosted = left[x]
            ranked = sorted(left.tolist(), reverse=True)
            least = next(one for n, one in enumerate(ranked) if sum(ranked[: n + 1]) >= mass)
            if left[x] >= least:
                if depth > 1:
                    cosine = torch.cosine_similarity(states[here], states[tree.parents[here]], -1)
                    boosted = boosted + r * cosine * (cosine > parent_cosine)
                rows = parents[depth + (pairs == "released")]
                nodes = [level[depth][0] + n for n in range(len(rows))] if pairs == "released" else rows
                for node, row in zip(nodes, rows, strict=True):
                    if child in nodes and node != child:
                        cosine = torch.cosine_similarity(q[row], q[rows[nodes.index(child)]], -1)
                        boosted = boosted + r * left[tokens[node]] * (cosine > pair_cosine)
            if r * proposed[x] <= max(left[x], min(boosted, proposed[x])):
                accepted.append(child)
                here = child
                break
            left = (left - proposed).clamp(min=0)
            left, proposed[x] = left / left.sum(), 0
            proposed = proposed / proposed.sum()
        else:
            break
    return accepted


def judged(p, states, proposal, coin, pairs: str) -> list[int]:
    """Columns that the loop accepts with these coins."""
    context = Context(TokenLayout.plain(1, 40, V), None, CPU, standard)
    loop, drafter = object.__new__(CascadeLoop), object.__new__(CascadeEagle)
    drafter.context, drafter.mass, drafter.parent_cosine, drafter.pair_cosine = context, 0.8, 0.9, 0.5
    loop._drafter, loop.session = drafter, SimpleNamespace(features=torch.cat([states, -states]))
    loop._noise = SimpleNamespace(
        uniform=lambda *_: torch.from_numpy(coin)[None], run_race=lambda weights, *_: weights.argmax(-1)
    )
    loop._length, loop._verifier, loop._refinement = 40, None, SimpleNamespace(keeps_tail=False)
    loop._order = routes(proposal.tree, CPU)
    loop._pairs = pairs_of(proposal.tree, pairs == "released", CPU)
    seen = loop._judged(p, proposal, loop._order, torch.ones(1, 1, dtype=torch.long))
    return seen.columns[0, 1 : 1 + int(seen.first)].tolist()


@pytest.mark.parametrize("pairs", ["released", "level"])
def test_drafts_are_accepted_by_the_rule_written_out_slowly(pairs):
    rng, exact, lengths = np.random.default_rng(0), 0, set()
    for _ in range(250):
        step = a_step(rng)
        accepted = judged(*step, pairs)
        assert accepted == slowly(*step, pairs)
        exact += accepted == slowly(*step, pairs, parent_cosine=1.0, pair_cosine=1.0)
        lengths.add(len(accepted))
    assert lengths == {0, 1, 2, 3} and 100 < exact < 240


def authors():
    """Their functions, without the imports that need their models."""
    tree = ast.parse(SOURCE.read_text())
    method = next(n for n in ast.walk(tree) if isinstance(n, ast.FunctionDef) and n.name == "evaluate_posterior")
    kept = [n for n in tree.body if isinstance(n, ast.FunctionDef) and n.name in PARTS]
    names = {"torch": torch, "F": torch.nn.functional, "copy": copy, "random": random, "TOPK": 10}
    names |= {"List": list}
    exec(compile(ast.Module([*kept, method], []), str(SOURCE), "exec"), names)
    return SimpleNamespace(**names)


@pytest.mark.skipif(not SOURCE.is_file(), reason="CASCADE_FOLDER names no checkout of its code at 8c40c9c")
def test_the_authors_function_accepts_the_same_drafts(monkeypatch):
    code, rng, tree = authors(), np.random.default_rng(1), parse_tree(TREE)
    buffers = code.generate_tree_buffers([[int(d) for d in path] for path in TREE.split()], "cpu")
    paths = buffers["retrieve_indices"]
    itself = SimpleNamespace(eagle_version=1, image_tokens=set(range(V)), image_syntax_tokens=set())
    levels = [[c for c, d in enumerate(tree.depth) if d == depth and c in tree.parents] for depth in range(4)]
    for _ in range(200):
        p, states, proposal, coin = a_step(rng)
        tokens, q = proposal.tokens[0], proposal.q[0]
        candidates = torch.where(paths >= 0, tokens[paths], -1)
        probability = torch.ones(len(tree.parents))
        for c, parent in enumerate(tree.parents):
            if c:
                before = [tokens[s] for s in range(c) if tree.parents[s] == parent]
                probability[c] = q[parent, tokens[c]] / (1 - q[parent, before].sum())
        alike = [[] for _ in range(4)]
        for depth in range(1, 4):
            cosine = torch.nn.functional.normalize(q[levels[depth]], dim=-1)
            near = torch.nonzero((cosine @ cosine.T) > 0.5).tolist() if levels[depth] else []
            alike[depth - 1] = [(r, c, None, True) for r, c in near if r != c]
        by_level = [q[levels[depth]] for depth in range(4)]
        accepted, here, tests = slowly(p, states, proposal, coin, "released"), 0, []
        for column in [*accepted, None]:
            for child in (c for c, parent in enumerate(tree.parents) if parent == here and c):
                tests.append(coin[child])
                if child == column:
                    break
            here = column
        monkeypatch.setattr(random, "random", iter(tests).__next__)
        best, count, _ = code.evaluate_posterior(
            itself,
            alike,
            buffers["per_level_node_counts"],
            p[0].log()[paths],
            (None, None, by_level),
            states[0][paths],
            paths,
            candidates,
            torch.where(paths >= 0, probability[paths], 1.0),
            by_level,
            buffers["p_indices"],
            tokens[None],
            buffers["b_indices"],
        )
        assert paths[best, 1 : 1 + count].tolist() == accepted
