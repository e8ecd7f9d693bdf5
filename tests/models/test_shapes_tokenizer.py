"""Tokenizer of the `shapes` model: reconstructions keep what the detector measures, and all codes are used."""

import numpy as np
import torch

from specbench.models.shapes.detector import detect, judge
from specbench.models.shapes.network import load_tokenizer
from specbench.models.shapes.render import render
from specbench.models.shapes.scene import describe, realize, sample_request


def test_the_detector_is_nearly_as_right_on_reconstructions_which_are_like_the_originals():
    torch.set_num_threads(1)
    rng = np.random.default_rng(99)
    scenes = [realize(sample_request(rng), rng) for _ in range(240)]
    requests = [describe(scene, rng) for scene in scenes]
    images = torch.from_numpy(np.stack([render(s) for s in scenes])).permute(0, 3, 1, 2)
    tokenizer = load_tokenizer()
    tokens = torch.cat([tokenizer.encode(part) for part in images.split(40)])
    again = torch.cat([tokenizer.decode(part) for part in tokens.split(40)])
    verdicts = [judge(r, detect(i.permute(1, 2, 0).numpy())).correct for r, i in zip(requests, again, strict=True)]
    assert np.mean(verdicts) >= 0.97
    error = (images.float() - again.float()).square().mean() / 255**2
    assert again.dtype == torch.uint8 and -10 * torch.log10(error) > 28
    assert len(tokens.unique()) >= 0.98 * tokenizer.codebook.shape[0]
