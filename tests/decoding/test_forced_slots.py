"""The grammar always wins: no verifier, however lossy, puts a wrong token into a forced slot or a special id elsewhere.
It concerns several modules: every drafter and verification."""

import math

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from specbench.checks.enumerable_model import EnumerableModel
from specbench.decoding.loop import decode
from specbench.models.interface import TokenLayout
from specbench.prompts import Request
from specbench.specs.presets import resolve
from specbench.specs.run_spec import Sampling

ROWS = 64

VERIFIERS = st.one_of(
    st.just({"verifier": "exact"}),
    st.just({"verifier": "match"}),
    st.fixed_dictionaries({"verifier": st.just("amplify"), "k": st.sampled_from([2.0, 1e9])}),
    st.fixed_dictionaries({"verifier": st.just("add"), "eps": st.sampled_from([0.1, 1.0])}),
    st.fixed_dictionaries(
        {
            "verifier": st.just("omega"),
            "delta": st.sampled_from([0.5, 5.0]),
            "schedule": st.sampled_from(["uniform", "exponential", "linear"]),
        }
    ),
    st.fixed_dictionaries(
        {"verifier": st.just("lantern"), "delta": st.sampled_from([0.1, 1.0]), "k": st.integers(1, 5)}
    ),
    st.fixed_dictionaries(
        {"verifier": st.just("lantern++"), "lambda": st.sampled_from([1.0, 9.0]), "k": st.integers(1, 5)}
    ),
    st.fixed_dictionaries(
        {
            "verifier": st.just("grouped"),
            "G": st.integers(1, 12),
            "d": st.sampled_from([0.5, math.inf]),
            "delta": st.sampled_from([0.15, 2.0]),
            "cluster": st.sampled_from(["target", "draft", "embedding"]),
            "order": st.sampled_from(["ascending", "descending"]),
            "bounds": st.sampled_from(["half-open", "inclusive"]),
        }
    ),
)
REFINES = st.one_of(
    st.sampled_from([{"refine": name} for name in ("resample", "restart", "couple", "gumbel")]),
    st.fixed_dictionaries({"refine": st.just("reuse"), "tau": st.sampled_from([0.0, 0.5])}),
)
INITS = st.sampled_from(["uniform", "left-repeat", "left-sample", "left-top1", "above-repeat", "above-sample"])
DRAFTERS = st.one_of(
    st.just({"drafter": "jacobi"}),
    st.fixed_dictionaries(
        {"drafter": st.just("jacobi-tree"), "siblings": st.integers(1, 4), "depth": st.integers(1, 5)}
    ),
    st.fixed_dictionaries({"drafter": st.just("vertical"), "siblings": st.integers(1, 4)}),
    st.fixed_dictionaries(
        {"drafter": st.just("eagle"), "tree": st.sampled_from(["chain", "mc_sim_7b_63", "0 1 2 3 4 10 11 20 200"])}
    ),
)


@st.composite
def layouts(draw) -> TokenLayout:
    """Free slots of a small grid with special tokens at random places between them."""
    height, width, v_image = draw(st.sampled_from([(1, 2, 4), (2, 2, 3), (1, 3, 3), (3, 1, 2), (2, 1, 4)]))
    forced = [-1] * (height * width)
    for special in draw(st.lists(st.integers(0, 1), max_size=6 - len(forced))):
        forced.insert(draw(st.integers(0, len(forced))), v_image + special)
    return TokenLayout(height, width, v_image, tuple(forced))


@settings(derandomize=True, deadline=None, max_examples=160)
@given(
    layout=layouts(), parts=st.tuples(VERIFIERS, REFINES, DRAFTERS), init=INITS,
    residual=st.sampled_from(["standard", "optimal"]), window=st.integers(1, 9),
    sampling=st.sampled_from([Sampling(1.0), Sampling(3.0, 0.7, 2), Sampling(1.0, 1.0, 0, 0.6)]),
    seed=st.integers(0, 1000),
)  # fmt: skip
def test_no_combination_breaks_the_grammar(layout, parts, init, residual, window, sampling, seed):
    verifier, refine, drafter = parts
    options = {**verifier, **refine, **drafter, "residual": residual}
    if drafter["drafter"] != "eagle":
        options["window"] = window
    if drafter["drafter"] not in ("eagle", "vertical"):
        options["init"] = init
    model = EnumerableModel(layout, seed=seed)
    requests = [Request("", "prompt", row) for row in range(ROWS)]
    rows = decode(model, requests, resolve("sjd", options), sampling, seed, render=False)
    forced = np.array(layout.forced)
    free = forced < 0
    for row in rows:
        assert np.array_equal(row.tokens[~free], forced[~free])
        assert ((row.tokens[free] >= 0) & (row.tokens[free] < layout.v_image)).all()
        assert np.array_equal(row.forced, ~free)
        assert 1 <= row.nfe <= layout.length
        assert (np.diff(row.committed_step, prepend=1) >= 0).all()
        assert row.committed_step[-1] == row.nfe == len(set(row.committed_step))
        assert (row.accepted <= row.tested).all() and (row.tested <= row.drafted).all()
        assert (np.exp(row.logp[~free]) == 1).all()
        if verifier["verifier"] not in ("add", "lantern"):
            assert np.isfinite(row.logp).all()
