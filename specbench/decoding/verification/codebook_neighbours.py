"""Nearest neighbours of codebook entries: computed in blocks once per codebook, cached on disk."""

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
"""Neighbours per token in the cached table."""

_ROWS = 1024
"""Rows of the distance matrix computed at a time: a full one takes 15 GiB at V = 64,000."""


def neighbour_table(codebook: Tensor, raw: bool = False, folder: Path | None = None) -> Tensor:
    """Neighbours of each token by ascending Euclidean distance, ties by id; int32 [V, min(MOST, V - 1)].

    Args:
        codebook: [V, d].
        raw: use the vectors unchanged; otherwise normalise them to length 1, as quantisers with normalised codes do.
        folder: folder of cached tables; the cache folder by default. If it is not writable, nothing is cached.
    """
    codebook = codebook.detach().float().cpu().contiguous()
    digest = hashlib.sha256(codebook.numpy().tobytes() + str(tuple(codebook.shape)).encode()).hexdigest()[:16]
    folder = folder or cache_folder() / "neighbours"
    path = folder / f"{digest}-{'raw' if raw else 'normalised'}.npy"
    if path.is_file():
        try:
            return torch.from_numpy(np.load(path))
        except (OSError, ValueError):
            pass  # incomplete file: rebuilt below
    table = nearest(codebook if raw else torch.nn.functional.normalize(codebook, dim=1), MOST)
    _write(path, table.numpy())
    return table


def nearest(codebook: Tensor, count: int) -> Tensor:
    """Compute the `count` nearest other tokens of each token of a codebook [V, d]; int32 [V, min(count, V - 1)]."""
    count = min(count, len(codebook) - 1)
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
