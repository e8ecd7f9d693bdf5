"""Speculative Jacobi decoding (SJD, algorithm 1) of one image: draft, verify, residual, refine, in plain torch.

`specbench.decoding.loop` draws the same tokens from the same random numbers. It adds batches, grammar tokens, draft
trees, other rules by component, records and compiled steps.
"""

from collections.abc import Callable

import torch
from torch import Tensor

from specbench.decoding.noise import Noise, Stream


def speculative_jacobi(
    target: Callable[[Tensor, Tensor], Tensor], length: int, window: int, vocab: int, noise: Noise
) -> Tensor:
    """Decode `length` tokens [length]. `target(tokens [1, C], slots [1, C])` is one forward: p [1, C, V] of each slot,
    given all earlier tokens. `noise`: noise of one image."""
    tokens = torch.zeros(length + window, dtype=torch.long)
    q = torch.full((length + window, vocab), 1 / vocab)  # The distribution that the draft of a slot was drawn from
    done = drafted = step = 0
    while done < length:
        step += 1
        slots = torch.arange(done, min(done + window, length + 1))[None]
        *drafts, last = slots[0].tolist()

        # Draft: the refined tokens of the last step, then random tokens.
        fresh = slots[:, max(drafted - done, 0) : -1]
        tokens[fresh] = (noise.uniform(fresh, Stream.FRESH, step) * vocab).long()
        p = target(tokens[(slots - 1).clamp(min=0)], slots)[0]

        # Verify: accept draft x with probability min(1, p(x) / q(x)), until a draft is rejected.
        coin = noise.uniform(slots, Stream.COIN, step)[0]
        accepted = 0
        for place, slot in enumerate(drafts):
            if coin[place] >= p[place, tokens[slot]] / q[slot, tokens[slot]]:
                break
            accepted += 1
        slot = slots[:, accepted : accepted + 1]

        # Residual: a rejected draft is replaced by a token of [p - q]+, so that the slot's token follows p.
        weights, race = p[accepted], noise.race(slot, Stream.TOKEN)
        if slot < last:
            weights, race = (p[accepted] - q[slot[0, 0]]).clamp(min=0), noise.race(slot, Stream.RESIDUAL, step)
        tokens[slot] = (weights / race).argmax(-1)

        # Refine: draw the slots after the new token again from p (a Jacobi iteration); this p is the next step's q.
        later, rest = slots[:, accepted + 1 :], p[accepted + 1 :]
        point = noise.uniform(later, Stream.REDRAW, step)[0, :, None].float() * rest.sum(-1, keepdim=True)
        tokens[later[0]] = torch.searchsorted(rest.cumsum(-1), point, right=True)[:, 0].clamp(max=vocab - 1)
        q[later[0]] = rest
        done, drafted = int(slot) + 1, last + 1
    return tokens[:length]
