"""SJD-SV's runs against the rule written out slowly."""

import math

import numpy as np
import pytest
import torch

from specbench.decoding.interfaces import Context
from specbench.decoding.verification.ratio_tests import DraftTests, standard
from specbench.decoding.verification.runs import ExactRuns, GroupedRuns, LanternRuns
from specbench.errors import SpecbenchError
from specbench.models.interface import TokenLayout
from specbench.specs.presets import resolve

V, WINDOW, LENGTH = 6, 9, 40
CONTEXT = Context(TokenLayout.plain(1, LENGTH, V), torch.randn(V, 2), torch.device("cpu"), standard)
READINGS = {"alpha": 0.8, "last": 0, "retest": True, "coins": "one", "before": "accepted"}
CHOICES = [
    {},
    {"alpha": 1.0},
    {"alpha": 0.5, "coins": "fresh"},
    {"last": 1},
    {"last": 2},
    {"retest": False},
    {"before": "tested"},
]


def slowly(t, ratio, coin, alpha, last, retest, coins, before) -> int:
    """Number of accepted drafts of a window whose drafts have target probabilities t."""
    begin = 0
    while begin < len(t):
        end = begin
        while end + 1 < len(t) and t[end + 1] >= t[end]:
            end += 1
        first = max(begin, end - last + 1) if last else end
        while not last and first > begin and sum(t[first : end + 1]) < alpha * sum(t[begin : end + 1]) - 1e-9:
            first -= 1
        stop = first
        for tried in range(end, first - 1, -1) if retest else (end,):
            if coin[first if coins == "one" else tried] < math.prod(ratio[first : tried + 1]):
                stop = tried + 1
                break
        fails = [coin[place] >= ratio[place] and before == "tested" for place in range(begin, first)]
        zero = [place for place in range(begin, stop) if t[place] == 0 or (place < first and fails[place - begin])]
        if zero or stop <= end:
            return zero[0] if zero else stop
        begin = end + 1
    return len(t)


def drawn(rng: np.random.Generator, drafts: int) -> DraftTests:
    p, q = (torch.from_numpy(rng.dirichlet(np.full(V, 0.6), (1, drafts))).float() for _ in "pq")
    p[:, :, 0] = 0  # outside top-k
    draft = torch.from_numpy(rng.integers(0, V, (1, drafts)))
    coin = torch.from_numpy(rng.random((1, drafts)))
    return DraftTests.of(p, q, draft, coin, torch.arange(drafts)[None] + 3, torch.arange(1, drafts + 1))


@pytest.mark.parametrize("options", CHOICES, ids=str)
def test_drafts_are_accepted_by_the_rule_of_the_note(options):
    rule, rng, seen = ExactRuns(CONTEXT, **READINGS | options), np.random.default_rng(0), set()
    for _ in range(150):
        tests = drawn(rng, WINDOW)
        accepted = int(rule.verify(tests, tests.draft).accepted[0].int().cumprod(0).sum())
        t = tests.p.gather(-1, tests.draft[..., None])[0, :, 0].double().tolist()
        assert accepted == slowly(t, tests.ratio[0].tolist(), tests.coin[0].tolist(), **READINGS | options)
        seen.add(accepted)
    assert len(seen) > 3


def test_drafts_past_the_end_of_the_image_change_nothing():
    rule, rng = ExactRuns(CONTEXT, **READINGS), np.random.default_rng(1)
    for _ in range(50):
        tests = drawn(rng, WINDOW)
        late = tests._replace(position=tests.position + LENGTH - 8)
        inside = LENGTH - int(late.position[0, 0])
        fields = {name: getattr(late, name)[:, :inside] for name in late._fields if name != "depth"}
        short = late._replace(**fields, depth=late.depth[:inside])
        both = [rule.verify(part, part.draft).accepted[:, :inside] for part in (late, short)]
        assert torch.equal(*both)


def test_grouping_and_neighbours_are_those_of_their_verifiers():
    tests = drawn(np.random.default_rng(2), WINDOW)
    group = {"G": 4, "d": 9.0, "delta": 0.5, "cluster": "target", "order": "ascending", "bounds": "half-open"}
    for rule, options in ((GroupedRuns, group), (LanternRuns, {"k": 3, "delta": 0.5, "neighbours": "raw"})):
        own, plain = rule(CONTEXT, **READINGS, **options), rule.ratios(CONTEXT, **options)
        arguments = tests.p, tests.q, tests.draft[..., None]
        assert torch.equal(own.acceptance(*arguments), plain.acceptance(*arguments))


def test_runs_of_a_tree_are_refused():
    with pytest.raises(SpecbenchError, match="verifies a chain"):
        resolve("sjd-pac", {"verifier": "runs", "refine": "resample"})
