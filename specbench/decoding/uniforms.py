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

Tokens of equal rank form one block, in which v_i decides.
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from specbench.decoding.draft_tree import Routes
from specbench.decoding.generation import ORDERS
from specbench.decoding.interfaces import Proposal, Verification
from specbench.decoding.noise import Noise
from specbench.decoding.sampling import at


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


class UniformsRecorder:
    """Recorder of the masses before and through each committed token of a batch. B rows, N stream slots."""

    def __init__(self, rows: int, slots: int, noise: Noise, device: torch.device):
        """`slots`: N plus the window."""
        self._noise = noise
        self._masses = torch.full((2 * len(ORDERS), rows, slots), torch.nan, device=device)
        self._rows = torch.arange(rows, device=device)[:, None]

    def note(self, verified: Verification, proposal: Proposal, tables: Routes | None, positions: Tensor) -> None:
        """Record the slots `positions` [B, T] of one step; uncommitted ones are overwritten by a later step.

        `tables` of the proposal's tree, None for a chain.
        """
        count = positions.shape[1]
        if positions.device.type == "cpu" and not torch.compiler.is_compiling():
            count = int(verified.first.max()) + 1  # no sync on a CPU, and most of a window is not committed
        p, tokens = verified.p[:, :count], verified.tokens[:, :count]
        masses = [*mass_before_id(p, tokens), *mass_before(p, p, tokens)]
        if proposal.tokens.shape[1] > 1:
            q, drafted = self._path_q(verified, proposal, tables, count)
            masses += _where(drafted, mass_before(ratio_score(p, q), p, tokens))
            if proposal.earlier is not None:
                place = proposal.earlier.place[:, :count]
                place = torch.nn.functional.pad(place, (0, count - place.shape[1]), value=-1)
                growth = ratio_score(q, proposal.earlier.q[self._rows, place.clamp(min=0)])
                masses += _where(drafted & (place >= 0), mass_before(growth, p, tokens))
        masses += [torch.full_like(masses[0], torch.nan)] * (len(self._masses) - len(masses))
        places = positions[:, :count].expand(len(masses), -1, -1)
        self._masses.scatter_(2, places, torch.stack(masses))

    def _path_q(
        self, verified: Verification, proposal: Proposal, tables: Routes | None, count: int
    ) -> tuple[Tensor, Tensor]:
        """q [B, T, V] of the first draft tested in each of the first T = `count` slots, and [B, T] whether there was
        one."""
        if tables is None:
            q = proposal.q[:, :count]
            drafted = torch.arange(count, device=q.device).expand(len(q), -1) < q.shape[1]
            return torch.nn.functional.pad(q, (0, 0, 0, count - q.shape[1])), drafted
        columns = verified.columns[:, :count]
        return proposal.q[self._rows, columns], tables.has_children[columns]

    def rows(self, rows: Tensor, length: int) -> dict[str, np.ndarray]:
        """Uniforms u_i [K, length] of the complete `rows` [K] by order; orders without a slot are omitted."""
        slots = torch.arange(length, device=self._rows.device).expand(len(self._rows), -1)
        v = self._noise.tie_break(slots)[rows].cpu().numpy()
        masses = self._masses[:, rows, :length].cpu().numpy()
        found = {name: uniforms(*masses[2 * k : 2 * k + 2], v) for k, name in enumerate(ORDERS)}
        return {name: u for name, u in found.items() if not np.isnan(u).all()}


def _where(known: Tensor, masses: tuple[Tensor, Tensor]) -> list[Tensor]:
    return [torch.where(known, mass, torch.nan) for mass in masses]
