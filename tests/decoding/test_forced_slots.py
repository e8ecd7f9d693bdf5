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


def options(**values):
    """A decoder with these options, each drawn from a list if it is a list."""
    drawn = {name: value if isinstance(value, list) else [value] for name, value in values.items()}
    return st.fixed_dictionaries({name: st.sampled_from(value) for name, value in drawn.items()})


VERIFIERS = st.one_of(
    options(verifier=["exact", "match"]),
    options(verifier="amplify", k=[2.0, 1e9]),
    options(verifier="add", eps=[0.1, 1.0]),
    options(verifier="omega", delta=[0.5, 5.0], schedule=["uniform", "exponential", "linear"]),
    options(verifier="lantern", delta=[0.1, 1.0], k=[1, 2, 3, 4, 5]),
    options(verifier="lantern++", k=[1, 2, 3, 4, 5], **{"lambda": [1.0, 9.0]}),
    options(
        verifier="grouped", G=[*range(1, 13)], d=[0.5, math.inf], delta=[0.15, 2.0], order=["ascending", "descending"],
        cluster=["target", "draft", "embedding"], bounds=["half-open", "inclusive"],
    ),
)  # fmt: skip
REFINES = st.one_of(
    options(refine=["resample", "restart", "couple", "gumbel"]), options(refine="reuse", tau=[0.0, 0.5])
)
INITS = st.sampled_from(["uniform", "left-repeat", "left-sample", "left-top1", "above-repeat", "above-sample"])
DRAFTERS = st.one_of(
    options(drafter="jacobi"),
    options(drafter="jacobi-tree", siblings=[1, 2, 3, 4], depth=[1, 2, 3, 4, 5]),
    options(drafter="vertical", siblings=[1, 2, 3, 4]),
    options(drafter="eagle", tree=["chain", "mc_sim_7b_63", "0 1 2 3 4 10 11 20 200"]),
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
