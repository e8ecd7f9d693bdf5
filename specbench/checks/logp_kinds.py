"""Kinds of log p that programs return with each token. They differ in logits, temperature and set of tokens.

By default vLLM returns log-softmax of the raw logits over the whole vocabulary, SGLang log-softmax at the temperature,
other programs log p after truncation. Values of the right kind agree with the model's up to rounding.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import product
from typing import TYPE_CHECKING, Any

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
_ALONE = "conditional-"
_OF_LOGITS = {
    SAMPLED: "after all sampling settings",
    "tempered": "after temperature, before truncation, over the image tokens",
    "raw": "before temperature and truncation, over the image tokens",
    "tempered-words": "after temperature, before truncation, over the whole vocabulary",
    "raw-words": "before temperature and truncation, over the whole vocabulary, as vLLM returns it by default",
}
LOGP_KINDS = _OF_LOGITS | {_ALONE + kind: f"{words}, without guidance" for kind, words in _OF_LOGITS.items()}
"""Description of each kind of log p, by name."""


def kinds_of(model: ImageModel, sampling: Sampling) -> list[str]:
    """List the kinds whose values differ for this model and sampling."""
    filtered = sampling.filters
    scaled = sampling.temperature != 1 or sampling.entropy_scale is not None
    words = getattr(model, "vocabulary", None) is not None
    kinds = [SAMPLED, *["tempered"] * bool(filtered and scaled), *["raw"] * bool(filtered or scaled)]
    kinds += [*["tempered-words"] * bool(words and scaled), *["raw-words"] * words]
    return kinds + [_ALONE + kind for kind in kinds if sampling.guidance != 1]


def log_p_of(
    model: ImageModel, rows: pd.DataFrame, sampling: Sampling, kinds: Sequence[str], asked: np.ndarray | None = None
) -> dict[str, np.ndarray]:
    """By kind, log p [K, N] of the images' tokens, or of tokens `asked` [K, N], given the images' earlier tokens."""
    import torch

    from specbench.system.torch_state import PinnedTorch

    stream, (width, batch) = np.stack(rows["tokens"]).astype(np.int64), pieces(model)
    asked = stream if asked is None else asked.astype(np.int64)
    found = {kind: np.zeros(stream.shape, np.float32) for kind in kinds}
    scales = {kind: 1.0 if kind.startswith(_ALONE) else sampling.guidance for kind in kinds}
    with PinnedTorch():
        for start, scale in product(range(0, len(rows), batch), set(scales.values())):
            some = slice(start, start + batch)
            texts = rows["prompt"].iloc[some].tolist()
            for logits, positions, session in forced_logits(model, texts, stream[some], scale, width):
                part = slice(int(positions[0, 0]), int(positions[0, -1]) + 1)
                chosen = torch.from_numpy(asked[some, part]).to(model.device)
                of_kind = _of_logits(model, session, replace(sampling, guidance=scale), logits, positions, chosen)
                for kind in [kind for kind in kinds if scales[kind] == scale]:
                    found[kind][some, part] = of_kind(kind.removeprefix(_ALONE)).cpu().numpy()
    return found


def _of_logits(
    model: Any, session: Session, sampling: Sampling, logits: Tensor, positions: Tensor, chosen: Tensor
) -> Callable[[str], Tensor]:
    """By kind, log p [B, T] of the tokens from the latest forward of a session, which returned `logits`."""
    from specbench.decoding.sampling import Target, at

    raw = words = logits
    if (features := getattr(session, "features", None)) is not None:
        # Logits of the network, before a model's repetition penalty.
        raw = model.guide(model.head(features).float(), sampling.guidance, positions)
    if getattr(model, "vocabulary", None) is not None:
        words = model.guide(model.all_words(features).float(), sampling.guidance, positions)
    inside = chosen.clamp(max=logits.shape[-1] - 1)

    def log_p(kind: str) -> Tensor:
        if kind == SAMPLED:
            return at(Target(model.layout, sampling, logits.device)(logits, positions), chosen).log()
        temperature = sampling.temperature if kind.startswith("tempered") else 1.0
        every = words if kind.endswith("words") else raw
        return at(raw, inside) / temperature - (every / temperature).logsumexp(-1)

    return log_p


def nearer(claimed: np.ndarray, other: np.ndarray) -> np.ndarray:
    """[K] log likelihood ratio of two Laplace-distributed errors of log p; 0 unless `claimed` errors are far larger."""
    both = np.isfinite(claimed) & np.isfinite(other)
    errors = [np.where(both, error, 0.0) for error in (claimed, other)]
    mine, theirs = (error.sum() / max(1, both.sum()) + _DIGITS for error in errors)
    if mine < 2 * theirs:
        return np.zeros(len(both))
    return (errors[0] / mine - errors[1] / theirs + math.log(mine / theirs) * both).sum(1)
