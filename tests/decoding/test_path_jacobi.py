"""Several Jacobi windows, the longest accepted one committed: the rule's distribution, the tree's paths, the cache."""

import itertools

import numpy as np
import pytest
import torch
from scipy.stats import chisquare

from specbench.checks.audit_settings import AuditSetting
from specbench.checks.divergence import AUDIT_LEVEL
from specbench.checks.enumerable_model import EnumerableModel, joint
from specbench.checks.enumerable_transformer import EnumerableTransformer
from specbench.checks.losslessness import stream_tokens
from specbench.decoding.loop import decode
from specbench.decoding.path_jacobi import longest_path, path_columns, path_tree
from specbench.models.interface import TokenLayout
from specbench.prompts import Request
from specbench.specs.presets import resolve
from specbench.specs.run_spec import Sampling

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
    each path. Where a path accepts, its second token is drawn from p; where none does, each has refined a draft of
    the second token as if its own first one were final.
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
    assert [[tree.parents[column] for column in own[1:]] for own in columns] == [own[:-1].tolist() for own in columns]
    assert columns[:, 0].tolist() == [0, 0, 0] and sorted(columns[:, 1:].flatten().tolist()) == list(range(1, 13))
    assert longest_path(torch.tensor([[1, 3, 3], [2, 2, 1]])).tolist() == [1, 0]


def test_a_path_kept_in_the_cache_is_the_one_committed():
    """The probability recorded for each token is that of a teacher-forced forward over the finished image."""
    model = EnumerableTransformer(TokenLayout.with_row_ends(3, 4, 5), ("a", "bb"))
    requests = [Request(text, text, sample) for sample in range(20) for text in model.prompts]
    images = decode(model, requests, resolve("pathexplore", {"window": 4}), Sampling(2.0), 0, render=False)
    assert max(image.accepted.sum() for image in images) > 2
    session = model.begin(model.encode([request.text for request in requests]), 2.0, model.layout.length)
    tokens = torch.from_numpy(np.stack([image.tokens for image in images])).long()
    slots = torch.arange(model.layout.length).expand_as(tokens)
    logits = session.forward(torch.cat([tokens[:, :1], tokens[:, :-1]], 1), slots)
    logp = logits.log_softmax(-1).gather(-1, tokens.clamp(max=4)[..., None])[..., 0].numpy()
    free = ~images[0].forced
    np.testing.assert_allclose(np.stack([image.logp for image in images])[:, free], logp[:, free], atol=1e-3)
