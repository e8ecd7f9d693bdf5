"""A teacher-forced pass over stored images: each token's p given all tokens before it, in one forward per piece."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import pandas as pd

from specbench.models.interface import ImageModel
from specbench.specs.run_spec import Sampling

if TYPE_CHECKING:
    from torch import Tensor

# Imports inside functions: torch takes seconds, and only numbers that are computed anew need it.

_CHUNK = 2**24  # Maximum number of probabilities in memory
_EDGE = 0.001  # A token is possible if it is with this many nats more, and with so much more top-p


class Values(NamedTuple):
    """What the test reads of K images of N stream slots."""

    u: dict[str, np.ndarray]  # [K, N] uniforms of the Rosenblatt transform by order, NaN where an image has none
    entropy: np.ndarray  # [K, N] of p
    logp: np.ndarray | None = None  # [K, N] of the tokens under p
    possible: np.ndarray | None = None  # [K, N] bool, whether the target can draw the token
    tokens: np.ndarray | None = None  # [K, N] that the values are of


def teacher_forced_values(
    model: ImageModel, rows: pd.DataFrame, sampling: Sampling, asked: np.ndarray | None = None, draw: bool = False
) -> Values:
    """Values by token id and by p descending, log p and possible tokens, each token given the image's before it.

    Args:
        rows: K images: the key, `seed`, `prompt`, `tokens`.
        asked: [K, N] tokens to value in the place of the images' own.
        draw: value tokens drawn from p instead.
    """
    from specbench.decoding.noise import Noise, row_key
    from specbench.decoding.uniforms import uniforms

    length = model.layout.length
    width, batch = pieces(model)
    held = []
    for start in range(0, len(rows), batch):
        part = rows.iloc[start : start + batch]
        of = None if draw else np.stack(part["tokens"]) if asked is None else asked[start : start + batch]
        masses = [np.concatenate(one, 1) for one in zip(*_masses(model, part, sampling, width, of), strict=True)]
        keys = [row_key(int(row.seed), row.prompt_id, int(row.sample)) for row in part.itertuples()]
        v = Noise(keys, model.layout.vocab).tie_break(_slots(len(part), 0, length)).numpy()
        held.append([uniforms(*masses[:2], v), uniforms(*masses[2:4], v), *masses[4:]])
    by_id, by_p, *others = (np.concatenate(piece) for piece in zip(*held, strict=True))
    return Values({"u_id": by_id, "u_p": by_p}, *others)


def _masses(
    model: ImageModel, part: pd.DataFrame, sampling: Sampling, width: int, of: np.ndarray | None
) -> Iterator[list[np.ndarray]]:
    """For `width` slots at a time: masses before and through the tokens `of` [B, N] (None: drawn from p) by id and by
    p, entropy, log p, whether the tokens are possible, and these tokens, [B, width]."""
    import torch

    from specbench.decoding.sampling import Target, at, entropy
    from specbench.decoding.uniforms import mass_before, mass_before_id

    generator = torch.Generator(model.device).manual_seed(0)
    with torch.inference_mode():
        target = Target(model.layout, sampling, model.device)
        # At most half of what top-p leaves out, so that something is left out.
        wider = replace(sampling, top_p=sampling.top_p + min(_EDGE, (1 - sampling.top_p) / 2))
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
            own = chosen.clamp(max=logits.shape[-1] - 1)[..., None]
            raised = logits.scatter_add(-1, own, torch.full_like(own, _EDGE, dtype=logits.dtype))
            possible = at(loose(raised, positions), chosen) > 0
            yield [mass.cpu().numpy() for mass in (*masses, possible, chosen)]


def forced_logits(
    model: ImageModel, prompts: Sequence[str], tokens: np.ndarray, guidance: float, width: int
) -> Iterator[tuple[Tensor, Tensor]]:
    """Guided logits [B, T, v_image] of every slot of `tokens` [B, N] given those before, and the slots [B, T], `width`
    of them at a time."""
    import torch

    consumed = torch.nn.functional.pad(torch.from_numpy(tokens).to(model.device)[:, :-1], (1, 0))
    session = model.begin(model.encode(list(prompts)), guidance, width)
    for start in range(0, tokens.shape[1], width):
        positions = _slots(len(tokens), start, min(start + width, tokens.shape[1])).to(model.device)
        yield session.forward(consumed[:, start : start + width], positions).float(), positions


def pieces(model: ImageModel) -> tuple[int, int]:
    """Slots and images of one forward, by the probabilities that memory should hold."""
    width = max(1, min(model.layout.length, _CHUNK // model.layout.vocab))
    return width, max(1, min(16, _CHUNK // (model.layout.vocab * width)))


def _slots(rows: int, start: int, end: int):
    import torch

    return torch.arange(start, end).expand(rows, -1)
