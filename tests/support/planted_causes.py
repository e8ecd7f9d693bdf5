"""Images that a program drew in another way than it claims, by the usual faults, at three strengths each."""

from dataclasses import replace

import numpy as np
import pandas as pd
import torch

from specbench.checks.teacher_forced import teacher_forced_values
from specbench.decoding.loop import Decoding, decode_tokens
from specbench.prompts import Request
from specbench.specs.presets import resolve
from specbench.specs.run_spec import Sampling

SETTINGS = {
    "guidance": [{"guidance": 2.5}, {"guidance": 4.0}, {"guidance": 7.0}],
    "temperature": [{"temperature": 0.8}, {"temperature": 1.2}, {"temperature": 1.4}],
    "top-k": [{"top_k": 20}, {"top_k": 10}, {"top_k": 5}],
    "top-p": [{"top_p": 0.8}, {"top_p": 0.7}, {"top_p": 0.5}],
    "no unconditional row": [{"guidance": 1.0}],
}
"""By cause, what a program really sampled with."""


def drawn(model, texts, sampling: Sampling, seed: int = 5) -> np.ndarray:
    """[K, N] tokens of one image of each text."""
    requests = [Request(text, f"p{number}") for number, text in enumerate(texts)]
    return np.stack([row.numpy() for row in decode_tokens(Decoding(model, resolve("ar"), sampling, seed), requests)])


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
    for layer in (part for part in transformer.modules() if isinstance(part, torch.nn.Linear)):
        step = layer.weight.abs().amax(1, keepdim=True) / 127
        layer.weight.data = (layer.weight / step).round() * step


def log_p(model, rows: pd.DataFrame, sampling: Sampling) -> list[np.ndarray]:
    """Log p of the rows' tokens as `model` finds it, an image at a time as an engine would."""
    return [teacher_forced_values(model, rows.iloc[[n]], sampling).logp[0] for n in range(len(rows))]


__all__ = ["SETTINGS", "as_rows", "drawn", "in_format", "log_p", "reordered", "replace"]
