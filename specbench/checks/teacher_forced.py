"""Teacher-forced pass over stored images, which computes each token's p given all earlier tokens; and a test whether
rounding explains the distance between a run's recorded and recomputed values.

In float32 both values agree up to the last digits. In a number format with fewer bits they are two roundings of the
same value, and guidance multiplies the distance. The effect of rounding is measured on tokens that are drawn from p in
this format and evaluated in this format and in float32. The run's own tokens are not used, because a fault of the run
must not widen the tolerance.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import pandas as pd

from specbench.decoding.generation import Order
from specbench.models.interface import ImageModel
from specbench.specs.run_spec import Sampling

if TYPE_CHECKING:
    from torch import Tensor

# Imports inside functions: torch takes seconds, and only recomputed numbers need it.

# Maximum number of probabilities in a tensor; the memory of a larger tensor is allocated again in every call
_CHUNK = 2**22
EDGE = 0.001  # A token counts as possible if raising its logit and top-p by this much makes it possible
EDGES = 0.02  # Share of tokens that may be beyond a filter if the setting is an estimate
COMPARED = {"logp": "log p", "u_id": "u by token id", "u_p": "u by p descending", "entropy": "entropy"}
"""Printed names of the recorded values that are compared with recomputed values."""
_JUDGED = ("logp", "u_id")
"""Values compared if the run has fewer bits. u by p is not compared: it changes too much if rounding swaps ranks."""
_TOLERANCE = 0.01
"""Tolerance for a float32 run: difference between a recorded and a recomputed value, in nats or in u."""
_BEYOND = 0.001
"""Share of a float32 run's tokens that may exceed this tolerance: rounding moves tokens at the edge of top-p."""
_ROUNDING = 2.0
"""Two rounded values may differ by at most this many times the difference between a rounded and the exact value."""
_ERRORS = 5.0  # A mean must exceed rounding by this many standard errors (over tokens or images, whichever is larger)
_FLIPS = 5.0  # This many tokens may always move by a nat, because the control may lack moved tokens by chance
_FEW = 8  # With fewer images, the spread over images is not used
_SLACK = 0.001  # Difference of mean entropies, in nats, that is ignored


Shift = tuple[int, ...]


class Values(NamedTuple):
    """Input of the test, for K images of N stream slots."""

    u: dict[Order, np.ndarray]  # [K, N] uniforms of the Rosenblatt transform by order, NaN for images without it
    entropy: np.ndarray  # [K, N] of p
    # [K, N]: log p of the tokens; whether the target can draw them; the tokens. All None for recorded values
    logp: Any = None
    possible: Any = None
    tokens: Any = None


def teacher_forced_values(
    model: ImageModel, rows: pd.DataFrame, sampling: Sampling, asked: np.ndarray | None = None, draw: bool = False
) -> Values:
    """Compute u by token id and by descending p, log p, and whether tokens are possible, given the earlier tokens of
    the K images in `rows`: for the images' tokens, for the tokens `asked` [K, N], or, if `draw`, for draws from p."""
    from specbench.decoding.noise import Noise, row_key
    from specbench.decoding.uniforms import uniforms

    length = model.layout.length
    width, batch = pieces(model)
    batches = []
    for start in range(0, len(rows), batch):
        part = rows.iloc[start : start + batch]
        of = None if draw else np.stack(part["tokens"]) if asked is None else asked[start : start + batch]
        columns = zip(*_masses(model, part, sampling, width, of), strict=True)
        id_before, id_through, p_before, p_through, *others = (np.concatenate(pieces, 1) for pieces in columns)
        keys = [row_key(int(row.seed), row.prompt_id, int(row.sample)) for row in part.itertuples()]
        v = Noise(keys, model.layout.vocab).tie_break(slots_of(len(part), 0, length)).numpy()
        batches.append([uniforms(id_before, id_through, v), uniforms(p_before, p_through, v), *others])
    by_id, by_p, *others = (np.concatenate(piece) for piece in zip(*batches, strict=True))
    return Values({"u_id": by_id, "u_p": by_p}, *others)


def _masses(
    model: ImageModel, part: pd.DataFrame, sampling: Sampling, width: int, of: np.ndarray | None
) -> Iterator[list[np.ndarray]]:
    """Yield arrays [B, `width`], slots from the left: masses before and through the tokens by id and by p, entropy,
    log p, whether the tokens are possible, and the tokens. `of` [B, N]: the tokens; None: they are drawn from p."""
    import torch

    from specbench.decoding.sampling import Target, at, entropy
    from specbench.decoding.uniforms import mass_before, mass_before_id
    from specbench.system.torch_state import PinnedTorch

    generator = torch.Generator(model.device).manual_seed(0)
    with PinnedTorch():
        target = Target(model.layout, sampling, model.device)
        # Raise top-p by at most half of the mass that it excludes, so that it still excludes tokens.
        wider = replace(sampling, top_p=sampling.top_p + min(EDGE, (1 - sampling.top_p) / 2))
        loose = Target(model.layout, wider, model.device)
        tokens = np.stack(part["tokens"]).astype(np.int64)
        for logits, positions, _ in forced_logits(model, part["prompt"].tolist(), tokens, sampling.guidance, width):
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
) -> Iterator[tuple[Tensor, Tensor, Any]]:
    """For `width` slots of `tokens` [B, N] at a time, yield the guided logits [B, T, v_image] given the earlier tokens,
    the slots [B, T], and the session. `shift`: arguments of `TransformerSession.move`."""
    import torch

    consumed = torch.nn.functional.pad(torch.from_numpy(tokens).to(model.device)[:, :-1], (1, 0))
    session: Any = model.begin(model.encode(list(prompts)), guidance, width)
    if shift:
        session.move(*shift)
    for start in range(0, tokens.shape[1], width):
        positions = slots_of(len(tokens), start, min(start + width, tokens.shape[1])).to(model.device)
        yield session.forward(consumed[:, start : start + width], positions).float(), positions, session


def pieces(model: ImageModel) -> tuple[int, int]:
    """Slots and images per forward, so that a tensor holds at most `_CHUNK` probabilities."""
    width = max(1, min(model.layout.length, _CHUNK // model.layout.vocab))
    return width, max(1, min(16, _CHUNK // (model.layout.vocab * width)))


def slots_of(rows: int, start: int, end: int) -> Tensor:
    """[rows, end - start] stream slots from `start` to before `end`."""
    import torch

    return torch.arange(start, end).expand(rows, -1)


class Rounding(NamedTuple):
    """Effect of rounding, measured with the run's model and the prompts of M of the run's images."""

    free: np.ndarray  # [M, N] bool, slots that the grammar leaves free
    # values, in the run's number format, of tokens drawn from p in this format given the image's earlier tokens
    drawn: Values
    exact: Values  # values of the same tokens in float32


def compare_recorded(
    recorded: Mapping[str, np.ndarray], values: Values, free: np.ndarray, rounding: Rounding | None
) -> dict[str, dict[str, Any]]:
    """Distance between recorded values ([K, N] by name of COMPARED, NaN for images without them) and values recomputed
    in the run's number format, in the slots that the grammar leaves `free`, and whether rounding explains it.

    Returns:
        By printed name: `mean`, the mean distance (for entropy with fewer bits, recorded minus recomputed: rounding
        averages out, another temperature does not); `beyond`, the share above 0.01; `differs`; and, None in float32:
        `rounding`, the mean distance by rounding; `images`, the number of images that are too far individually.
    """
    distances: dict[str, dict[str, Any]] = {}
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
    """Return whether rounding explains the number of `impossible` tokens [K, N], in each image and in total."""
    counts, slots = (impossible & free).sum(1), free.sum(1)
    lost, of = (~rounding.exact.possible & rounding.free).sum(1), rounding.free.sum(1)
    together = _outliers(counts.sum(), (lost.sum() + _FLIPS) / of.sum(), slots.sum())
    return not (together or _outliers(counts, (lost / of).max(), slots).any())


def _value(values: Values, name: str) -> np.ndarray:
    recorded: Mapping[str, np.ndarray] = {"logp": values.logp, "entropy": values.entropy} | values.u
    return recorded[name]


def _gap(recorded: np.ndarray, other: np.ndarray, free: np.ndarray) -> np.ndarray:
    """[K, N] distances of values, at most 1 (which counts for p = 0); NaN for missing values and slots not `free`."""
    with np.errstate(invalid="ignore"):
        gap = np.where(recorded == other, 0.0, np.abs(recorded - other))
    return np.where(free, np.minimum(gap, 1.0), np.nan)


def _share_beyond(gap: np.ndarray) -> float:
    return float((np.abs(gap[~np.isnan(gap)]) > _TOLERANCE).mean())


def _outliers(sums: np.ndarray, mean: float, tokens: np.ndarray) -> np.ndarray:
    """Return whether `sums`, of `tokens` terms up to 1 each, exceed the sums that errors of this `mean` cause.
    By Bernstein's inequality, a sum exceeds its expectation m by 6 sqrt(m) + 12 with probability at most 10^-5."""
    expected = _ROUNDING * mean * tokens
    return sums > expected + 6 * np.sqrt(expected) + 12


def _against(distance: np.ndarray, control: np.ndarray, slack: float = 0.0) -> dict[str, Any]:
    """Compare `distance` [K, N] with `control` [M, N], the distances by rounding; NaN is skipped. Return both means,
    `beyond` (share of distances above _TOLERANCE), and `differs`: whether the mean exceeds _ROUNDING times the mean of
    `control`, plus _ERRORS standard errors, `slack`, and _FLIPS tokens that rounding moves far in `distance` alone."""
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
