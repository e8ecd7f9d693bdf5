"""Every decoder equals a simpler decoder if its option has no effect, token for token under the same
seed.

It concerns several modules: every drafter and verification.
"""

import math

import numpy as np
import pytest

from specbench.checks.enumerable_model import EnumerableModel, joint
from specbench.decoding.loop import decode
from specbench.models.interface import TokenLayout
from specbench.prompts import Request
from specbench.specs.presets import PRESETS, options_of, resolve
from specbench.specs.run_spec import Sampling

ROWS = 500
LAYOUTS = [TokenLayout.plain(2, 3, 3), TokenLayout.with_row_ends(2, 2, 4), TokenLayout.with_row_ends(1, 5, 3)]
WITH_WINDOW = [
    name
    for name, preset in PRESETS.items()
    if "window" in options_of(preset) and name != "sjd-pac-released"  # whose window has a draft at least
]
WINDOWS = [2, 3, 5, 32]


def tokens(name: str, layout: TokenLayout, sampling: Sampling | None = None, **options) -> np.ndarray:
    """Stream tokens [ROWS, N] of many samples of two prompts."""
    model = EnumerableModel(layout, ("a", "b"), seed=layout.length)
    requests = [Request("ab"[row % 2], "ab"[row % 2], row) for row in range(ROWS)]
    spec = resolve(name, options)
    decoded = decode(model, requests, spec, sampling or Sampling(1.0), 11, render=False)
    return np.stack([row.tokens for row in decoded])


@pytest.fixture(params=LAYOUTS, ids=lambda layout: f"{layout.height}x{layout.width} of {layout.v_image}")
def layout(request):
    return request.param


@pytest.mark.parametrize("name", WITH_WINDOW)
def test_window_one_is_ar(name, layout):
    assert np.array_equal(tokens(name, layout, window=1), tokens("ar", layout))


@pytest.mark.parametrize("window", WINDOWS)
def test_predictive_sampling_is_ar_for_every_window(window, layout):
    for sampling in (Sampling(1.0), Sampling(2.5, 0.7, 2), Sampling(1.0, 1.3, 0, 0.8)):
        predicted = tokens("predictive", layout, sampling, window=window)
        assert np.array_equal(predicted, tokens("ar", layout, sampling))


@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("sjd++", {"tau": math.inf}),
        ("gsd", {"G": 1}),
        ("gsd", {"G": 1, "bounds": "inclusive", "cluster": "draft", "order": "descending", "d": math.inf}),
        ("gsd", {"G": 1, "cluster": "embedding"}),
        ("amplify", {"k": 1.0}),
        ("add", {"eps": 0.0}),
    ],
)
def test_a_knob_without_effect_is_sjd(name, options, layout):
    for window in WINDOWS:
        assert np.array_equal(tokens(name, layout, window=window, **options), tokens("sjd", layout, window=window))


@pytest.mark.parametrize(
    ("name", "options"),
    [("sjd++", {"tau": 0.5}), ("gsd", {"G": 3, "d": math.inf}), ("amplify", {"k": 2.0}), ("add", {"eps": 0.1})],
)
def test_each_of_those_knobs_has_an_effect(name, options, layout):
    assert not np.array_equal(tokens(name, layout, window=32, **options), tokens("sjd", layout, window=32))


# `add` also accepts drafts of probability 0.
@pytest.mark.parametrize("name", [name for name in PRESETS if name != "add"])
def test_top_k_one_is_greedy_ar(name, layout):
    greedy = Sampling(2.0, 1.0, top_k=1)
    model = EnumerableModel(layout, ("a", "b"), seed=layout.length)
    only = [joint(model, greedy, prompt).argmax() for prompt in "ab"]
    for window in WINDOWS if name in WITH_WINDOW else [None]:
        decoded = tokens(name, layout, greedy, **({"window": window} if window else {}))
        image = decoded[:, layout.free_slots()]
        index = image @ layout.v_image ** np.arange(image.shape[1] - 1, -1, -1)
        assert np.array_equal(index, np.resize(only, ROWS))
