"""Exactness on a vocabulary that cannot be enumerated: each token's conditional distribution is computed in float64.

A small transformer with random weights is decoded as real models are: thousands of tokens, top-k and top-p, a window of
eleven drafts, rows that are refilled under guidance, in float32 and in bfloat16. The finished tokens are fed to it
without a cache, and their Rosenblatt transform under the float64 reference must be uniform and independent.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import torch

from specbench.checks.divergence import AUDIT_LEVEL
from specbench.checks.enumerable_model import EnumerableTransformer, processed
from specbench.decoding.generation import Generation
from specbench.models.interface import TokenLayout
from specbench.prompts import Request
from specbench.specs.run_spec import Sampling
from specbench.stats.rosenblatt import RosenblattResult, Tokens, audit_tokens

WIDE_SAMPLING = Sampling(guidance=2.0, temperature=3.0, top_k=1000, top_p=0.95)
"""A temperature at which drafts are often kept, so that those of the window's far end are tested, too."""
WINDOW, ROWS = 12, 48
_WIDE = TokenLayout.plain(1, 18, 4160)
_PROMPTS = ("one", "two")
_IMAGES = 240
_TOGETHER = 24
WIDE_DTYPES = {"float32": (torch.float32, 1e-3, 0.001), "bfloat16": (torch.bfloat16, 0.1, 0.05)}
"""Distance of a recorded log p, in nats, and share of tokens beyond it or of probability 0, that rounding explains."""


def wide_faults(
    decode: Callable[[EnumerableTransformer, Sequence[Request]], Sequence[Generation | np.ndarray]],
    dtype: str,
    seed: int,
) -> tuple[list[str], RosenblattResult]:
    """What is wrong with the images of a decoder in `dtype`, one sentence each, and the tests of their tokens.

    Args:
        decode: the images, or their stream tokens, of requests in their order.
    """
    kind, distance, share = WIDE_DTYPES[dtype]
    model = EnumerableTransformer(_WIDE, _PROMPTS, seed)
    embedding = model.backbone.embed_tokens.weight[: _WIDE.vocab]
    # Tokens that differ little: drafts drawn after other tokens are often kept, up to the far end of the window.
    embedding.mul_(0.1).add_(10 * embedding[0])
    model.backbone.to(kind)
    model.codebook, model.matrix = model.codebook.to(kind), model.matrix.to(kind)
    requests = [Request(_PROMPTS[n % 2], f"prompt {n % 2}", n // 2) for n in range(_IMAGES)]
    images = decode(model, requests)
    tokens = np.stack([getattr(image, "tokens", image) for image in images]).astype(np.int64)
    values = np.empty((4, *tokens.shape))
    for number, text in enumerate(_PROMPTS):
        own = range(number, _IMAGES, len(_PROMPTS))
        for start in range(0, len(own), _TOGETHER):
            rows = own[start : start + _TOGETHER]
            values[:, rows] = _reference(model, text, tokens[rows], seed + start)
    by_id, by_p, logp, entropy = values
    impossible = float(np.isinf(logp).mean())
    wrong = [f"{impossible:.1%} of the tokens have probability 0"] * (impossible > share)
    if isinstance(images[0], Generation):
        with np.errstate(invalid="ignore"):
            off = np.abs(np.stack([image.logp for image in images]) - logp) > distance
        beyond = float(off.mean())
        wrong += [f"{beyond:.1%} of the recorded log p are more than {distance:g} off"] * (beyond > share)
    orders = {"u_id": by_id, "u_p": by_p}
    if all("u_pq" in getattr(image, "uniforms", {}) for image in images):
        orders["u_pq"] = np.stack([image.uniforms["u_pq"] for image in images]).astype(float)
    result = audit_tokens(Tokens(orders, None, entropy), AUDIT_LEVEL)
    if result.deviates:
        test = result.tests[0]
        wrong.append(f"tokens are no samples of p (p = {test.corrected:.1e}, {test.order}, {test.kind} {test.group})")
    return [f"{dtype}: {one}" for one in wrong], result


@torch.inference_mode()
def _reference(model: EnumerableTransformer, text: str, tokens: np.ndarray, seed: int) -> np.ndarray:
    """[4, n, N] uniforms by token id and by p descending, log p and entropy of `tokens` [n, N], given those before."""
    logits = model.guided(text, torch.from_numpy(tokens[:, :-1]), WIDE_SAMPLING.guidance)
    p = processed(logits, WIDE_SAMPLING)
    own = np.take_along_axis(p, tokens[..., None], -1)
    before = np.arange(p.shape[-1]) < tokens[..., None]
    by_id = np.where(before, p, 0).sum(-1)
    by_p = np.where((p > own) | ((p == own) & before), p, 0).sum(-1)
    own, v = own[..., 0], np.random.default_rng(seed).random(tokens.shape)
    with np.errstate(divide="ignore"):
        logp = np.log(own)
    entropy = -(p * np.log(np.where(p > 0, p, 1))).sum(-1)
    return np.stack([by_id + v * own, by_p + v * own, logp, entropy])
