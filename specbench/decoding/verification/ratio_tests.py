"""Verifiers: which drafts of a window are accepted, and which token replaces the first one that is not.

A `RatioTest` is a pure acceptance function a(x; p, q) tossed against one coin per slot; its replacement comes from the
residual. `Match` needs neither: it compares the draft with the slot's next draw.
"""

from __future__ import annotations

from functools import partial
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from specbench.decoding.context import Context
from specbench.decoding.sampling import run_race


class DraftTests(NamedTuple):
    """Drafts to test, each on its own: K per row, V tokens.

    Attributes:
        p: [B, K, V] target distribution given what stands before the draft, less what rejected siblings took.
        q: [B, K, V] law the draft was really drawn from; undefined where `drafted` is False.
        draft: [B, K] draft tokens.
        drafted: [B, K] bool, False where no draft stands.
        coin: [B, K] float64 uniforms, fresh every step.
        depth: [K] how many drafts of this step stand on the way to it, itself included.
    """

    p: Tensor
    q: Tensor
    draft: Tensor
    drafted: Tensor
    coin: Tensor
    depth: Tensor

    def pick(self, places: Tensor | slice) -> DraftTests:
        """Some of the tests."""
        return DraftTests(*(field[:, places] for field in self[:-1]), self.depth[places])


class Verdict(NamedTuple):
    """Outcome per draft, as if everything before it were accepted.

    Attributes:
        accepted: [B, K] bool.
        facts: [B, K] numbers worth recording, by name.
    """

    accepted: Tensor
    facts: dict[str, Tensor]


class Verifier(Protocol):
    compares: bool
    """Whether `verify` and `replace` look at `refined`."""

    def verify(self, tests: DraftTests, refined: Tensor) -> Verdict:
        """`refined` [B, K] is the token the refinement puts into each draft's slot."""
        ...

    def residual_weights(self, tests: DraftTests) -> Tensor:
        """[B, K, V] unnormalised: what to draw from once the draft is rejected."""
        ...

    def replace(self, left: Tensor, refined: Tensor, race: Tensor) -> Tensor:
        """[B] token for the first slot without an accepted draft, given what is left [B, V], the slot's refined token
        [B] and race noise [B, V]."""
        ...


class RatioTest:
    """Accept a draft with probability a(x; p, q); subclasses define `acceptance` only."""

    compares = False

    def __init__(self, context: Context):
        self._residual = context.residual

    def acceptance(self, p: Tensor, q: Tensor, x: Tensor, depth: int | Tensor = 1) -> Tensor:
        """a(x; p, q), values above 1 meaning 1.

        Args:
            p, q: [..., V].
            x: [..., n] candidate tokens.
            depth: of the draft in this step, 1 for the first; an int or of a shape that broadcasts to [...].

        Returns:
            [..., n].
        """
        raise NotImplementedError

    def verify(self, tests: DraftTests, refined: Tensor) -> Verdict:
        a = self.acceptance(tests.p, tests.q, tests.draft[..., None], tests.depth).squeeze(-1)
        return Verdict(tests.coin < a, drift(tests, a))

    def residual_weights(self, tests: DraftTests) -> Tensor:
        return self._residual(tests.p, tests.q, partial(self.acceptance, depth=tests.depth))

    def replace(self, left: Tensor, refined: Tensor, race: Tensor) -> Tensor:
        return run_race(left, race)


def drift(tests: DraftTests, a: Tensor) -> dict[str, Tensor]:
    """What one draft x ~ q tells about the whole vocabulary, without looking at it.

    `distance`: 1 - min(1, p/q), whose mean over x is TV(p, q). `excess`: [a - p/q]+, whose mean over x is
    sum_y [q a - p]+, the position's term of Cool-SD's theorem 2 under the optimal residual.
    """
    fair = ratio(tests.p, tests.q, tests.draft[..., None]).squeeze(-1).clamp(max=1)
    return {"distance": 1 - fair, "excess": (a.clamp(max=1) - fair).clamp(min=0)}


def ratio(p: Tensor, q: Tensor, x: Tensor) -> Tensor:
    """p(x)/q(x) [..., n]; 0 where p(x) = 0, so that 0/0 rejects."""
    px = p.gather(-1, x)
    return torch.where(px > 0, px / q.gather(-1, x), 0.0)


class Exact(RatioTest):
    """min(1, p/q): speculative sampling (Leviathan et al. 2023; SJD eq. 4)."""

    def acceptance(self, p: Tensor, q: Tensor, x: Tensor, depth: int | Tensor = 1) -> Tensor:
        return ratio(p, q, x)


class Amplify(RatioTest):
    """min(1, k p/q): the multiplicative lossy baseline of GSD's tables."""

    def __init__(self, context: Context, k: float):
        super().__init__(context)
        self._k = k

    def acceptance(self, p: Tensor, q: Tensor, x: Tensor, depth: int | Tensor = 1) -> Tensor:
        return self._k * ratio(p, q, x)


class Add(RatioTest):
    """min(1, (p + eps)/q): the additive lossy baseline of GSD's tables. It may commit tokens with p = 0."""

    def __init__(self, context: Context, eps: float):
        super().__init__(context)
        self._eps = eps

    def acceptance(self, p: Tensor, q: Tensor, x: Tensor, depth: int | Tensor = 1) -> Tensor:
        mass = p.gather(-1, x) + self._eps
        return torch.where(mass > 0, mass / q.gather(-1, x), 0.0)


class Match:
    """Accept iff the slot's next draw repeats the draft; on a mismatch commit that draw (Jacobi decoding).

    Lossless whenever the refinement draws from p: what is committed is always the refined token.
    """

    compares = True

    def __init__(self, context: Context):
        pass

    def verify(self, tests: DraftTests, refined: Tensor) -> Verdict:
        return Verdict(refined == tests.draft, {})

    def residual_weights(self, tests: DraftTests) -> Tensor:
        return tests.p

    def replace(self, left: Tensor, refined: Tensor, race: Tensor) -> Tensor:
        return refined
