"""Tokenizer of the `shapes` model: reconstructions keep what the detector measures, and all codes are used."""

import numpy as np
import pytest
import torch

from specbench.models.shapes.detector import detect, judge
from specbench.models.shapes.network import load_tokenizer
from specbench.models.shapes.render import render
from specbench.models.shapes.scene import describe, realize, sample_request
from specbench.models.shapes.tokenizer import TOKENS


@pytest.fixture(scope="module")
def reconstructed():
    torch.set_num_threads(1)
    rng = np.random.default_rng(99)
    scenes = [realize(sample_request(rng), rng) for _ in range(240)]
    requests = [describe(scene, rng) for scene in scenes]
    images = torch.from_numpy(np.stack([render(s) for s in scenes])).permute(0, 3, 1, 2)
    tokenizer = load_tokenizer()
    tokens = torch.cat([tokenizer.encode(part) for part in images.split(40)])
    return requests, images, tokens, torch.cat([tokenizer.decode(part) for part in tokens.split(40)])


def test_the_detector_is_nearly_as_right_on_reconstructions(reconstructed):
    requests, _, _, images = reconstructed
    verdicts = [judge(r, detect(i.permute(1, 2, 0).numpy())).correct for r, i in zip(requests, images, strict=True)]
    assert np.mean(verdicts) >= 0.97


def test_reconstructions_are_images_like_the_originals(reconstructed):
    _, images, tokens, again = reconstructed
    assert again.shape == images.shape and again.dtype == torch.uint8
    assert tokens.shape == (len(images), TOKENS)
    error = (images.float() - again.float()).square().mean() / 255**2
    assert -10 * torch.log10(error) > 28


def test_nearly_every_code_is_used(reconstructed):
    tokens = reconstructed[2]
    codes = load_tokenizer().codebook.shape[0]
    assert len(tokens.unique()) >= 0.98 * codes
