"""If options switch off a decoder's extension, it returns the same tokens as the decoder that it extends.

It concerns several modules: every drafter and verification.
"""

from functools import cache

import numpy as np
import pytest
import tiny_llama
from checkpoints import WRITERS

from specbench.checks.enumerable_model import EnumerableModel, EnumerableTransformer
from specbench.decoding.loop import decode
from specbench.models.catalog import load_model, models
from specbench.models.facts import ModelChoice
from specbench.models.interface import TokenLayout
from specbench.prompts import Request
from specbench.specs.presets import resolve
from specbench.specs.run_spec import Sampling

IDENTITIES = [
    ("sjd++", {"tau": float("inf"), "window": 5}, "sjd", {"window": 5}),
    ("gsd", {"G": 1, "window": 5}, "sjd", {"window": 5}),
    ("amplify", {"k": 1, "window": 5}, "sjd", {"window": 5}),
    ("replace", {"share": 0}, "ar", {}),
    ("sjd-pac", {"siblings": 1, "window": 5}, "scd-mc", {"window": 5}),
    ("best-lossless", {"lookups": 0, "siblings": 1, "window": 5}, "scd-mc", {"window": 5}),
    ("best-lossless", {"lookups": 0, "window": 5}, "sjd-pac", {"window": 5}),
    ("pathexplore", {"paths": 1, "window": 5}, "sjd-released", {"window": 5}),
    ("uniform-rsd", {"delta": 1}, "eagle", {}),
    ("eagle-gbv", {"paths": 1, "window": 6}, "eagle-block", {}),
]
FAMILIES = ("anole", "emu3", "janus", "llamagen", "lumina-512", "simplear")
ENUMERABLE = {
    "tables": lambda: EnumerableModel(TokenLayout.with_row_ends(4, 4, 3), ("a", "bb")),
    "transformer": lambda: EnumerableTransformer(TokenLayout.with_row_ends(4, 4, 5), ("a", "bb")),
    "tiny-llama": tiny_llama.Tiny,
}
SAMPLINGS = [Sampling(2.0, 0.9, 3), Sampling(1.0)]


@pytest.fixture(
    scope="module", params=[*ENUMERABLE, "shapes", *(pytest.param(name, marks=pytest.mark.slow) for name in FAMILIES)]
)
def model(request, tmp_path_factory):
    _decoded.cache_clear()
    name = request.param
    if name in ENUMERABLE:
        return ENUMERABLE[name]()
    if name == "shapes":
        return load_model("shapes")
    folder = tmp_path_factory.mktemp("checkpoint")
    WRITERS[name](folder)
    return load_model(models()[name].configured(ModelChoice(weights=str(folder), tiny=True)), "cpu", "float32")


@cache  # several decoders extend the same plain decoder
def _decoded(model, decoder, sampling, images):
    texts = ("a red circle", "two squares") if model.name == "shapes" else ("a", "bb")
    requests = [Request(texts[number % 2], "prompt", number) for number in range(images)]
    return np.stack([image.tokens for image in decode(model, requests, decoder, sampling, 1, render=False)])


@pytest.mark.parametrize(("name", "options", "same", "plain"), IDENTITIES, ids=lambda value: str(value))
def test_the_extended_decoder_returns_the_tokens_of_the_plain_one(model, name, options, same, plain):
    if same.startswith("eagle") and not (hasattr(model, "own_head") and model.own_head()):
        pytest.skip(f"{model.name} has no draft head")
    small = model.layout.length < 50
    for sampling in SAMPLINGS if small else SAMPLINGS[:1]:
        images = 32 if small else 2
        extended = _decoded(model, resolve(name, options), sampling, images)
        np.testing.assert_array_equal(extended, _decoded(model, resolve(same, plain), sampling, images))


def test_sjd_with_a_one_hot_q_of_fresh_tokens_differs_from_sjd_with_a_uniform_one():
    """Both are exact (see the audit), so they are two different decoders."""
    model = ENUMERABLE["tables"]()
    one_hot, uniform = (resolve("sjd", {"fresh-q": q, "window": 5}) for q in ("onehot", "uniform"))
    assert (_decoded(model, one_hot, SAMPLINGS[1], 50) != _decoded(model, uniform, SAMPLINGS[1], 50)).any()
