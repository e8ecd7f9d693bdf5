"""Images that a program drew in another way than it claims, by the usual faults, at three strengths each."""

from dataclasses import replace

import numpy as np
import pandas as pd
import torch

from specbench.checks.teacher_forced import teacher_forced_values
from specbench.checks.token_likelihood import Alternative
from specbench.decoding.loop import Decoding, decode_tokens
from specbench.decoding.sampling import truncate
from specbench.prompts import Request
from specbench.specs.presets import resolve
from specbench.specs.run_spec import Sampling

SETTINGS = {
    "guidance": [{"guidance": 2.5}, {"guidance": 4.0}, {"guidance": 7.0}],
    "temperature": [{"temperature": 0.8}, {"temperature": 1.2}, {"temperature": 1.4}],
    "top-k": [{"top_k": 20}, {"top_k": 10}, {"top_k": 5}],
    "top-p": [{"top_p": 0.8}, {"top_p": 0.7}, {"top_p": 0.5}],
    "guidance had no effect": [{"guidance": 1.0}],
}
"""By cause, what a program really sampled with."""


def drawn(model, texts, sampling: Sampling, seed: int = 5) -> np.ndarray:
    """[K, N] tokens of an image of each text."""
    requests = [Request(text, f"p{number}") for number, text in enumerate(texts)]
    return np.stack([row.numpy() for row in decode_tokens(Decoding(model, resolve("ar"), sampling, seed), requests)])


@torch.inference_mode()
def drawn_by(model, texts, way: Alternative, seed: int, shift: tuple[int, ...] = ()) -> np.ndarray:
    """[K, N] tokens of an image of each text, drawn in any way; `shift`: offsets of positions."""
    draws, layout = torch.Generator().manual_seed(seed), model.layout
    tokens = torch.zeros(len(texts), layout.length, dtype=torch.long)
    session = model.begin(model.encode(list(texts)), way.sampling.guidance, 1)
    if shift:
        session.move(*shift)
    for slot in range(layout.length):
        if layout.forced[slot] >= 0:
            tokens[:, slot] = layout.forced[slot]
        position = torch.full((len(texts), 1), slot)
        before = tokens[:, slot - 1 : slot] if slot else torch.zeros(len(texts), 1, dtype=torch.long)
        logits = session.forward(before, position)[:, 0].float()
        if layout.forced[slot] < 0:
            tokens[:, slot] = _token(_penalised(logits, tokens[:, :slot], way), way, draws)
    return tokens.numpy()


def _penalised(logits: torch.Tensor, before: torch.Tensor, way: Alternative) -> torch.Tensor:
    count = torch.zeros(len(logits), logits.shape[-1] + 1).scatter_add_(1, before, torch.ones(before.shape))[:, :-1]
    repeated = torch.where(logits > 0, logits / way.repetition, logits * way.repetition)
    return torch.where(count > 0, repeated, logits) - way.frequency * count


def _token(logits: torch.Tensor, way: Alternative, draws: torch.Generator) -> torch.Tensor:
    sampling = way.sampling
    if way.early:
        logits = truncate(logits, replace(sampling, temperature=1.0)) / sampling.temperature
    else:
        logits = truncate(logits, sampling)
    token = torch.multinomial(logits.softmax(-1), 1, generator=draws)[:, 0]
    chance = torch.rand(len(token), generator=draws)
    token = torch.where(chance < way.greedy, logits.argmax(-1), token)
    anything = torch.randint(logits.shape[-1], token.shape, generator=draws)
    return torch.where(chance > 1 - way.uniform, anything, token)


def as_rows(model, texts, tokens) -> pd.DataFrame:
    forced = np.array(model.layout.forced) >= 0
    columns = {"prompt": list(texts), "tokens": list(tokens), "forced": [forced] * len(texts)}
    return pd.DataFrame(columns | {"prompt_id": [f"p{n}" for n in range(len(texts))], "sample": 0, "seed": 5})


def reordered(model, tokens: np.ndarray, order, images: int) -> np.ndarray:
    """The tokens of the first images in another order within the grid."""
    changed = tokens.copy()
    for rows in model.layout.rows:
        grid = np.array(rows)
        changed[:images, grid.ravel()] = tokens[:images][:, order(grid).ravel()]
    return changed


def in_format(transformer, dtype: str) -> None:
    """Put a transformer into a number format; "int8wo": matrices rounded to 255 steps, as torchao does."""
    if dtype != "int8wo":
        transformer.to(getattr(torch, dtype))
        return
    rounded(transformer, 127)


def rounded(transformer, steps: int) -> None:
    """Round matrices to so many steps on each side of 0."""
    for layer in (part for part in transformer.modules() if isinstance(part, torch.nn.Linear)):
        step = layer.weight.abs().amax(1, keepdim=True) / steps
        layer.weight.data = (layer.weight / step).round() * step


def log_p(model, rows: pd.DataFrame, sampling: Sampling) -> list[np.ndarray]:
    """Log p of the rows' tokens as `model` finds it, an image at a time as an engine would."""
    return [teacher_forced_values(model, rows.iloc[[n]], sampling).logp[0] for n in range(len(rows))]
