"""SJD-PAC as released: the tree, deviations of its images from the model's distribution, and the authors' sampler.
SJD_PAC_FOLDER names a checkout of KangJialiang/SJD-PAC at 4fbc099; its sampler and tree are read from there."""

import ast
import functools
import os
from pathlib import Path

import numpy as np
import pytest
import torch
from scipy.stats import chi2_contingency, chisquare

from specbench.checks.audit_settings import AuditSetting
from specbench.checks.divergence import AUDIT_LEVEL
from specbench.checks.enumerable_model import EnumerableModel, joint
from specbench.checks.losslessness import stream_tokens
from specbench.decoding.build import build
from specbench.decoding.interfaces import Proposal
from specbench.decoding.kary_jacobi import KaryLoop, child_numbers, kary_tree
from specbench.decoding.noise import Noise
from specbench.decoding.sampling import Target
from specbench.models.interface import TokenLayout
from specbench.prompts import Request
from specbench.specs.components import columns_fed
from specbench.specs.presets import resolve

EIGHT = AuditSetting("1x4 of 8, window wider than the image", TokenLayout.plain(1, 4, 8), window=8)
LONG = AuditSetting("1x8 of 2, window 2", TokenLayout.plain(1, 8, 2), window=2)
SOURCE = Path(os.environ.get("SJD_PAC_FOLDER", ""), "scheduler", "sjd_pac_iteration_lumina_mgpt.py")
PARTS = {"SJDPACSpeculativeSampler", "generate_tree_mask_and_retrieve", "setup_speculative_tree_buffers"}


def images(setting: AuditSetting, count: int, tables: int, **options: int) -> tuple[np.ndarray, EnumerableModel]:
    model = EnumerableModel(setting.layout, ("",), seed=tables)
    requests = [Request("", "prompt", sample) for sample in range(count)]
    return stream_tokens(model, requests, resolve("sjd-pac-released", options), setting, 0), model


def counted(tokens: np.ndarray, length: int, vocab: int) -> np.ndarray:
    """How often each beginning of `length` tokens was seen."""
    return np.bincount(tokens[:, :length] @ vocab ** np.arange(length)[::-1], minlength=vocab**length)


def p_values(tokens: np.ndarray, model: EnumerableModel) -> list[float]:
    """P-values of the first one, two and three tokens against the exact joint distribution; cells expected less than
    five times are merged."""
    values, vocab, exact = [], model.layout.v_image, joint(model, EIGHT.sampling)
    for length in range(1, 4):
        seen, expected = counted(tokens, length, vocab), len(tokens) * exact.reshape(vocab**length, -1).sum(1)
        rare = expected < 5
        seen, expected = (np.append(part[~rare], part[rare].sum() + 1e-9) for part in (seen, expected))
        values.append(chisquare(seen, expected).pvalue)
    return values


def deviate(tokens: np.ndarray, model: EnumerableModel) -> list[bool]:
    return [value < AUDIT_LEVEL for value in p_values(tokens, model)]


CASES = [
    (1, 2, EIGHT, 0, [False, False, False]),
    (2, 2, EIGHT, 0, [False, True, True]),
    (3, 3, EIGHT, 0, [True, True, True]),
]
"""Levels, K, model with the seed of its tables, and whether the first one, two and three tokens deviate."""


@pytest.mark.parametrize(
    ("levels", "siblings", "setting", "tables", "expected"),
    [*CASES, (1, 3, LONG, 5, [False, True, True])],  # the uniform bonus biases even the chain of a longer image
)
def test_a_chain_is_exact_and_each_level_of_the_tree_is_biased_one_token_earlier(
    levels, siblings, setting, tables, expected
):
    tokens, model = images(setting, 12_000, tables, levels=levels, siblings=siblings)
    assert deviate(tokens, model) == expected, p_values(tokens, model)


@pytest.mark.parametrize("order", ["ab", "ba"])
def test_the_longest_path_makes_a_token_of_probability_0_6_certain(order):
    """p is (.6, .4, 0), the siblings a and b come from q (.5, .5, 0). Both drafts of the next slot pass after a, none
    after b. So a is committed even if b, which is tested first, has passed."""
    model = EnumerableModel(TokenLayout.plain(1, 8, 3))
    drafter = build(resolve("sjd-pac-released", {"window": 3, "siblings": 2}), model).drafter
    tree, rows = drafter.tree, 500
    child = torch.tensor(["ab".index(order[number]) for number in child_numbers(tree)])
    q = torch.tensor([0.5, 0.5, 0.0]).expand(rows, len(tree.parents), 3)
    p = torch.tensor([[0.5, 0.5, 0.0], [0.0, 0.0, 1.0]])[child].clone()
    p[0] = torch.tensor([0.6, 0.4, 0.0])
    loop = object.__new__(KaryLoop)
    loop._drafter, loop._noise, loop._length = drafter, Noise(range(rows), 3), 8
    loop.committed, loop.steps = torch.zeros(rows, dtype=torch.long), torch.full((rows, 1), 2)
    loop._target = Target(model.layout, EIGHT.sampling, model.device)
    slots = torch.tensor(tree.depth).expand(rows, -1)
    verified, _ = loop._verified(
        p.expand(rows, -1, -1), Proposal(child.expand(rows, -1), slots, q, tree, drafter.columns)
    )
    assert (verified.tokens[:, 0] == 0).all() and (verified.first == 2).all()


@pytest.mark.parametrize(("window", "siblings", "levels"), [(54, 3, 3), (46, 4, 3), (5, 2, 4), (2, 3, 3), (4, 1, 2)])
def test_the_tree_has_the_nodes_that_memory_is_planned_for_and_all_paths(window, siblings, levels):
    spec = resolve("sjd-pac-released", {"window": window, "siblings": siblings, "levels": levels})
    tree, levels = kary_tree(window, siblings, min(levels, window)), min(levels, window)
    assert columns_fed(spec.options) == len(tree.parents)
    assert [tree.depth.count(level) for level in range(levels)] == [siblings**level for level in range(levels)]
    assert len(tree.parents) == 64 or window < 46


@functools.cache
def authors() -> dict:
    """The authors' sampler and tree functions."""
    names = {"torch": torch}
    parts = [node for node in ast.parse(SOURCE.read_text()).body if getattr(node, "name", "") in PARTS]
    exec(compile(ast.Module(parts, []), str(SOURCE), "exec"), names)
    return names


def authors_sampler(levels: int, siblings: int):
    code = authors()
    sampler = code["SJDPACSpeculativeSampler"](torch.Generator().manual_seed(0))
    code["setup_speculative_tree_buffers"](sampler, siblings, levels, "cpu")
    sampler.img_start, sampler.img_end, sampler.uni_val = 0, 3, 1 / 3
    torch.manual_seed(1)
    return sampler


def authors_images(model: EnumerableModel, levels: int, siblings: int, nodes: int, count: int) -> np.ndarray:
    """Images of the authors' sampler, in a loop like theirs: `nodes` per forward, ids from 0, no grammar."""
    code, vocab, length = authors(), model.layout.v_image, model.layout.length
    _, paths, from_tree = code["generate_tree_mask_and_retrieve"](nodes, siblings, levels)
    sampler = authors_sampler(levels, siblings)
    sampler.img_end, sampler.uni_val = vocab, 1 / vocab

    @functools.cache
    def target(prefix: tuple[int, ...]) -> torch.Tensor:
        if len(prefix) >= length:
            return torch.full((vocab,), 1 / vocab)
        number = np.array([sum(token * model.layout.vocab**slot for slot, token in enumerate(prefix))])
        return torch.from_numpy(model.guided("", len(prefix), number, 1.0))[0].float().softmax(0)

    def decoded() -> list[int]:
        image, fed = [], torch.randint(0, vocab, (nodes,))
        q = torch.full((1, paths.shape[1], vocab), 1 / vocab)
        while len(image) < length:
            drafts = torch.cat([fed, torch.tensor([-1])])[paths]
            p = torch.stack([
                torch.stack([target((*image, *row[1 : column + 1])) if min(row[1 : column + 1], default=0) >= 0
                             else target(tuple(range(length))) for column in range(len(row))])
                for row in drafts.tolist()
            ])  # fmt: skip
            accepted, row, drawn, q = sampler(drafts, q, p)
            image += [*drafts[row, 1:accepted].tolist(), int(drawn[0, 0])]
            fed = drawn.flatten()[from_tree]
        return image[:length]

    return np.array([decoded() for _ in range(count)])


needs_authors = pytest.mark.skipif(
    not SOURCE.is_file(), reason="SJD_PAC_FOLDER names no checkout of KangJialiang/SJD-PAC at 4fbc099"
)


@needs_authors
@pytest.mark.parametrize("drafts", [(0, 1), (1, 0)])
def test_the_authors_sampler_makes_a_token_of_probability_0_6_certain(drafts):
    """The example above, and the draft of the chain that its code needs. Rows are paths, padded with -1."""
    sampler, third = authors_sampler(3, 2), torch.full((4, 2, 3), 1 / 3)
    after = torch.tensor([[0.5, 0.5, 0.0], [0.0, 0.0, 1.0]])
    paths = torch.tensor([[first, second] for first in drafts for second in drafts])
    p = torch.cat([torch.stack([torch.tensor([0.6, 0.4, 0.0]).expand(4, 3), after[paths[:, 0]]], 1), third], 1)
    q = torch.cat([torch.tensor([0.5, 0.5, 0.0]).expand(1, 3, 3), third[:1, :1]], 1)
    fed = torch.cat([torch.zeros(4, 1), paths, torch.tensor([[0], [-1], [-1], [-1]])], 1).long()
    outcomes = [sampler(fed, q.clone(), p.clone()) for _ in range(200)]
    assert {fed[row, 1].item() for _, row, *_ in outcomes} == {0} and min(outcome[0] for outcome in outcomes) >= 3


@needs_authors
@pytest.mark.slow
@pytest.mark.parametrize(("levels", "siblings", "setting", "tables", "expected"), [*CASES, (3, 2, EIGHT, 0, None)])
def test_the_authors_sampler_deviates_from_the_model_as_the_preset_does(levels, siblings, setting, tables, expected):
    ours, model = images(setting, 12_000, tables, levels=levels, siblings=siblings)
    nodes = columns_fed({"window": 8, "levels": levels, "siblings": siblings})
    theirs = authors_images(model, levels, siblings, nodes, 4000)
    both = [np.stack([counted(tokens, length, 8) for tokens in (ours, theirs)]) for length in (1, 2, 3)]
    alike = [chi2_contingency(counts[:, counts.sum(0) > 30]).pvalue for counts in both]
    print(f"{levels} levels, K = {siblings}: p of 1 to 3 tokens {p_values(theirs, model)}; ours and theirs {alike}")
    assert (expected is None or deviate(theirs, model) == expected) and min(alike) > AUDIT_LEVEL
