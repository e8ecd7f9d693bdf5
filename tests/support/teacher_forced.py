"""What a run records of its tokens against a teacher-forced forward over the finished image."""

import numpy as np
import torch

from specbench.checks.enumerable_model import EnumerableTransformer
from specbench.decoding.loop import decode
from specbench.models.interface import TokenLayout
from specbench.prompts import Request
from specbench.specs.presets import DecoderSpec
from specbench.specs.run_spec import Sampling


def assert_recorded_as_teacher_forced(decoder: DecoderSpec) -> None:
    """The probability recorded for each token is that of a teacher-forced forward: the cache holds
    the tokens committed."""
    model = EnumerableTransformer(TokenLayout.with_row_ends(3, 4, 5), ("a", "bb"))
    requests = [Request(text, text, sample) for sample in range(20) for text in model.prompts]
    images = decode(model, requests, decoder, Sampling(2.0), 0, render=False)
    assert max(image.accepted.sum() for image in images) > 2
    session = model.begin(model.encode([request.text for request in requests]), 2.0, model.layout.length)
    tokens = torch.from_numpy(np.stack([image.tokens for image in images])).long()
    slots = torch.arange(model.layout.length).expand_as(tokens)
    logits = session.forward(torch.cat([tokens[:, :1], tokens[:, :-1]], 1), slots)
    logp = logits.log_softmax(-1).gather(-1, tokens.clamp(max=4)[..., None])[..., 0].numpy()
    free = ~images[0].forced
    np.testing.assert_allclose(np.stack([image.logp for image in images])[:, free], logp[:, free], atol=1e-3)
