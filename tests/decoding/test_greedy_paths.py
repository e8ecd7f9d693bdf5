"""The best of several independent paths: its choice and its distribution against an enumeration of all paths. Several
Jacobi windows of which the longest accepted is committed: the rule's distribution. It concerns several modules:
greedy_paths and path_jacobi."""

import itertools
from functools import cmp_to_key, partial

import numpy as np
import pytest
import torch
from scipy.stats import chisquare

from specbench.checks.audit_settings import AuditSetting
from specbench.checks.divergence import AUDIT_LEVEL, p_value
from specbench.checks.enumerable_model import EnumerableModel, EnumerableTransformer, joint
from specbench.checks.losslessness import observe, stream_tokens
from specbench.decoding.greedy_paths import best_path, best_path_q
from specbench.decoding.loop import decode
from specbench.decoding.path_jacobi import longest_path
from specbench.models.interface import TokenLayout
from specbench.prompts import Request
from specbench.specs.presets import resolve
from specbench.specs.run_spec import Sampling

VOCAB, DRAFTS = 3, 3


def conditionals(seed):
    """Random p and q of every prefix, some with ties and with tokens of probability 0."""
    draw = np.random.default_rng(seed)
    tables = {}
    for depth in range(DRAFTS):
        for prefix in itertools.product(range(VOCAB), repeat=depth):
            p, q = draw.dirichlet(np.ones(VOCAB), 2)
            if draw.random() < 0.3:
                p = np.array([0.0, 0.0, 1.0])
            if draw.random() < 0.3:
                q = np.array([0.0, 0.6, 0.4])
            tables[prefix] = p, q
    return tables


def slow_order(tables, path, other):
    """Negative if `path` is the better path: at the first token in which they differ, by p/q, then by id."""
    for depth, (a, b) in enumerate(zip(path, other, strict=True)):
        if a != b:
            p, q = tables[path[:depth]]
            ratios = [p[token] / q[token] if q[token] else -1 for token in (a, b)]
            return ratios[1] - ratios[0] or a - b
    return 0


def along(tables, path):
    return [np.stack([tables[path[:depth]][which] for depth in range(DRAFTS)]) for which in (0, 1)]


@pytest.mark.parametrize("paths", [1, 2, 3])
def test_the_best_path_has_the_recorded_distribution(paths):
    for seed in range(3):
        tables = conditionals(seed)
        drawn = list(itertools.product(range(VOCAB), repeat=DRAFTS))
        mass = {path: np.prod([tables[path[:i]][1][token] for i, token in enumerate(path)]) for path in drawn}
        drawn = [path for path in drawn if mass[path]]
        expected = dict.fromkeys(drawn, 0.0)
        key = cmp_to_key(partial(slow_order, tables))
        for chosen in itertools.product(drawn, repeat=paths):
            expected[min(chosen, key=key)] += np.prod([mass[path] for path in chosen])
        for path in drawn:
            p, q = (torch.from_numpy(x)[None] for x in along(tables, path))
            best_q = best_path_q(p, q, torch.tensor(path)[None], paths)[0].numpy()
            np.testing.assert_allclose(best_q.sum(1), 1, atol=1e-12)
            assert abs(np.prod(best_q[np.arange(DRAFTS), path]) - expected[path]) < 1e-12


def test_the_first_path_in_order_is_chosen():
    tables, draw = conditionals(1), np.random.default_rng(0)
    for _ in range(300):
        paths = []
        while len(paths) < 4:
            path = tuple(int(token) for token in draw.integers(0, VOCAB, DRAFTS))
            if all(tables[path[:i]][1][token] for i, token in enumerate(path)):
                paths.append(path)
        ratio = [
            [along(tables, path)[0][i][t] / along(tables, path)[1][i][t] for i, t in enumerate(path)] for path in paths
        ]
        chosen = best_path(torch.tensor(ratio, dtype=torch.float64)[None], torch.tensor(paths)[None])
        assert all(slow_order(tables, paths[int(chosen)], other) <= 0 for other in paths)


def test_small_probabilities_leave_a_distribution():
    q = torch.full((1, 40, 4), 1e-9, dtype=torch.float64)
    q[..., 0] = 1 - 3e-9
    best_q = best_path_q(torch.full_like(q, 0.25), q, torch.full((1, 40), 3), 3)
    torch.testing.assert_close(best_q.sum(-1), torch.ones(1, 40, dtype=torch.float64))


@pytest.mark.parametrize("verifier", ["block", "exact"])
def test_long_images_keep_their_joint_distribution(verifier):
    for layout, window in ((TokenLayout.plain(3, 4, 2), 3), (TokenLayout.with_row_ends(2, 4, 3), 4)):
        setting = AuditSetting(f"{layout.length} slots, window {window}", layout, Sampling(2.0), window=window)
        counts = observe(setting, resolve("eagle-gbv", {"verifier": verifier}), 8_000, seed=0)
        assert p_value(counts) > AUDIT_LEVEL


@pytest.mark.parametrize("name", ["eagle-gbv", "pathexplore", "sjd-pac-released"])
def test_the_path_kept_in_the_cache_is_the_one_committed(name):
    """Each recorded probability equals a teacher-forced forward over the finished image."""
    model = EnumerableTransformer(TokenLayout.with_row_ends(3, 4, 5), ("a", "bb"))
    requests = [Request(text, text, sample) for sample in range(20) for text in model.prompts]
    images = decode(model, requests, resolve(name, {"window": 4}), Sampling(2.0), 0, render=False)
    assert max(image.accepted.sum() for image in images) > 2
    session = model.begin(model.encode([request.text for request in requests]), 2.0, model.layout.length)
    tokens = torch.from_numpy(np.stack([image.tokens for image in images])).long()
    slots = torch.arange(model.layout.length).expand_as(tokens)
    logits = session.forward(torch.cat([tokens[:, :1], tokens[:, :-1]], 1), slots)
    logp = logits.log_softmax(-1).gather(-1, tokens.clamp(max=4)[..., None])[..., 0].numpy()
    free = ~images[0].forced
    np.testing.assert_allclose(np.stack([image.logp for image in images])[:, free], logp[:, free], atol=1e-3)


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
    each path. If a path accepts, its second token is drawn from p; if none does, each path has refined a draft of the
    second token as if its first token were final."""
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


def test_of_paths_with_as_many_accepted_drafts_the_first_is_taken():
    assert longest_path(torch.tensor([[1, 3, 3], [2, 2, 1]])).tolist() == [1, 0]
