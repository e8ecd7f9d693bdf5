"""If options switch off a decoder's extension, it returns the same tokens as the simpler decoder under the same seed;
and the loop draws the tokens of the reference of architecture.md, token by token. It concerns several modules: every
drafter and verification."""

import math
from functools import cache

import numpy as np
import pytest
import tiny_llama
import torch
from checkpoints import WRITERS

from specbench.checks.enumerable_model import EnumerableModel, EnumerableTransformer, joint
from specbench.decoding.loop import decode
from specbench.decoding.noise import Noise, row_key
from specbench.decoding.reference import speculative_jacobi
from specbench.decoding.sampling import Target
from specbench.models.catalog import load_model, models
from specbench.models.facts import ModelChoice
from specbench.models.interface import TokenLayout
from specbench.prompts import Request
from specbench.specs.presets import PRESETS, options_of, resolve
from specbench.specs.run_spec import Sampling

IMAGES = 500
LAYOUTS = [TokenLayout.plain(2, 3, 3), TokenLayout.with_row_ends(2, 2, 4), TokenLayout.with_row_ends(1, 5, 3)]
WITH_WINDOW = [
    name
    for name, preset in PRESETS.items()
    if "window" in options_of(preset) and name != "sjd-pac-released"  # whose window has a draft at least
]
WINDOWS = [2, 3, 5, 32]
TREE = {"tree": "0 1 00 01 10 000 001"}
OMEGA = {"drafter": "jacobi-tree", "window": 5, "verifier": "omega"}
IDENTITIES = [
    ("replace", {"share": 0}, "ar", {}), ("sjd-block", {"window": 2}, "sjd", {"window": 2}),
    ("sjd-pac", {"siblings": 1, "window": 5}, "scd-mc", {"window": 5}),
    ("best-lossless", {"lookups": 0, "siblings": 1, "window": 5}, "scd-mc", {"window": 5}),
    ("best-lossless", {"lookups": 0, "window": 5}, "sjd-pac", {"window": 5}),
    ("pathexplore", {"paths": 1, "window": 5}, "sjd-released", {"window": 5}),
    ("cascade", TREE | {"parent-cosine": 1.0, "pair-cosine": 1.0}, "eagle", TREE),
    ("vvs", {"interval": 1024, "after": 2}, "eagle", {}), ("uniform-rsd", {"delta": 1}, "eagle", {}),
    *(("sjd", OMEGA | {"delta": 1, "residual": residual}, "sjd", {"drafter": "jacobi-tree", "window": 5})
      for residual in ("standard", "optimal")),
    ("eagle-gbv", {"paths": 1, "window": 6}, "eagle-block", {}),
]  # fmt: skip
FAMILIES = ("anole", "emu3", "janus", "llamagen", "lumina-512", "simplear")
ENUMERABLE = {
    "tables": lambda: EnumerableModel(TokenLayout.with_row_ends(4, 4, 3), ("a", "bb")),
    "transformer": lambda: EnumerableTransformer(TokenLayout.with_row_ends(4, 4, 5), ("a", "bb")),
    "tiny-llama": tiny_llama.Tiny,
}
SAMPLINGS = [Sampling(2.0, 0.9, 3), Sampling(1.0)]


@cache  # several decoders are compared with the same plain decoder
def drawn(model, decoder, sampling=SAMPLINGS[1], images=IMAGES) -> np.ndarray:
    """Stream tokens [images, N] of two prompts in turn."""
    texts = ("a red circle", "two squares") if model.name == "shapes" else ("a", "bb")
    requests = [Request(texts[number % 2], "prompt", number) for number in range(images)]
    return np.stack([image.tokens for image in decode(model, requests, decoder, sampling, 1, render=False)])


@pytest.fixture(
    scope="module", params=[*ENUMERABLE, "shapes", *(pytest.param(name, marks=pytest.mark.slow) for name in FAMILIES)]
)
def model(request, tmp_path_factory):
    drawn.cache_clear()
    name = request.param
    if name in ENUMERABLE:
        return ENUMERABLE[name]()
    if name == "shapes":
        return load_model("shapes")
    folder = tmp_path_factory.mktemp("checkpoint")
    WRITERS[name](folder)
    return load_model(models()[name].configured(ModelChoice(weights=str(folder), tiny=True)), "cpu", "float32")


@pytest.fixture(scope="module", params=LAYOUTS, ids=lambda layout: f"{layout.height}x{layout.width}")
def tables(request):
    return EnumerableModel(request.param, ("a", "bb"), seed=request.param.length)


@pytest.mark.parametrize(("name", "options", "same", "plain"), IDENTITIES, ids=lambda value: str(value))
def test_the_extended_decoder_returns_the_tokens_of_the_plain_one(model, name, options, same, plain):
    if same.startswith("eagle") and not (hasattr(model, "own_head") and model.own_head()):
        pytest.skip(f"{model.name} has no draft head")
    small = model.layout.length < 50
    if same == "sjd" and not small:
        pytest.skip("256 tokens in windows of a single draft take long")
    for sampling in SAMPLINGS if small else SAMPLINGS[:1]:
        images = 32 if small else 1
        extended = drawn(model, resolve(name, options), sampling, images)
        np.testing.assert_array_equal(extended, drawn(model, resolve(same, plain), sampling, images))


SAME_AS_AR = [*((name, 1) for name in WITH_WINDOW), *(("predictive", window) for window in WINDOWS)]


@pytest.mark.parametrize(("name", "window"), SAME_AS_AR)
def test_window_one_and_predictive_sampling_of_every_window_are_ar(name, window, tables):
    for sampling in (SAMPLINGS[1], Sampling(2.5, 0.7, 2), Sampling(1.0, 1.3, 0, 0.8)):
        same = drawn(tables, resolve(name, {"window": window}), sampling)
        assert np.array_equal(same, drawn(tables, resolve("ar"), sampling))


@pytest.mark.parametrize(
    ("name", "options", "with_effect"),
    [
        ("sjd++", {"tau": math.inf}, {"tau": 0.5}),
        ("gsd", {"G": 1}, {"G": 3, "d": math.inf}),
        ("gsd", {"G": 1, "bounds": "inclusive", "cluster": "draft", "order": "descending", "d": math.inf}, None),
        ("gsd", {"G": 1, "cluster": "embedding"}, None),
        ("amplify", {"k": 1.0}, {"k": 2.0}),
        ("add", {"eps": 0.0}, {"eps": 0.1}),
        ("sjd", {"verifier": "omega", "delta": 1.0}, {"verifier": "omega", "delta": 3.0}),
        ("sjd", {"verifier": "omega", "delta": 1.0, "residual": "optimal"}, None),
        ("sjd", {"fresh-q": "uniform"}, {"fresh-q": "onehot"}),  # both are exact
    ],
)
def test_a_knob_without_effect_is_sjd_and_one_with_an_effect_is_not(name, options, with_effect, tables):
    for window in WINDOWS:
        sjd = drawn(tables, resolve("sjd", {"window": window}))
        assert np.array_equal(drawn(tables, resolve(name, options | {"window": window})), sjd)
    assert with_effect is None or (drawn(tables, resolve(name, with_effect | {"window": window})) != sjd).any()


# `add` also accepts drafts of probability 0.
@pytest.mark.parametrize("name", [name for name in PRESETS if name != "add"])
def test_top_k_one_is_greedy_ar(name, tables):
    greedy, layout = Sampling(2.0, 1.0, top_k=1), tables.layout
    only = [joint(tables, greedy, prompt).argmax() for prompt in ("a", "bb")]
    for window in WINDOWS if name in WITH_WINDOW else [None]:
        image = drawn(tables, resolve(name, {"window": window} if window else {}), greedy)[:, layout.free_slots()]
        index = image @ layout.v_image ** np.arange(image.shape[1] - 1, -1, -1)
        assert np.array_equal(index, np.resize(only, IMAGES))


OF_REFERENCE = Sampling(guidance=2.0, temperature=1.2, top_k=40)


def of_reference(model, window: int, sample: int) -> list[int]:
    session = model.begin(model.encode(["a cat"]), OF_REFERENCE.guidance, window)
    target, layout = Target(model.layout, OF_REFERENCE, model.device), model.layout
    noise = Noise([row_key(7, "p", sample)], layout.vocab)

    def p_of(tokens, slots):
        return target(session.forward(tokens, slots), slots)

    with torch.inference_mode():
        tokens = speculative_jacobi(p_of, layout.length, window, layout.vocab, noise)
    return tokens.tolist()


@pytest.mark.parametrize(("window", "images"), [(1, 20), (2, 60), (4, 60), (9, 60)])
def test_the_loop_draws_the_tokens_of_the_reference(window, images):
    model = EnumerableModel(TokenLayout.plain(3, 3, 5), ("a cat",))
    decoder = resolve("sjd", {"window": window, "fresh-q": "uniform"})
    requests = [Request("a cat", "p", sample) for sample in range(images)]
    decoded = decode(model, requests, decoder, OF_REFERENCE, 7, render=False)
    expected = [of_reference(model, window, sample) for sample in range(images)]
    assert [image.tokens.tolist() for image in decoded] == expected and len(set(map(tuple, expected))) > images / 2
