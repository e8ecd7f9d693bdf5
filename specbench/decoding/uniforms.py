"""Conditional distribution functions of the committed tokens (Rosenblatt transform), recorded while decoding.

For a token x_i with target distribution p_i given the true prefix,

    u_i = sum_{y before x_i} p_i(y) + v_i p_i(x_i),    v_i uniform on (0, 1) and used only here,

where "before" is an order of the vocabulary. Let F_i hold all noise of the stream slots before i, and, where the
recorded q is one-hot, the draw of slot i's first draft. For all drafters here the following are functions of F_i: p of
slot i in every step before its verification, the distributions of its drafts, the step that verifies it and its place
in that step's window. The reason is that the noise of slot i affects no decision before the step that commits it: a
draft that was not tested has not been read, and each refinement draws slot i with noise of slot i from distributions of
F_i (with `couple` and `gumbel` consecutive drafts of a slot depend on each other, but each follows its recorded q given
F_i). A lossless verifier then gives x_i ~ p_i given F_i. So for every order that is a function of F_i, u_i is uniform
given F_i; and as u_1 .. u_{i-1} are functions of F_i and of their own v, all u_i of a run are independent uniforms.
This also holds for subsets chosen by functions of F_i (place in the window, entropy of p_i), but not for subsets chosen
by outcomes (accepted or replaced, kept or redrawn). In particular the distribution in which a draft was first drawn,
before refinements kept it, is not a function of F_i: whether it was kept depends on the draft.

With a verifier that looks ahead, the step that commits slot i does depend on noise of slot i. There, F_i is instead all
noise of earlier steps, the tokens before i, and that the step commits slot i: `block` gives x_i ~ p_i given these, and
the rest of the argument is the same.

Tokens of equal rank form one block, in which v_i decides.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import groupby
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional

from specbench.decoding.draft_tree import Routes
from specbench.decoding.generation import ORDERS
from specbench.decoding.interfaces import Proposal, Verification
from specbench.decoding.noise import Noise
from specbench.decoding.sampling import at

WAITING = 128 * 2**10
"""Bytes of distributions that may wait to be computed."""


def mass_before(score: Tensor, p: Tensor, tokens: Tensor) -> tuple[Tensor, Tensor]:
    """Target mass [...] of tokens with a higher score than `tokens` [...], and of tokens with at least that score.

    Args:
        score, p: [..., V].
    """
    own = at(score, tokens)[..., None]
    return torch.where(score > own, p, 0.0).sum(-1), torch.where(score >= own, p, 0.0).sum(-1)


def mass_before_id(p: Tensor, tokens: Tensor) -> tuple[Tensor, Tensor]:
    """`mass_before` in the order of token ids."""
    through = at(p.cumsum(-1), tokens)
    return through - at(p, tokens), through


def ratio_score(numerator: Tensor, denominator: Tensor) -> Tensor:
    """numerator / denominator [..., V], large but finite where the denominator is 0, and 0 for 0/0."""
    return numerator / denominator.clamp(min=torch.finfo(denominator.dtype).tiny)


def uniforms(before: np.ndarray, through: np.ndarray, v: np.ndarray) -> np.ndarray:
    """Rosenblatt uniforms in [0, 1], float32, from the mass before a token, the mass through it, and v."""
    return np.clip(before + v * (through - before), 0.0, 1.0).astype(np.float32)


class _Seen(NamedTuple):
    """What the masses of the first T slots of a step's path are computed from. B rows.

    Attributes:
        places: [B, T] where each slot's masses are kept.
        tokens, p: [B, T] and [B, T, V] tokens and target distributions.
        q, drafted: [B, T, V] distribution of the first draft tested in each slot, and [B, T] whether there was one;
            None in a forward without drafts.
        q_before, kept: [B, T, V] that draft's distribution one step before, and [B, T] whether there was one; None
            where drafts do not outlive a step.
    """

    places: Tensor
    tokens: Tensor
    p: Tensor
    q: Tensor | None = None
    drafted: Tensor | None = None
    q_before: Tensor | None = None
    kept: Tensor | None = None

    def masses(self) -> list[Tensor]:
        """Masses before and through each token [B, T], NaN where undefined, in the order of `ORDERS`."""
        found = [*mass_before_id(self.p, self.tokens), *mass_before(self.p, self.p, self.tokens)]
        if self.q is not None:
            found += _where(self.drafted, mass_before(ratio_score(self.p, self.q), self.p, self.tokens))
        if self.q_before is not None:
            found += _where(self.kept, mass_before(ratio_score(self.q, self.q_before), self.p, self.tokens))
        return found

    def copied(self) -> _Seen:
        """The same without the memory of the slots left out."""
        return self._replace(p=self.p.clone(), q=None if self.q is None else self.q.clone())

    @property
    def bytes(self) -> int:
        return sum(own.nbytes for own in (self.p, self.q, self.q_before) if own is not None)


def _joined(steps: Sequence[_Seen]) -> _Seen:
    """Consecutive steps of one kind as one."""
    if len(steps) == 1:
        return steps[0]
    return _Seen(*(None if field[0] is None else torch.cat(field, 1) for field in zip(*steps, strict=True)))


class UniformsRecorder:
    """Recorder of the masses before and through each committed token of a batch. B rows, N stream slots.

    Eager steps on a CPU are collected and computed together, because their many small operations would cost more than
    the arithmetic.
    """

    def __init__(self, rows: int, slots: int, noise: Noise, device: torch.device):
        """`slots`: N plus the window."""
        self._noise = noise
        self._slots = slots
        # One more place takes what is not committed.
        self._masses = torch.full((2 * len(ORDERS), rows, slots + 1), torch.nan, device=device)
        self._rows = torch.arange(rows, device=device)[:, None]
        self._slot = torch.arange(slots, device=device)
        self._drafted = torch.ones(rows, slots, dtype=torch.bool, device=device)
        self._waiting: list[_Seen] = []
        self._bytes = 0

    def note(self, verified: Verification, proposal: Proposal, tables: Routes | None, positions: Tensor) -> None:
        """Record the slots `positions` [B, T] of one step.

        `tables` of the proposal's tree, None for a chain.
        """
        if positions.device.type != "cpu" or torch.compiler.is_compiling():
            # Slots that are not committed are overwritten by a later step.
            self._compute(self._seen(verified, proposal, tables, positions))
            return
        # No sync on a CPU; most of a window is not committed.
        count = 1 if positions.shape[1] == 1 else int(verified.first.max()) + 1
        places = positions[:, :count]
        if len(places) > 1:
            committed = self._slot[:count] <= verified.first[:, None]
            places = torch.where(committed, places, self._slots)
        seen = self._seen(verified, proposal, tables, places)
        if seen.bytes > WAITING // 4:
            self._compute(seen)
            return
        self._waiting.append(seen.copied())
        self._bytes += seen.bytes
        if self._bytes > WAITING:
            self._flush()

    def _seen(self, verified: Verification, proposal: Proposal, tables: Routes | None, places: Tensor) -> _Seen:
        """Select what belongs to the first T slots, T being the width of `places` [B, T]."""
        count = places.shape[1]
        seen = _Seen(places, verified.tokens[:, :count], verified.p[:, :count])
        if proposal.tokens.shape[1] == 1:
            return seen
        if tables is None:
            q, drafted = proposal.q[:, :count], self._drafted[:, :count]
            if q.shape[1] < count:  # the last column of a chain has no draft
                q, drafted = functional.pad(q, (0, 0, 0, 1)), functional.pad(drafted[:, 1:], (0, 1))
        else:
            columns = verified.columns[:, :count]
            q, drafted = proposal.q[self._rows, columns], tables.has_children[columns]
        seen = seen._replace(q=q, drafted=drafted)
        if proposal.earlier is None:
            return seen
        before, start, drafts = proposal.earlier
        slot = self._slot[:count]
        place = start[:, None] + slot
        kept = drafted & (slot < drafts[:, None]) & (place < before.shape[1])
        return seen._replace(q_before=before[self._rows, place.clamp(max=before.shape[1] - 1)], kept=kept)

    def _flush(self) -> None:
        """Compute what was collected."""
        for _, steps in groupby(self._waiting, key=lambda seen: (seen.q is None, seen.q_before is None)):
            self._compute(_joined(list(steps)))
        self._waiting, self._bytes = [], 0

    def _compute(self, seen: _Seen) -> None:
        masses = seen.masses()
        masses += [torch.full_like(masses[0], torch.nan)] * (len(self._masses) - len(masses))
        self._masses.scatter_(2, seen.places.expand(len(masses), -1, -1), torch.stack(masses))

    def rows(self, rows: Tensor, length: int) -> dict[str, np.ndarray]:
        """Uniforms u_i [K, length] of the complete `rows` [K] by order; orders without a slot are omitted."""
        self._flush()
        slots = torch.arange(length, device=self._rows.device).expand(len(self._rows), -1)
        v = self._noise.tie_break(slots)[rows].cpu().numpy()
        masses = self._masses[:, rows, :length].cpu().numpy()
        found = {name: uniforms(*masses[2 * k : 2 * k + 2], v) for k, name in enumerate(ORDERS)}
        return {name: u for name, u in found.items() if not np.isnan(u).all()}


def _where(known: Tensor, masses: tuple[Tensor, Tensor]) -> list[Tensor]:
    return [torch.where(known, mass, torch.nan) for mass in masses]
