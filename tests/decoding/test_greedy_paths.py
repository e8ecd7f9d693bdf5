"""The best of several independent paths: its choice and its distribution against an enumeration of all paths."""

import itertools
from functools import cmp_to_key, partial

import numpy as np
import pytest
import torch
from teacher_forced import assert_recorded_as_teacher_forced

from specbench.checks.audit_settings import AuditSetting
from specbench.checks.divergence import AUDIT_LEVEL, p_value
from specbench.checks.losslessness import observe
from specbench.decoding.greedy_paths import best_path, best_path_q, columns_by_path, independent_paths
from specbench.models.interface import TokenLayout
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
    p = torch.full_like(q, 0.25)
    best_q = best_path_q(p, q, torch.full((1, 40), 3), 3)
    torch.testing.assert_close(best_q.sum(-1), torch.ones(1, 40, dtype=torch.float64))


def test_the_columns_of_a_path_follow_each_other():
    for paths, drafts in ((3, 4), (1, 3), (2, 1)):
        tree, columns = independent_paths(paths, drafts), columns_by_path(paths, drafts, torch.device("cpu"))
        assert [[tree.parents[column] for column in path[1:]] for path in columns] == [
            path[:-1].tolist() for path in columns
        ]
        assert sorted(columns[:, 1:].flatten().tolist()) == list(range(1, len(tree.parents)))
    assert independent_paths(3, 0).parents == (-1,)


@pytest.mark.parametrize("verifier", ["block", "exact"])
def test_long_images_keep_their_joint_distribution(verifier):
    for layout, window in ((TokenLayout.plain(3, 4, 2), 3), (TokenLayout.with_row_ends(2, 4, 3), 4)):
        setting = AuditSetting(f"{layout.length} slots, window {window}", layout, Sampling(2.0), window=window)
        counts = observe(setting, resolve("eagle-gbv", {"verifier": verifier}), 8_000, seed=0)
        assert p_value(counts) > AUDIT_LEVEL


def test_the_path_kept_in_the_cache_is_the_one_verified():
    assert_recorded_as_teacher_forced(resolve("eagle-gbv", {"window": 4}))
