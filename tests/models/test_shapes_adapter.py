"""Predictive sampling on the embedded model returns the AR image of the same seed; batching changes only rounding."""

import numpy as np
import pytest

from specbench.decoding.loop import decode
from specbench.models.catalog import find_model, load_model
from specbench.prompts import Request, load_prompts
from specbench.specs.presets import resolve

PROMPTS = 2


@pytest.fixture(scope="module")
def requests():
    chosen = load_prompts("shapes").prompts[:: len(load_prompts("shapes").prompts) // PROMPTS][:PROMPTS]
    return [Request(prompt.text, prompt.id, 0) for prompt in chosen]


def tokens(requests, decoder: str, batch: int, **options) -> np.ndarray:
    model, sampling = load_model("shapes"), find_model("shapes").sampling()
    rows = [requests[start : start + batch] for start in range(0, len(requests), batch)]
    decoded = [decode(model, row, resolve(decoder, options), sampling, 0, render=False) for row in rows]
    return np.stack([image.tokens for images in decoded for image in images])


def test_predictive_sampling_returns_ars_images_token_for_token(requests):
    assert len(requests) == PROMPTS
    assert np.array_equal(tokens(requests, "predictive", PROMPTS, window=8), tokens(requests, "ar", PROMPTS))


def test_rows_of_a_ragged_batch_match_batch_one(requests):
    alone = tokens(requests, "sjd", 1)
    together = tokens(requests, "sjd", PROMPTS)
    assert (alone == together).all(1).any()  # kernels round differently by batch, which can flip a draw
