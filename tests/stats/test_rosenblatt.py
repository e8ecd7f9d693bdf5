"""Level and power of the tests of the Rosenblatt transform, by simulation."""

import numpy as np
import pytest
from scipy.stats import kstest

from specbench.checks.enumerable_model import EnumerableModel
from specbench.decoding.loop import decode
from specbench.models.interface import TokenLayout
from specbench.prompts import Request
from specbench.specs.presets import resolve
from specbench.specs.run_spec import Sampling
from specbench.stats.rosenblatt import Tokens, audit_tokens, detectable, deviation, uniform_distance


def run_of(u, place=None):
    return Tokens(u, place, np.ones(next(iter(u.values())).shape))


def splits(tokens, images):
    """Runs of `images` images each."""
    for start in range(0, len(tokens.entropy), images):
        part = slice(start, start + images)
        yield Tokens({k: u[part] for k, u in tokens.u.items()}, tokens.place[part], tokens.entropy[part])


def test_the_distance_is_kolmogorovs_and_smirnovs():
    draw = np.random.default_rng(0)
    for values in (draw.random(300), draw.random(300) ** 2, draw.random(300) ** 0.5):
        distance, t, sign = uniform_distance(values)
        assert distance == pytest.approx(kstest(values, "uniform").statistic)
        assert sign * ((values <= t).mean() - t) == pytest.approx(distance, abs=1e-9)


@pytest.mark.parametrize("name", ["ar", "sjd", "scd-mc", "scd-gs", "jacobi"])
def test_one_exact_run_in_twenty_is_flagged_at_five_percent(name):
    layout, images = TokenLayout.with_row_ends(2, 4, 3), 60
    spec = resolve(name, {} if name == "ar" else {"window": 3})
    requests = [Request("", "prompt", n) for n in range(200 * images)]
    decoded = decode(EnumerableModel(layout), requests, spec, Sampling(1.0), 0, render=False)
    free = np.array(layout.forced) < 0
    steps = np.stack([image.committed_step for image in decoded])
    place = np.arange(steps.shape[1]) - np.stack([np.searchsorted(row, row) for row in steps])
    orders = {order for image in decoded for order in image.uniforms}
    missing = np.full(layout.length, np.nan)
    u = {k: np.stack([image.uniforms.get(k, missing)[free] for image in decoded]) for k in sorted(orders)}
    every = Tokens(u, place[:, free], np.stack([image.entropy[free] for image in decoded]))
    results = [audit_tokens(run, 0.05) for run in splits(every, images)]
    # 200 runs: a share of 5 % gives at most 20 with probability .999.
    assert sum(result.deviates for result in results) <= 20
    # The lower end of a 95 % interval lies above 0 in 2.5 % of exact runs.
    assert sum((result.deviation.low or 0) > 0 for result in results) <= 14


def test_an_exact_run_has_a_bound_of_zero_on_average():
    draw = np.random.default_rng(1)
    bounds = [deviation(run_of({"u_p": draw.random((40, 50))}), [("u_p", "all")]).value for _ in range(100)]
    assert np.mean(bounds) < 0.01


def test_a_deviation_that_is_called_detectable_is_found_and_its_size_is_covered():
    draw = np.random.default_rng(2)
    shape = (100, 64)
    size = detectable(run_of({"u_p": draw.random(shape)}), 0.001 / 4)
    flagged, covered = 0, 0
    for _ in range(60):
        u = draw.random(shape)
        moved = draw.random(shape) < 2 * size  # mass 2s spread over the lower half: distance s at the median
        u = np.where(moved, u / 2, u)
        result = audit_tokens(run_of({"u_p": u}))
        flagged += result.deviates
        covered += result.deviation.low <= size
    assert flagged >= 50
    assert covered >= 55


def test_each_kind_of_test_sees_what_it_is_for():
    draw = np.random.default_rng(3)
    shape = (200, 60)
    place = np.broadcast_to(np.arange(60) % 6, shape)
    u = draw.random(shape)
    assert audit_tokens(run_of({"u_id": np.where(place == 2, u**1.4, u)}, place)).tests[0].group == "2-3"
    follows = u.copy()
    follows[:, 1:] = np.where(draw.random((200, 59)) < 0.3, u[:, :-1], u[:, 1:])
    assert audit_tokens(run_of({"u_id": follows}, place)).tests[0].kind == "serial"
    assert audit_tokens(run_of({"u_id": np.repeat(u[::2], 2, axis=0)}, place)).tests[0].kind == "images"


def test_whole_images_are_the_units_of_the_interval():
    """Tokens of an image that deviate together must not count as independent tokens."""
    draw = np.random.default_rng(4)
    sharp = draw.random((60, 1)) < 0.5
    u = draw.random((60, 200))
    together = deviation(run_of({"u_p": np.where(sharp, u**1.5, u)}), [("u_p", "all")])
    apart = deviation(run_of({"u_p": np.where(draw.random(u.shape) < 0.5, u**1.5, u)}), [("u_p", "all")])
    assert together.high - together.low > 1.5 * (apart.high - apart.low)
    alike, level = run_of({"u_p": np.repeat(draw.random((60, 1)), 200, axis=1)}), 0.001
    assert detectable(alike, level) > 3 * detectable(run_of({"u_p": u}), level)


def test_too_few_tokens_are_refused():
    with pytest.raises(ValueError, match="fewer than"):
        audit_tokens(run_of({"u_p": np.full((2, 5), 0.5)}))
