"""A compiled step gives the tokens of an uncompiled one, stays exact, and is compiled before the clock starts."""

import shutil

import numpy as np
import pytest
import torch

import specbench
from specbench import compiling, stats
from specbench.audit import Case, observe
from specbench.config import Sampling
from specbench.decoding.loop import Request, decode
from specbench.decoding.presets import resolve
from specbench.models.compiled import CompiledStep
from tiny_llama import Tiny

needs_compiler = pytest.mark.skipif(
    compiling.missing("cpu") is not None, reason=f"a step cannot be compiled here: {compiling.missing('cpu')}"
)
SAMPLING = Sampling(guidance=2.0, temperature=0.9, top_k=9)


@pytest.fixture(scope="module")
def eager():
    return Tiny()


@pytest.fixture(scope="module")
def compiled():
    model = Tiny()
    model.compile()
    return model


DECODERS = [
    resolve("ar"),
    resolve("sjd", {"window": 5}),
    resolve("gsd", {"window": 4, "G": 3}),
    resolve("eagle", {"tree": "0 1 00 01"}),
    resolve("zipar", {"rows-window": 2}),
]
REQUESTS = [Request("a fox", "fox", n) for n in range(2)] + [Request("two red hens", "hens")]


def tokens(model, decoder, requests=REQUESTS, sampling=SAMPLING):
    images = decode(model, requests, decoder, sampling, seed=3, render=False)
    return np.stack([image.tokens for image in images])


@needs_compiler
def test_same_tokens_under_the_same_noise_and_nothing_compiled_twice(eager, compiled):
    for decoder in DECODERS:
        for requests in (REQUESTS[:1], REQUESTS):
            np.testing.assert_array_equal(tokens(compiled, decoder, requests), tokens(eager, decoder, requests))
    (step,) = compiled.compiled
    assert step.forms > 0 and step.seconds > 0
    before = step.forms, torch._dynamo.utils.counters["stats"]["unique_graphs"]
    for decoder in DECODERS:
        tokens(compiled, decoder, [Request("a much longer prompt", "long", 7)])
        tokens(compiled, decoder, REQUESTS[::-1])
    assert (step.forms, torch._dynamo.utils.counters["stats"]["unique_graphs"]) == before
