"""Verifiers: acceptance of drafts, and the residual distribution after a rejection.

A `RatioTest` accepts a draft x with probability a(x; p, q); after a rejection the residual distribution is sampled.
`Match` only compares the draft with a fresh draw from p. Residual distributions are unnormalised weights [..., V],
proportional to p - a q for a lossless decoder. In slots without a draft q is 0, so that all residuals are p.
"""

from __future__ import annotations

import math
from functools import partial
from typing import Literal, NamedTuple, Protocol

import torch
from torch import Tensor

from specbench.decoding.interfaces import Acceptance, Context
from specbench.decoding.noise import Noise, Stream
from specbench.decoding.sampling import rows_at


class DraftTests(NamedTuple):
    """K acceptance tests per row, each of one draft with its own p and q. V tokens. They are built by `of`, the only
    reader of a proposal's q."""

    # [B, K, V] target distribution of the draft's slot; for a later sibling, the normalised residual distribution after
    # the rejected siblings
    p: Tensor
    q: Tensor  # [B, K, V] distribution the draft was drawn from; 0 without a draft
    draft: Tensor  # [B, K] draft tokens
    drafted: Tensor  # [B, K] bool, False without a draft to test
    coin: Tensor  # [B, K] float64 uniforms in (0, 1), fresh in every step
    position: Tensor  # [B, K] stream slot of the draft
    depth: Tensor  # [K] depth of the draft in this step, 1 for the first
    ratio: Tensor  # [B, K] `ratio` p(x)/q(x) of the draft x

    @classmethod
    def of(
        cls,
        p: Tensor,
        q: Tensor,
        draft: Tensor,
        coin: Tensor,
        position: Tensor,
        depth: Tensor,
        exists: Tensor | None = None,
    ) -> DraftTests:
        """Build the tests of `draft`; `exists` [K] is False for entries without a draft; None means all True.

        Without a draft, q is undefined (NaN, or from an earlier step) and is replaced by 0.
        """
        x = draft[..., None]
        q_draft = q.gather(-1, x)
        drafted = q_draft.squeeze(-1) > 0
        p_over_q = _ratio(p.gather(-1, x), q_draft).squeeze(-1)
        if exists is not None:
            drafted = drafted & exists
            q = torch.where(drafted[..., None], q, 0.0)
        return cls(p, q, draft, drafted, coin, position, depth, p_over_q)

    def at(self, entry: Tensor) -> FailedTest:
        """Select one test per row, number `entry` [B, 1]."""
        p, q = rows_at(self.p, entry), rows_at(self.q, entry)
        return FailedTest(p, q, self.draft.gather(1, entry), self.drafted.gather(1, entry), self.depth.take(entry))


class FailedTest(NamedTuple):
    """Inputs of the residual distributions: K tests per row, usually a single test; fields as in `DraftTests`."""

    # p, q: [B, K, V]
    p: Tensor
    q: Tensor
    # draft, drafted: [B, K]
    draft: Tensor
    drafted: Tensor
    depth: Tensor  # of a shape that broadcasts to [B, K]


class Verdict(NamedTuple):
    """Outcome per draft, as if every draft before it were accepted."""

    accepted: Tensor  # [B, K] bool
    facts: dict[str, Tensor]  # [B, K] numbers to record, by name
    # [B, K] factor on p in the residual distribution after each draft's rejection; None means 1
    scale: Tensor | None = None

    def failed(self, tests: DraftTests, entry: Tensor) -> FailedTest:
        """Return the test [B, 1] of the rejected draft `entry` [B, 1], with p scaled for the residual distribution."""
        chosen = tests.at(entry)
        if self.scale is None:
            return chosen
        return chosen._replace(p=chosen.p * self.scale.gather(1, entry)[..., None].to(chosen.p.dtype))


class Verifier(Protocol):
    compares: bool  # Whether drafts are compared with the slot's refined token, which replaces a rejected draft

    def verify(self, tests: DraftTests, refined: Tensor) -> Verdict:
        """Judge every draft; `refined` [B, K]: refined token of the draft's slot."""
        ...

    def residual_weights(self, tests: DraftTests | FailedTest) -> Tensor:
        """Unnormalised residual distribution [B, K, V] after a rejection of each draft."""
        ...


class RatioTest:
    """Accept a draft with probability a(x; p, q); subclasses define `acceptance`."""

    compares = False

    def __init__(self, context: Context):
        self._residual = context.residual

    def acceptance(self, p: Tensor, q: Tensor, x: Tensor, depth: int | Tensor = 1) -> Tensor:
        """Acceptance probability a(x; p, q); values above 1 mean 1.

        Args:
            p, q: [..., V].
            x: [..., n] candidate tokens.
            depth: of the draft in this step, 1 for the first; an int or of a shape that broadcasts to [...].

        Returns:
            [..., n].
        """
        raise NotImplementedError

    def of_drafts(self, tests: DraftTests) -> Tensor:
        """`acceptance` [B, K] of the drafts themselves."""
        return self.acceptance(tests.p, tests.q, tests.draft[..., None], tests.depth).squeeze(-1)

    def verify(self, tests: DraftTests, refined: Tensor) -> Verdict:
        a = self.of_drafts(tests)
        return Verdict(tests.coin < a, self.facts(tests, a))

    def facts(self, tests: DraftTests, a: Tensor) -> dict[str, Tensor]:
        """Facts that `distances` needs: acceptance probabilities a [B, K] of the drafts x, and p(x)/q(x)."""
        return {"acceptance": a, "ratio": tests.ratio}

    def residual_weights(self, tests: DraftTests | FailedTest) -> Tensor:
        return self._residual(tests.p, tests.q, partial(self.acceptance, depth=tests.depth))


def distances(acceptance: Tensor, ratio: Tensor) -> dict[str, Tensor]:
    """Unbiased estimates of distances between p and q, each from a draft x ~ q with its acceptance probability a and
    ratio p(x)/q(x), all of the same shape.

    `distance`: 1 - min(1, p/q); its mean over x is TV(p, q). `excess`: [a - p/q]+; its mean over x is sum_y [q a - p]+,
        the slot's term in Cool-SD's theorem 2 under the optimal residual.
    """
    exact = ratio.clamp(max=1)
    return {"distance": 1 - exact, "excess": (acceptance.clamp(max=1) - exact).clamp(min=0)}


def ratio(p: Tensor, q: Tensor, x: Tensor) -> Tensor:
    """p(x)/q(x) [..., n]; 0 if p(x) = 0, so that 0/0 rejects."""
    return _ratio(p.gather(-1, x), q.gather(-1, x))


def _ratio(px: Tensor, qx: Tensor) -> Tensor:
    return torch.where(px > 0, px / qx, px)


def residual_weights(verifier: Verifier, tests: DraftTests | FailedTest) -> Tensor:
    """Unnormalised residual distribution [B, K, V]; p for entries without a draft."""
    return torch.where(tests.drafted[..., None], verifier.residual_weights(tests), tests.p)


def draw_after_drafts(
    p: Tensor,
    failed: FailedTest,
    rejected: Tensor,
    verifier: Verifier,
    refined: Tensor,
    noise: Noise,
    position: Tensor,
    step: Tensor,
) -> Tensor:
    """Draw the token [B, 1] after the accepted drafts: a replacement if a draft was `rejected`, else the bonus token
    from p [B, 1, V]. `failed` is the last failed test, which is not used for rows without a rejection.

    The bonus token uses the slot's noise, as in autoregressive sampling; a replacement uses the step's noise.
    """
    if verifier.compares:
        return torch.where(rejected, refined, noise.run_race(p, position, Stream.TOKEN))
    weights = torch.where(rejected[..., None], residual_weights(verifier, failed), p)
    stream = rejected * int(Stream.RESIDUAL)  # TOKEN is 0
    return noise.run_race(weights, position, stream, step * rejected)


class Exact(RatioTest):
    """min(1, p/q): speculative sampling (Leviathan et al. 2023; SJD eq. 4)."""

    def acceptance(self, p: Tensor, q: Tensor, x: Tensor, depth: int | Tensor = 1) -> Tensor:
        return ratio(p, q, x)

    def of_drafts(self, tests: DraftTests) -> Tensor:
        # A subclass may override the acceptance.
        return tests.ratio if type(self).acceptance is Exact.acceptance else super().of_drafts(tests)


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


Schedule = Literal["uniform", "exponential", "linear"]


def exponential(drafts: int, delta: float, nu: float) -> list[float]:
    """delta exp(-nu d - mu) at depth d = 1 .. L, with mu such that the mean is delta (eq. 16)."""
    shape = [math.exp(-nu * depth) for depth in range(1, drafts + 1)]
    return [delta * value * drafts / sum(shape) for value in shape]


def linear(drafts: int, delta: float, slope: float) -> list[float]:
    """delta (1 + slope (L + 1 - 2 d) / (L - 1)), linear with mean delta (the idea of eq. 17; its exact form is not
    public)."""
    if drafts == 1:
        return [delta]
    return [delta * (1 + slope * (drafts + 1 - 2 * depth) / (drafts - 1)) for depth in range(1, drafts + 1)]


class DepthWeighted(RatioTest):
    """min(1, w_d p/q) at draft depth d (UniformRSD and Cool-SD, arXiv 2601.09212); no weight is below `floor`.

    Weights above 1 accept more and are lossy; weights below 1 reject more, and are unbiased under the `optimal`
    residual only. Cool-SD's claim: weights that decrease with depth cost less quality than weights that increase.
    """

    def __init__(self, context: Context, schedule: Schedule, delta: float, nu: float, slope: float, floor: float):
        super().__init__(context)
        drafts = max(context.drafts, 1)
        weights = [delta] * drafts  # eq. 13
        if schedule != "uniform":
            weights = linear(drafts, delta, slope) if schedule == "linear" else exponential(drafts, delta, nu)
        self.weights = torch.tensor([max(floor, weight) for weight in weights], device=context.device)

    def acceptance(self, p: Tensor, q: Tensor, x: Tensor, depth: int | Tensor = 1) -> Tensor:
        place = torch.as_tensor(depth, device=self.weights.device).clamp(max=len(self.weights)) - 1
        return self.weights[place][..., None] * ratio(p, q, x)


class Block(Exact):
    """Block verification (Sun et al., ICLR 2025, arXiv 2403.10444, algorithm 2): accept the drafts of a chain up to the
    last draft whose coin falls below its h.

    With r_i = p_i(x_i)/q_i(x_i) of draft i = 1 .. L:

        P_0 = 1,  P_i = min(1, P_{i-1} r_i)
        S_i = sum_v [P_i p_{i+1}(v) - q_{i+1}(v)]+,  h_i = S_i / (S_i + 1 - P_i) for i < L,  h_L = P_L
        accept the first n drafts: n is the largest i whose coin is below h_i, or 0 if there is none
        draw the next token from [P_n p_{n+1} - q_{n+1}]+ if n < L, from p_{L+1} if n = L

    If all P_i are 1 this is the usual test of each draft in turn. On average, the rule never accepts fewer drafts than
    that test. The number of accepted drafts depends on the drafts after them, so these must be discarded: the rule is
    lossless only if every draft of the next step is redrawn.
    """

    def __init__(self, context: Context, any_tail: bool = False):
        """`any_tail`: also allow drafts that are not redrawn; read when decoders are resolved, not here."""
        super().__init__(context)
        self._length = context.layout.length

    def verify(self, tests: DraftTests, refined: Tensor) -> Verdict:
        # Slots past the end hold no drafts: an image must not depend on the progress of other rows of its batch.
        exists = tests.drafted & (tests.position < self._length)
        reach = joint_ratio(torch.where(exists, tests.ratio, 0.0))
        following = torch.nn.functional.pad(exists[:, 1:], (0, 1))
        scaled = reach[:, :-1, None].to(tests.p.dtype) * tests.p[:, 1:]
        excess = (scaled - tests.q[:, 1:]).clamp_(min=0).sum(-1, dtype=torch.float64)
        excess = torch.nn.functional.pad(excess, (0, 1))
        bound = excess + 1 - reach
        h = torch.where(following, torch.where(bound > 0, excess / bound, 1.0), reach)
        passed = exists & (tests.coin < h)
        accepted = passed.flip(1).cummax(1).values.flip(1)
        return Verdict(accepted, {}, torch.nn.functional.pad(reach[:, :-1], (1, 0), value=1.0))


def joint_ratio(r: Tensor) -> Tensor:
    """Return P_i = min(1, P_{i-1} r_i), P_0 = 1, of ratios r [B, K]: float64 [B, K]."""
    # log P_i is the sum of all logarithms minus the largest sum so far, if that is positive.
    total = r.double().log().cumsum(1)
    return (total - total.cummax(1).values.clamp(min=0)).exp()


class Match:
    """Accept iff the slot's refined token equals the draft; after a mismatch commit the refined token (Jacobi).

    Lossless whenever the refinement draws from p: the committed token is always the refined token.
    """

    compares = True

    def __init__(self, context: Context):
        pass

    def verify(self, tests: DraftTests, refined: Tensor) -> Verdict:
        return Verdict(refined == tests.draft, {})

    def residual_weights(self, tests: DraftTests | FailedTest) -> Tensor:
        return tests.p


def or_target(weights: Tensor, p: Tensor) -> Tensor:
    """Return `weights`, or p if all are zero: then p equals q, and the rejection is a rounding error."""
    return torch.where(weights.sum(-1, keepdim=True) > 0, weights, p)


def standard(p: Tensor, q: Tensor, acceptance: Acceptance | None = None) -> Tensor:
    """[p - q]+, the residual of the exact acceptance min(1, p/q) (Leviathan et al. 2023, theorem 1)."""
    return or_target((p - q).clamp_(min=0), p)


def optimal(p: Tensor, q: Tensor, acceptance: Acceptance) -> Tensor:
    """[p - a q]+, the residual closest to p in total variation for any acceptance a (Cool-SD, theorem 1)."""
    tokens = torch.arange(p.shape[-1], device=p.device).expand(p.shape)
    accepted = acceptance(p, q, tokens).clamp(max=1) * q
    return or_target((p - accepted).clamp_(min=0), p)
