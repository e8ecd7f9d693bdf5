"""Several Jacobi windows, committing the longest accepted: the rule's distribution, the tree's paths, the cache."""

import itertools

import numpy as np
import pytest
import torch
from scipy.stats import chisquare
from teacher_forced import assert_recorded_as_teacher_forced

from specbench.checks.audit_settings import AuditSetting
from specbench.checks.divergence import AUDIT_LEVEL
from specbench.checks.enumerable_model import EnumerableModel, joint
from specbench.checks.losslessness import stream_tokens
from specbench.decoding.path_jacobi import longest_path, path_columns, path_tree
from specbench.models.interface import TokenLayout
from specbench.prompts import Request
from specbench.specs.presets import resolve

IMAGES = 40_000
TWO = AuditSetting("1x2 of 3, window 2", TokenLayout.plain(1, 2, 3), window=2)


def first_accepted(p: np.ndarray, q: np.ndarray) -> np.ndarray:
    """Distribution [V] of a slot whose drafts have the distributions q [K, V]: the first accepted draft, else the first
    path's replacement."""
    kept = np.minimum(p, q)
    rejected = np.cumprod([1, *(1 - kept.sum(1))])
    rest = p - kept[0]
    return rejected[:-1] @ kept + rejected[-1] * rest / max(rest.sum(), 1e-30)


def two_token_distribution(p: np.ndarray, paths: int) -> np.ndarray:
    """Joint distribution [V, V] of an image of two tokens, p [V, V], with one uniform draft of the first, q one-hot, on
    each path. If a path accepts, its second token is drawn from p; if none does, each path has refined a draft of
    the second token as if its first token were final.
    """
    first, second = p.sum(1), p / p.sum(1, keepdims=True)
    exact = np.zeros_like(p)
    for drafts in itertools.product(range(3), repeat=paths):
        left = 3.0**-paths
        for draft in drafts:
            exact[draft] += left * first[draft] * second[draft]
            left *= 1 - first[draft]
        rest = np.where(np.arange(3) == drafts[0], 0, first)
        for token, mass in enumerate(left * rest / rest.sum()):
            exact[token] += mass * first_accepted(second[token], second[list(drafts)])
    return exact


@pytest.mark.parametrize("paths", [1, 2, 3])
def test_tokens_follow_the_law_of_the_rule(paths):
    model = EnumerableModel(TWO.layout, ("",), seed=5)
    requests = [Request("", "prompt", sample) for sample in range(IMAGES)]
    tokens = stream_tokens(model, requests, resolve("pathexplore", {"paths": paths}), TWO, 0)
    seen, p = np.bincount(tokens @ [3, 1], minlength=9), joint(model, TWO.sampling)
    assert chisquare(seen, IMAGES * two_token_distribution(p.reshape(3, 3), paths).ravel()).pvalue > AUDIT_LEVEL
    assert (chisquare(seen, IMAGES * p).pvalue > AUDIT_LEVEL) == (paths == 1)


def test_the_paths_of_a_tree_are_chains_from_its_root():
    tree, columns = path_tree(3, 4), path_columns(3, 4, torch.device("cpu"))
    assert [[tree.parents[column] for column in path[1:]] for path in columns] == [
        path[:-1].tolist() for path in columns
    ]
    assert columns[:, 0].tolist() == [0, 0, 0] and sorted(columns[:, 1:].flatten().tolist()) == list(range(1, 13))
    assert longest_path(torch.tensor([[1, 3, 3], [2, 2, 1]])).tolist() == [1, 0]


def test_a_path_kept_in_the_cache_is_the_one_committed():
    assert_recorded_as_teacher_forced(resolve("pathexplore", {"window": 4}))
