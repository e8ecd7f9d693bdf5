"""The loop draws the tokens of the reference, one by one; what the reference draws follows the model."""

import pytest
import torch

from specbench.checks.enumerable_model import EnumerableModel
from specbench.decoding.loop import decode
from specbench.decoding.noise import Noise, row_key
from specbench.decoding.reference import speculative_jacobi
from specbench.decoding.sampling import Target
from specbench.models.catalog import load_model
from specbench.models.interface import TokenLayout
from specbench.prompts import Request
from specbench.specs.presets import resolve
from specbench.specs.run_spec import Sampling

SAMPLING = Sampling(guidance=2.0, temperature=1.2, top_k=40)


def of_reference(model, text: str, window: int, sample: int) -> list[int]:
    session = model.begin(model.encode([text]), SAMPLING.guidance, window)
    target, layout = Target(model.layout, SAMPLING, model.device), model.layout
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
    decoded = decode(model, requests, decoder, SAMPLING, 7, render=False)
    expected = [of_reference(model, "a cat", window, sample) for sample in range(images)]
    assert [image.tokens.tolist() for image in decoded] == expected and len(set(map(tuple, expected))) > images / 2


def test_the_loop_draws_the_tokens_of_the_reference_with_a_network():
    model = load_model("shapes")
    decoder = resolve("sjd", {"window": 16, "fresh-q": "uniform"})
    [image] = decode(model, [Request("a red circle", "p", 0)], decoder, SAMPLING, 7, render=False)
    assert image.tokens.tolist() == of_reference(model, "a red circle", 16, 0) and image.nfe < 200
