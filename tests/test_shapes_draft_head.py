"""The draft head in the package makes every decoder that needs one faster than one token a round."""

import pytest

from specbench.decoding.loop import Request, decode
from specbench.decoding.presets import PRESETS, resolve
from specbench.models.catalog import find_model, load_model

TEXTS = ("three red circles", "a blue square")


@pytest.fixture(scope="module")
def model():
    return load_model("shapes")


@pytest.mark.parametrize("name", [name for name, preset in PRESETS.items() if preset.choices["drafter"] == "eagle"])
def test_the_shipped_head_is_worth_its_rounds(model, name):
    requests = [Request(text, text) for text in TEXTS]
    rows = decode(model, requests, resolve(name), find_model("shapes").sampling(), 0, render=False)
    for row in rows:
        assert (model.layout.length - 1) / (row.nfe - 1) > 2
        assert row.facts["draft_tv_1"] < 0.6
        assert (row.facts["theorem2_bound"] == 0) == resolve(name).lossless
