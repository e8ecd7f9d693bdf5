"""Kinds of log p that programs return with each token. They differ in logits, temperature and set of tokens.

By default vLLM returns log-softmax of the raw logits over the whole vocabulary, SGLang log-softmax at the temperature,
other programs log p after truncation. Values of the right kind agree with the model's up to rounding.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import product
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import pandas as pd

from specbench.checks.teacher_forced import forced_logits, pieces
from specbench.models.interface import ImageModel, Session
from specbench.specs.run_spec import Sampling

if TYPE_CHECKING:
    from torch import Tensor

# Imports inside functions: torch takes seconds, and the command line needs only the names of the kinds.

SAMPLED = "sampled"
_DIGITS = 1e-5  # Change of log p in nats by other tensor shapes in float32
_EQUAL = 1e-3  # Distances in nats far below this count as equal


class LogpKind(NamedTuple):
    """A kind of log p."""

    text: str  # description
    sampled: bool = False  # after truncation
    tempered: bool = False  # at the temperature; only if not `sampled`
    words: bool = False  # normalised over the whole vocabulary, not only over image tokens
    guided: bool = True


_GUIDED = {
    SAMPLED: LogpKind("after all sampling settings", sampled=True),
    "tempered": LogpKind("after temperature, before truncation, over the image tokens", tempered=True),
    "raw": LogpKind("before temperature and truncation, over the image tokens"),
    "tempered-words": LogpKind(
        "after temperature, before truncation, over the whole vocabulary", tempered=True, words=True
    ),
    "raw-words": LogpKind(
        "before temperature and truncation, over the whole vocabulary, as vLLM returns it by default", words=True
    ),
}
LOGP_KINDS = _GUIDED | {
    f"conditional-{name}": kind._replace(text=f"{kind.text}, without guidance", guided=False)
    for name, kind in _GUIDED.items()
}
"""Each kind of log p, by name."""


def kinds_of(model: ImageModel, sampling: Sampling) -> list[str]:
    """List the kinds whose values differ for this model and sampling."""
    filtered = bool(sampling.filters)
    scaled = sampling.temperature != 1 or sampling.entropy_scale is not None
    words = getattr(model, "vocabulary", None) is not None

    def differs(kind: LogpKind) -> bool:
        if (kind.words and not words) or (not kind.guided and sampling.guidance == 1):
            return False
        if kind.tempered:
            return scaled and (kind.words or filtered)
        return kind.sampled or kind.words or filtered or scaled

    return [name for name, kind in LOGP_KINDS.items() if differs(kind)]


def log_p_of(
    model: ImageModel, rows: pd.DataFrame, sampling: Sampling, kinds: Sequence[str], asked: np.ndarray | None = None
) -> dict[str, np.ndarray]:
    """By kind, log p [K, N] of the images' tokens, or of tokens `asked` [K, N], given the images' earlier tokens."""
    import torch

    from specbench.system.torch_state import PinnedTorch

    stream, (width, batch) = np.stack(rows["tokens"]).astype(np.int64), pieces(model)
    asked = stream if asked is None else asked.astype(np.int64)
    found = {kind: np.zeros(stream.shape, np.float32) for kind in kinds}
    scales = {kind: sampling.guidance if LOGP_KINDS[kind].guided else 1.0 for kind in kinds}
    with PinnedTorch():
        for start, scale in product(range(0, len(rows), batch), set(scales.values())):
            some = slice(start, start + batch)
            texts = rows["prompt"].iloc[some].tolist()
            for logits, positions, session in forced_logits(model, texts, stream[some], scale, width):
                part = slice(int(positions[0, 0]), int(positions[0, -1]) + 1)
                chosen = torch.from_numpy(asked[some, part]).to(model.device)
                of_kind = _of_logits(model, session, replace(sampling, guidance=scale), logits, positions, chosen)
                for kind in [kind for kind in kinds if scales[kind] == scale]:
                    found[kind][some, part] = of_kind(LOGP_KINDS[kind]).cpu().numpy()
    return found


def _of_logits(
    model: Any, session: Session, sampling: Sampling, logits: Tensor, positions: Tensor, chosen: Tensor
) -> Callable[[LogpKind], Tensor]:
    """Return {kind: log p [B, T] of the tokens} as a function; `logits`: result of the session's latest forward."""
    from specbench.decoding.sampling import Target, at

    raw = words = logits
    if (features := getattr(session, "features", None)) is not None:
        # Logits of the network, before a model's repetition penalty.
        raw = model.guide(model.head(features).float(), sampling.guidance, positions)
    if getattr(model, "vocabulary", None) is not None:
        words = model.guide(model.all_words(features).float(), sampling.guidance, positions)
    inside = chosen.clamp(max=logits.shape[-1] - 1)

    def log_p(kind: LogpKind) -> Tensor:
        if kind.sampled:
            return at(Target(model.layout, sampling, logits.device)(logits, positions), chosen).log()
        temperature = sampling.temperature if kind.tempered else 1.0
        every = words if kind.words else raw
        return at(raw, inside) / temperature - (every / temperature).logsumexp(-1)

    return log_p


def typical_distance(recorded: np.ndarray, logp: np.ndarray, free: np.ndarray) -> float:
    """Mean logarithm of the distances in the slots that are `free`: a few wrong values hardly change it."""
    with np.errstate(invalid="ignore"):
        away = np.minimum(np.abs(recorded - logp)[free], 1.0)
    return float(np.nanmean(np.log(away + _EQUAL)))


def nearer(claimed: np.ndarray, other: np.ndarray) -> np.ndarray:
    """[K] log likelihood ratio of two Laplace-distributed errors of log p; 0 unless `claimed` errors are far larger."""
    both = np.isfinite(claimed) & np.isfinite(other)
    errors = [np.where(both, error, 0.0) for error in (claimed, other)]
    mine, theirs = (error.sum() / max(1, both.sum()) + _DIGITS for error in errors)
    if mine < 2 * theirs:
        return np.zeros(len(both))
    return (errors[0] / mine - errors[1] / theirs + math.log(mine / theirs) * both).sum(1)
