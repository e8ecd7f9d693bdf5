"""Conditional distribution functions of the committed tokens (Rosenblatt transform), recorded while decoding.

For a token x_i with target distribution p_i given the true prefix,

    u_i = sum_{y before x_i} p_i(y) + v_i p_i(x_i),    v_i uniform on (0, 1) and used only here,

with "before" in some order of the vocabulary; tokens of equal rank form a block, in which v_i decides. Let F_i hold all
noise of the stream slots before i, and, if the recorded q is one-hot, the draw of slot i's first draft. The noise of
slot i affects no decision before the step that commits it. So p of slot i in every step, the distributions of its
drafts, the step that verifies it and its place in that step's window are functions of F_i. A lossless verifier gives
x_i ~ p_i given F_i. Hence for every order that is a function of F_i, u_i is uniform given F_i, and all u_i of a run are
independent uniforms. This also holds for subsets chosen by functions of F_i (place in the window, entropy of p_i), but
not by outcomes (accepted or replaced, kept or redrawn). If refinements have kept a draft, the distribution
from which it was first drawn is not a function of F_i.

For the verifier `block`, which looks ahead, F_i instead holds all noise of earlier steps, the tokens before i, and the
event that the step commits slot i. `block` gives x_i ~ p_i given this F_i; the rest of the argument is unchanged.
"""

import numpy as np
import torch
from torch import Tensor

from specbench.decoding.generation import ORDERS
from specbench.decoding.noise import Noise
from specbench.decoding.recorded_step import Committed
from specbench.decoding.sampling import at


def mass_before(score: Tensor, p: Tensor, tokens: Tensor) -> tuple[Tensor, Tensor]:
    """Target mass [...] of tokens with a higher score than `tokens` [...], and of tokens with at least that score.
    `score`, `p`: [..., V]."""
    score_of_token = at(score, tokens)[..., None]
    return torch.where(score > score_of_token, p, 0.0).sum(-1), torch.where(score >= score_of_token, p, 0.0).sum(-1)


def mass_before_id(p: Tensor, tokens: Tensor) -> tuple[Tensor, Tensor]:
    """`mass_before` in the order of token ids."""
    through = at(p.cumsum(-1), tokens)
    return through - at(p, tokens), through


def ratio_score(numerator: Tensor, denominator: Tensor) -> Tensor:
    """numerator / denominator [..., V]; x/0 is large but finite, and 0/0 is 0."""
    return numerator / denominator.clamp(min=torch.finfo(denominator.dtype).tiny)


def uniforms(before: np.ndarray, through: np.ndarray, v: np.ndarray) -> np.ndarray:
    """Return Rosenblatt uniforms in [0, 1], float32, from the mass before a token, the mass through it, and v."""
    return np.clip(before + v * (through - before), 0.0, 1.0).astype(np.float32)


class UniformsRecorder:
    """Recorder of the masses before and through each committed token of a batch. B rows, N stream slots."""

    def __init__(self, rows: int, slots: int, noise: Noise, device: torch.device):
        """`slots`: N plus the window."""
        self._noise = noise
        self._masses = torch.full((2 * len(ORDERS), rows, slots), torch.nan, device=device)

    def note(self, seen: Committed) -> None:
        """Record the masses of slots. They are NaN in orders that are undefined for a slot."""
        masses = [*mass_before_id(seen.p, seen.tokens), *mass_before(seen.p, seen.p, seen.tokens)]
        if seen.q is not None:
            masses += _where(seen.drafted, mass_before(ratio_score(seen.p, seen.q), seen.p, seen.tokens))
        if seen.q_before is not None:
            masses += _where(seen.kept, mass_before(ratio_score(seen.q, seen.q_before), seen.p, seen.tokens))
        masses += [torch.full_like(masses[0], torch.nan)] * (len(self._masses) - len(masses))
        self._masses[:, seen.rows, seen.positions] = torch.stack(masses)

    def rows(self, rows: Tensor, length: int) -> dict[str, np.ndarray]:
        """Uniforms u_i [K, length] of the complete `rows` [K] by order; orders without a slot are omitted."""
        slots = torch.arange(length, device=rows.device).expand(self._masses.shape[1], -1)
        v = self._noise.tie_break(slots)[rows].cpu().numpy()
        masses = self._masses[:, rows, :length].cpu().numpy()
        by_order = {name: uniforms(masses[2 * k], masses[2 * k + 1], v) for k, name in enumerate(ORDERS)}
        return {name: u for name, u in by_order.items() if not np.isnan(u).all()}


def _where(mask: Tensor, masses: tuple[Tensor, Tensor]) -> list[Tensor]:
    return [torch.where(mask, mass, torch.nan) for mass in masses]
