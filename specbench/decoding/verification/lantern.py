"""LANTERN (arXiv 2410.03355) and LANTERN++ (arXiv 2502.06352): accept x with probability min(1, p(A(x))/q(x)).

A(x) consists of x and its nearest codebook neighbours, at most k, up to a limit on their total target probability. The
papers and the released code use different residual distributions, see the functions below. The released code follows
neither paper. Neighbours are computed in blocks once per codebook and cached on disk.
"""

from __future__ import annotations

import hashlib
import os
import uuid
from pathlib import Path
from typing import Literal, NamedTuple

import numpy as np
import torch
from torch import Tensor

from specbench.decoding.interfaces import Context
from specbench.decoding.verification.ratio_tests import DraftTests, FailedTest, RatioTest, optimal, or_target, standard
from specbench.system.digests import cache_folder

_TIE = 1 + 1e-6
MOST_NEIGHBOURS = 1001  # Neighbours per token in the cached table: LANTERN's k, plus one for the released code
_ROWS = 1024  # Rows of the distance matrix computed at a time: the full matrix takes 15 GiB at V = 64,000

Neighbours = Literal["normalised", "raw"]


class Lantern(RatioTest):
    """LANTERN: the neighbours' total probability is at most `delta`."""

    def __init__(self, context: Context, k: int, delta: float, neighbours: Neighbours):
        super().__init__(context)
        self._limit = delta
        table = neighbour_table(context.codebook, raw=neighbours == "raw")
        self._table = table[:, : k + 1].to(context.device)
        self._k = k
        if self._residual is release:
            # The released code differs by family: only its Lumina model has rows that end with a token.
            self._residual = release_p if any(token >= 0 for token in context.layout.forced) else release_q
        if self._residual is optimal:
            # p(A(x)) >= p(x), so a >= min(1, p/q), and [p - a q]+ is [p - q]+ (Cool-SD, proposition 1).
            self._residual = standard

    def acceptance(self, p: Tensor, q: Tensor, x: Tensor, depth: int | Tensor = 1) -> Tensor:
        mass = self.neighbourhood(p, x).mass
        return torch.where(mass > 0, mass / q.gather(-1, x), 0.0)

    def residual_weights(self, tests: DraftTests | FailedTest) -> Tensor:
        if self._residual not in (paper, release_q, release_p):
            return super().residual_weights(tests)
        around = self.neighbourhood(tests.p, tests.draft[..., None])
        return or_target(self._residual(tests.p, tests.q, around).clamp(min=0), tests.p)

    def neighbourhood(self, p: Tensor, x: Tensor) -> Neighbourhood:
        """Return A(x) under p [..., V] for drafts x [..., n]."""
        wide = self._table[x.clamp(max=len(self._table) - 1)].long()
        ids = wide[..., : self._k]
        p_draft = p.gather(-1, x)
        masses = p.gather(-1, ids.flatten(-2)).view(ids.shape)
        member = masses.cumsum(-1) <= self._limit_for(p_draft)[..., None] * _TIE
        return Neighbourhood(x, ids, member, p_draft + torch.where(member, masses, 0.0).sum(-1), wide)

    def _limit_for(self, p_draft: Tensor) -> Tensor:
        return torch.full_like(p_draft, self._limit)


class LanternPlusPlus(Lantern):
    """LANTERN++: the neighbours' total probability is at most (lambda - 1) p(x), so a <= lambda p/q."""

    def __init__(self, context: Context, k: int, lambda_: float, neighbours: Neighbours):
        super().__init__(context, k, lambda_ - 1, neighbours)

    def _limit_for(self, p_draft: Tensor) -> Tensor:
        return self._limit * p_draft


class Neighbourhood(NamedTuple):
    """A(x) of drafts x [..., n]: the draft and the `member` neighbours; `ids`, `member` and `wide` omit the draft."""

    draft: Tensor  # [..., n] tokens x
    ids: Tensor  # [..., n, k] codebook neighbours of x, nearest first
    member: Tensor  # [..., n, k] bool, membership of each neighbour in A(x)
    mass: Tensor  # [..., n] p(A(x)), the draft's own mass included
    wide: Tensor  # [..., n, k + 1] `ids` with one more neighbour, as in the released code


def paper(p: Tensor, q: Tensor, around: Neighbourhood) -> Tensor:
    """Residual of both papers: p with the mass of A(x) moved onto x, minus q."""
    moved = _scaled(p, around.ids, ~around.member)
    moved = moved.scatter(-1, around.draft, around.mass)
    return moved - q


def release_q(p: Tensor, q: Tensor, around: Neighbourhood) -> Tensor:
    """Residual of the released LlamaGen and Anole code: p - q; q = 0 on the first k + 1 neighbours if A(x) has any."""
    return p - _scaled(q, around.wide, ~around.member.any(-1, keepdim=True))


def release_p(p: Tensor, q: Tensor, around: Neighbourhood) -> Tensor:
    """Residual of the released Lumina code: p - q with p = 0 on the first k + 1 neighbours if A(x) has any."""
    return _scaled(p, around.wide, ~around.member.any(-1, keepdim=True)) - q


def release(p: Tensor, q: Tensor, around: Neighbourhood) -> Tensor:
    """The released code's residual for the model's family: `release_q` or `release_p`."""
    raise NotImplementedError("chosen when the verifier is built")


def _scaled(distribution: Tensor, ids: Tensor, kept: Tensor) -> Tensor:
    """`distribution` [..., V] set to zero on `ids` [..., 1, k] unless `kept`, which broadcasts to them."""
    ids, kept = ids.squeeze(-2), kept.expand_as(ids).squeeze(-2)
    return distribution.scatter(-1, ids, distribution.gather(-1, ids) * kept)


def neighbour_table(codebook: Tensor, raw: bool = False, folder: Path | None = None) -> Tensor:
    """Neighbours of each token by ascending Euclidean distance, ties by id; int32 [V, min(MOST_NEIGHBOURS, V - 1)].

    Unless `raw`, vectors are normalised to length 1, as in quantisers with normalised codes. `folder`: folder of
    cached tables, by default the cache folder. If it is not writable, nothing is cached.
    """
    codebook = codebook.detach().float().cpu().contiguous()
    digest = hashlib.sha256(codebook.numpy().tobytes() + str(tuple(codebook.shape)).encode()).hexdigest()[:16]
    folder = folder or cache_folder() / "neighbours"
    path = folder / f"{digest}-{'raw' if raw else 'normalised'}-{MOST_NEIGHBOURS}.npy"
    if path.is_file():
        try:
            return torch.from_numpy(np.load(path))
        except (OSError, ValueError):
            pass  # incomplete file: rebuilt below
    table = nearest(codebook if raw else torch.nn.functional.normalize(codebook, dim=1), MOST_NEIGHBOURS)
    _write(path, table.numpy())
    return table


def nearest(codebook: Tensor, count: int) -> Tensor:
    """Compute the `count` nearest other tokens of each token of a codebook [V, d]; int32 [V, min(count, V - 1)]."""
    count = min(count, len(codebook) - 1)
    rows = []
    for start in range(0, len(codebook), _ROWS):
        part = codebook[start : start + _ROWS]
        distance = torch.cdist(part.double(), codebook.double())
        row = torch.arange(len(part))
        distance[row, start + row] = torch.inf
        rows.append(distance.sort(dim=1, stable=True).indices[:, :count].int())
    return torch.cat(rows)


def _write(path: Path, table: np.ndarray) -> None:
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        part = path.with_name(f".{uuid.uuid4().hex}.tmp")  # readable according to the umask: caches are shared
        with open(part, "xb") as file:
            np.save(file, table)
        os.replace(part, path)
    except OSError:
        pass
