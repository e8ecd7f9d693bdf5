"""A teacher-forced pass over stored images: each token's p given all tokens before it, in one forward per piece; and
whether rounding explains the distance of a run's recorded values to it.

In float32 the two are equal but for the last digits. In a number format of fewer bits they are two roundings of the
same value, and guidance multiplies the distance. The effect of rounding is measured on tokens that are drawn from p in
that format and evaluated there and in float32, not on the run's own tokens: a fault of the run must not widen its
tolerance.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import pandas as pd

from specbench.models.interface import ImageModel
from specbench.specs.run_spec import Sampling

if TYPE_CHECKING:
    from torch import Tensor

# Imports inside functions: torch takes seconds, and only recomputed numbers need it.

_CHUNK = (
    2**22
)  # Maximum number of probabilities in a tensor: the kernel allocates the memory of larger tensors in every call
EDGE = 0.001  # A token is possible if it is with this many nats more, and with so much more top-p
EDGES = 0.02  # Share of the tokens that a setting may put beyond a filter if it is an estimate
COMPARED = {"logp": "log p", "u_id": "u by token id", "u_p": "u by p descending", "entropy": "entropy"}
"""Printed names of the recorded values that are compared with those recomputed."""
_JUDGED = ("logp", "u_id")
"""Values that are judged in fewer bits: rounding swaps ranks of p, which moves u by p too far to judge."""
_TOLERANCE = 0.01
"""Difference of a float32 run's recorded value to the recomputed one, in nats or of u, beyond the last digits."""
_BEYOND = 0.001
"""Share of the tokens of a float32 run that may be beyond it: a token at the edge of top-p falls to either side."""
_ROUNDING = 2.0
"""Largest ratio of the distance between two roundings to the distance of a rounding from the exact value."""
_ERRORS = 5.0  # Standard errors, the larger of over tokens and over images, by which a mean must exceed it
_FLIPS = 5.0  # Tokens that rounding moves by a nat; a control may have none by chance
_FEW = 8  # Images whose spread is no estimate: fewer
_SLACK = 0.001  # Difference of mean entropies, in nats, that is no verdict


Shift = tuple[int, ...]


class Values(NamedTuple):
    """Input of the test, for K images of N stream slots."""

    u: dict[str, np.ndarray]  # [K, N] uniforms of the Rosenblatt transform by order, NaN for images without it
    entropy: np.ndarray  # [K, N] of p
    logp: np.ndarray | None = None  # [K, N] of the tokens under p
    possible: np.ndarray | None = None  # [K, N] bool, whether the target can draw the token
    tokens: np.ndarray | None = None  # [K, N] that the values are of


def teacher_forced_values(
    model: ImageModel, rows: pd.DataFrame, sampling: Sampling, asked: np.ndarray | None = None, draw: bool = False
) -> Values:
    """Values by token id and by p descending, log p and possible tokens, each token given the image's before it: of the
    K images of `rows`, of tokens `asked` [K, N] in the place of theirs, or of tokens that it shall `draw` from p."""
    from specbench.decoding.noise import Noise, row_key
    from specbench.decoding.uniforms import uniforms

    length = model.layout.length
    width, batch = pieces(model)
    batches = []
    for start in range(0, len(rows), batch):
        part = rows.iloc[start : start + batch]
        of = None if draw else np.stack(part["tokens"]) if asked is None else asked[start : start + batch]
        masses = [np.concatenate(parts, 1) for parts in zip(*_masses(model, part, sampling, width, of), strict=True)]
        keys = [row_key(int(row.seed), row.prompt_id, int(row.sample)) for row in part.itertuples()]
        v = Noise(keys, model.layout.vocab).tie_break(slots_of(len(part), 0, length)).numpy()
        batches.append([uniforms(*masses[:2], v), uniforms(*masses[2:4], v), *masses[4:]])
    by_id, by_p, *others = (np.concatenate(piece) for piece in zip(*batches, strict=True))
    return Values({"u_id": by_id, "u_p": by_p}, *others)


def _masses(
    model: ImageModel, part: pd.DataFrame, sampling: Sampling, width: int, of: np.ndarray | None
) -> Iterator[list[np.ndarray]]:
    """For `width` slots at a time: masses before and through the tokens `of` [B, N] (None: drawn from p) by id and by
    p, entropy, log p, whether the tokens are possible, and these tokens, [B, width]."""
    import torch

    from specbench.decoding.sampling import Target, at, entropy
    from specbench.decoding.uniforms import mass_before, mass_before_id
    from specbench.system.torch_state import PinnedTorch

    generator = torch.Generator(model.device).manual_seed(0)
    with PinnedTorch():
        target = Target(model.layout, sampling, model.device)
        # At most half of what top-p leaves out, so that something is left out.
        wider = replace(sampling, top_p=sampling.top_p + min(EDGE, (1 - sampling.top_p) / 2))
        loose = Target(model.layout, wider, model.device)
        tokens = np.stack(part["tokens"]).astype(np.int64)
        for logits, positions in forced_logits(model, part["prompt"].tolist(), tokens, sampling.guidance, width):
            start, end = int(positions[0, 0]), int(positions[0, -1]) + 1
            p = target(logits, positions)
            if of is None:
                chosen = torch.multinomial(p.flatten(0, 1), 1, generator=generator).view(positions.shape)
            else:
                chosen = torch.from_numpy(of[:, start:end].astype(np.int64)).to(model.device)
            masses = (*mass_before_id(p, chosen), *mass_before(p, p, chosen), entropy(p), at(p, chosen).log())
            possible = at(p, chosen) > 0
            if not possible.all():
                token = chosen.clamp(max=logits.shape[-1] - 1)[..., None]
                raised = logits.scatter_add(-1, token, torch.full_like(token, EDGE, dtype=logits.dtype))
                possible = at(loose(raised, positions), chosen) > 0
            yield [mass.cpu().numpy() for mass in (*masses, possible, chosen)]


def forced_logits(
    model: ImageModel, prompts: Sequence[str], tokens: np.ndarray, guidance: float, width: int, shift: Shift = ()
) -> Iterator[tuple[Tensor, Tensor]]:
    """Guided logits [B, T, v_image] of every slot of `tokens` [B, N] given the tokens before it, and the slots [B, T],
    in groups of `width`; `shift`: the fault by one, as in `TransformerSession.move`."""
    import torch

    consumed = torch.nn.functional.pad(torch.from_numpy(tokens).to(model.device)[:, :-1], (1, 0))
    session = model.begin(model.encode(list(prompts)), guidance, width)
    if shift:
        session.move(*shift)
    for start in range(0, tokens.shape[1], width):
        positions = slots_of(len(tokens), start, min(start + width, tokens.shape[1])).to(model.device)
        yield session.forward(consumed[:, start : start + width], positions).float(), positions


def pieces(model: ImageModel) -> tuple[int, int]:
    """Slots and images per forward, from the number of probabilities that fits in memory."""
    width = max(1, min(model.layout.length, _CHUNK // model.layout.vocab))
    return width, max(1, min(16, _CHUNK // (model.layout.vocab * width)))


def slots_of(rows: int, start: int, end: int) -> Tensor:
    """[rows, end - start] stream slots from `start` to before `end`."""
    import torch

    return torch.arange(start, end).expand(rows, -1)


class Rounding(NamedTuple):
    """Effect of rounding on values of the run's model and prompts, in M of the run's images."""

    free: np.ndarray  # [M, N] bool, slots that the grammar leaves free
    # values in the run's number format, of tokens drawn from p in it, each given the image's own before it
    drawn: Values
    exact: Values  # values of the same tokens in float32


def compare_recorded(
    recorded: Mapping[str, np.ndarray], values: Values, free: np.ndarray, rounding: Rounding | None
) -> dict[str, dict[str, object]]:
    """Distance of recorded values ([K, N] by name of COMPARED, NaN for images without them) to values recomputed in the
    run's number format, in the slots that the grammar leaves `free`, and whether rounding explains it.

    Returns:
        By printed name: mean distance `mean` (of entropy in fewer bits: recorded minus recomputed, in which
        rounding averages out; it reveals another temperature), the share `beyond` 0.01, `differs`, and in fewer bits
        the mean distance from `rounding` and the number of `images` that are too far individually, else None.
    """
    distances = {}
    for name in [name for name in COMPARED if name in recorded]:
        gap = _gap(recorded[name], _value(values, name), free)
        if rounding is None:
            mean, beyond = float(np.nanmean(gap)), _share_beyond(gap)
            summary = {"mean": mean, "beyond": beyond, "rounding": None, "images": None, "differs": beyond > _BEYOND}
            distances[COMPARED[name]] = summary
            continue
        control = _gap(_value(rounding.drawn, name), _value(rounding.exact, name), rounding.free)
        if name == "entropy":
            signed = np.where(np.isnan(gap), np.nan, recorded[name] - values.entropy)
            moved = np.where(np.isnan(control), np.nan, rounding.drawn.entropy - rounding.exact.entropy)
            summary = _against(signed, moved, _SLACK) | {"images": None}
        elif name in _JUDGED:
            slots = (~np.isnan(gap)).sum(1)
            images = int(_outliers(np.nansum(gap, 1), np.nanmean(control, 1).max(), slots).sum())
            summary = _against(gap, control)
            summary |= {"images": images, "differs": summary["differs"] or images > 0}
        else:
            summary = _against(gap, control) | {"images": None, "differs": False}
        distances[COMPARED[name]] = summary
    return distances


def rounding_explains(impossible: np.ndarray, free: np.ndarray, rounding: Rounding) -> bool:
    """Whether rounding makes so many tokens [K, N] of probability 0, in each image and in all of them."""
    counts, slots = (impossible & free).sum(1), free.sum(1)
    lost, of = (~rounding.exact.possible & rounding.free).sum(1), rounding.free.sum(1)
    together = _outliers(counts.sum(), (lost.sum() + _FLIPS) / of.sum(), slots.sum())
    return not (together or _outliers(counts, (lost / of).max(), slots).any())


def _value(values: Values, name: str) -> np.ndarray:
    return {"logp": values.logp, "entropy": values.entropy, **values.u}[name]


def _gap(recorded: np.ndarray, other: np.ndarray, free: np.ndarray) -> np.ndarray:
    """[K, N] distances of values of `free` slots, at most 1 (if one p is 0); NaN if not free or missing."""
    with np.errstate(invalid="ignore"):
        gap = np.where(recorded == other, 0.0, np.abs(recorded - other))
    return np.where(free, np.minimum(gap, 1.0), np.nan)


def _share_beyond(gap: np.ndarray) -> float:
    return float((np.abs(gap[~np.isnan(gap)]) > _TOLERANCE).mean())


def _outliers(sums: np.ndarray, mean: float, tokens: np.ndarray) -> np.ndarray:
    """Whether sums over so many tokens, of terms of at most 1, are larger than rounding of this mean makes them: by
    Bernstein's inequality an expected sum m is exceeded by 6 sqrt(m) + 12 once in 10^5 times at most."""
    expected = _ROUNDING * mean * tokens
    return sums > expected + 6 * np.sqrt(expected) + 12


def _against(distance: np.ndarray, control: np.ndarray, slack: float = 0.0) -> dict[str, object]:
    """Means of the values [K, N] and of `control` [M, N], without NaN, and whether the first `differs` from 0 by more
    than such rounding, the chance of `control`, and `slack`. If rounding moves few tokens, but far, as between ties
    under top-k 1, `control` may have no such token: `_FLIPS` of them are allowed on either side."""
    distance, control = (values[~np.isnan(values).all(1)] for values in (distance, control))
    mean, rounding = float(np.nanmean(distance)), float(np.nanmean(control))
    tokens = [int((~np.isnan(values)).sum()) for values in (distance, control)]
    spread = np.nanvar(control) / tokens[1]
    if len(control) >= _FEW:
        spread = max(spread, np.nanmean(control, 1).var() / len(control))
    error = _ROUNDING * math.sqrt(spread * (1 + len(control) / len(distance)))
    unseen = 2 * _ROUNDING * _FLIPS / min(tokens)
    differs = abs(mean) > _ROUNDING * abs(rounding) + _ERRORS * error + unseen + slack
    return {"mean": mean, "beyond": _share_beyond(distance), "rounding": rounding, "differs": bool(differs)}
