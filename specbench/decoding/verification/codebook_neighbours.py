"""Which codebook entries are nearest to each other: a table that is built once per codebook and kept on disk."""

from __future__ import annotations

import hashlib
import os
import tempfile
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from specbench.system.downloads import cache_folder

MOST = 1000
"""Neighbours kept per token."""

_ROWS = 1024


def neighbour_table(codebook: Tensor, raw: bool = False, folder: Path | None = None) -> Tensor:
    """int32 [V, min(MOST, V - 1)]: for each token the others by ascending distance, ties by id.

    Args:
        codebook: [V, d].
        raw: compare the rows as they are; else scaled to length 1 first, as quantisers that normalise compare them.
        folder: where tables are kept; the cache folder by default. One that cannot be written to is done without.
    """
    codebook = codebook.detach().float().cpu().contiguous()
    digest = hashlib.sha256(codebook.numpy().tobytes() + str(tuple(codebook.shape)).encode()).hexdigest()[:16]
    folder = folder or cache_folder() / "neighbours"
    path = folder / f"{digest}-{'raw' if raw else 'normalised'}.npy"
    if path.is_file():
        try:
            return torch.from_numpy(np.load(path))
        except (OSError, ValueError):
            pass  # a torn file: made anew below
    table = _build(codebook if raw else torch.nn.functional.normalize(codebook, dim=1))
    _write(path, table.numpy())
    return table


def _build(codebook: Tensor) -> Tensor:
    count = min(MOST, len(codebook) - 1)
    rows = []
    for start in range(0, len(codebook), _ROWS):
        part = codebook[start : start + _ROWS]
        distance = torch.cdist(part.double(), codebook.double())
        own = torch.arange(len(part))
        distance[own, start + own] = torch.inf
        rows.append(distance.sort(dim=1, stable=True).indices[:, :count].int())
    return torch.cat(rows)


def _write(path: Path, table: np.ndarray) -> None:
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.NamedTemporaryFile(dir=path.parent, delete=False) as part:
            np.save(part, table)
        os.replace(part.name, path)
    except OSError:
        pass
