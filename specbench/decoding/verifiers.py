"""Verifiers: which drafts of a window are accepted, and which token replaces the first one that is not.

A `RatioTest` is a pure acceptance function a(x; p, q) tossed against one coin per slot; its replacement comes from the
residual. `Match` needs neither: it compares the draft with the slot's next draw.
"""

from __future__ import annotations

from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from specbench.decoding.context import Context
from specbench.decoding.sampling import run_race


class Window(NamedTuple):
    """What verification sees of one step. Slot j of a row is stream slot n + j; T slots, V tokens.

    Attributes:
        p: [B, T, V] target distribution given the drafts before the slot.
        q: [B, T, V] law the draft was really drawn from; all zero where no draft stands.
        draft: [B, T] draft tokens.
        drafted: [B, T] bool, False where no draft stands (the slot after the last draft).
        coin: [B, T] float64 uniforms, fresh every step.
    """

    p: Tensor
    q: Tensor
    draft: Tensor
    drafted: Tensor
    coin: Tensor


class Verdict(NamedTuple):
    """Outcome per slot, as if every slot before it were accepted.

    Attributes:
        accepted: [B, T] bool.
        facts: [B, T] numbers worth recording, by name.
    """

    accepted: Tensor
    facts: dict[str, Tensor]


class Verifier(Protocol):
    def verify(self, window: Window, refined: Tensor) -> Verdict:
        """`refined` [B, T] is the token the refinement puts into each slot."""
        ...

    def replace(self, p: Tensor, q: Tensor, refined: Tensor, race: Tensor) -> Tensor:
        """[B] token for the first rejected slot, given its p, q [B, V], refined token [B] and race noise [B, V]."""
        ...


class RatioTest:
    """Accept a draft with probability a(x; p, q); subclasses define `acceptance` only."""

    def __init__(self, context: Context):
        self._residual = context.residual

    def acceptance(self, p: Tensor, q: Tensor, x: Tensor) -> Tensor:
        """a(x; p, q), values above 1 meaning 1.

        Args:
            p, q: [..., V].
            x: [..., n] candidate tokens.

        Returns:
            [..., n].
        """
        raise NotImplementedError

    def verify(self, window: Window, refined: Tensor) -> Verdict:
        a = self.acceptance(window.p, window.q, window.draft[..., None]).squeeze(-1)
        return Verdict(window.coin < a, {})

    def replace(self, p: Tensor, q: Tensor, refined: Tensor, race: Tensor) -> Tensor:
        return run_race(self._residual(p, q, self.acceptance), race)


def ratio(p: Tensor, q: Tensor, x: Tensor) -> Tensor:
    """p(x)/q(x) [..., n]; 0 where p(x) = 0, so that 0/0 rejects."""
    px = p.gather(-1, x)
    return torch.where(px > 0, px / q.gather(-1, x), 0.0)


class Exact(RatioTest):
    """min(1, p/q): speculative sampling (Leviathan et al. 2023; SJD eq. 4)."""

    def acceptance(self, p: Tensor, q: Tensor, x: Tensor) -> Tensor:
        return ratio(p, q, x)


class Amplify(RatioTest):
    """min(1, k p/q): the multiplicative lossy baseline of GSD's tables."""

    def __init__(self, context: Context, k: float):
        super().__init__(context)
        self._k = k

    def acceptance(self, p: Tensor, q: Tensor, x: Tensor) -> Tensor:
        return self._k * ratio(p, q, x)


class Add(RatioTest):
    """min(1, (p + eps)/q): the additive lossy baseline of GSD's tables. It may commit tokens with p = 0."""

    def __init__(self, context: Context, eps: float):
        super().__init__(context)
        self._eps = eps

    def acceptance(self, p: Tensor, q: Tensor, x: Tensor) -> Tensor:
        mass = p.gather(-1, x) + self._eps
        return torch.where(mass > 0, mass / q.gather(-1, x), 0.0)


class Match:
    """Accept iff the slot's next draw repeats the draft; on a mismatch commit that draw (Jacobi decoding).

    Lossless whenever the refinement draws from p: what is committed is always the refined token.
    """

    def __init__(self, context: Context):
        pass

    def verify(self, window: Window, refined: Tensor) -> Verdict:
        return Verdict(refined == window.draft, {})

    def replace(self, p: Tensor, q: Tensor, refined: Tensor, race: Tensor) -> Tensor:
        return refined
