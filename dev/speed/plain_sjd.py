"""Speculative Jacobi decoding as the paper's algorithm 1 reads, for one image; the reference of `bench.py plain`.

Written with torch's own operations and random numbers and without any of this package's decoding code: no recording, no
noise by address, no batch, no grammar.
"""

from __future__ import annotations

import torch
from torch import Tensor

from specbench.models.interface import Session


def plain_sjd(session: Session, length: int, window: int, v_image: int, top_k: int, seed: int) -> Tensor:
    """Decode `length` tokens [length]; `session` returns guided logits [1, C, v_image] of the tokens it is given."""
    random = torch.Generator().manual_seed(seed)
    uniform = torch.full((v_image,), 1 / v_image)
    tokens = torch.zeros(length + window, dtype=torch.long)
    q = uniform.repeat(length + window, 1)
    done, drafted = 0, 0
    while done < length:
        end = min(done + window - 1, length)
        start = max(drafted, done)
        tokens[start:end] = torch.randint(v_image, (end - start,), generator=random)
        positions = torch.arange(done, end + 1)
        logits = session.forward(tokens[(positions - 1).clamp(min=0)][None], positions[None])[0]
        p = target_distribution(logits, top_k)
        accepted = 0
        for slot in range(done, end):
            draft = tokens[slot]
            if torch.rand((), generator=random) >= p[slot - done, draft] / q[slot, draft]:
                break
            accepted += 1
        n = done + accepted
        if n < end:
            residual = (p[accepted] - q[n]).clamp(min=0)
            tokens[n] = torch.multinomial(residual, 1, generator=random)
        else:
            tokens[n] = torch.multinomial(p[accepted], 1, generator=random)
        if n + 1 < end:  # refine: the remaining drafts are drawn anew, from p
            rest = p[accepted + 1 : end - done]
            tokens[n + 1 : end] = torch.multinomial(rest, 1, generator=random)[:, 0]
            q[n + 1 : end] = rest
        done, drafted = n + 1, end
    return tokens[:length]


def target_distribution(logits: Tensor, top_k: int) -> Tensor:
    """Distributions [C, V] of `logits` [C, V], restricted to the `top_k` largest."""
    if top_k < logits.shape[-1]:
        logits = logits.masked_fill(logits < logits.topk(top_k).values[:, -1:], -torch.inf)
    return logits.softmax(-1)
