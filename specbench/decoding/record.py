"""What the loop measures along the way, kept on the device until the batch is done."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import torch
from torch import Tensor

from specbench.decoding.generation import Generation
from specbench.decoding.sampling import at


class Record:
    """Per-slot and per-offset facts of one batch. B rows, N stream slots, window W."""

    def __init__(self, rows: int, length: int, window: int, forced: Tensor):
        """`forced` [N + 1]: the forced id per slot, -1 where free."""
        device = forced.device
        self._length = length
        self._free = torch.cat([forced[:-1] < 0, torch.zeros(window, dtype=torch.bool, device=device)])
        slots = (rows, length + window)
        self._logp, self._entropy, self._top1 = (torch.zeros(slots, device=device) for _ in range(3))
        self._step = torch.zeros(slots, dtype=torch.long, device=device)
        self._nfe = torch.zeros(rows, dtype=torch.long, device=device)
        self._drafted, self._tested, self._accepted = (
            torch.zeros(rows, window, dtype=torch.long, device=device) for _ in range(3)
        )
        self._facts: dict[str, Tensor] = {}

    def slots(self, p: Tensor, tokens: Tensor, positions: Tensor, step: int) -> None:
        """Note p [B, T, V] and the new tokens [B, T] of a window; a later step overwrites what was not committed."""
        self._logp.scatter_(1, positions, at(p, tokens).log())
        tiny = torch.finfo(p.dtype).tiny
        self._entropy.scatter_(1, positions, -(p * p.clamp(min=tiny).log()).sum(-1))
        self._top1.scatter_(1, positions, p.amax(-1))
        self._step.scatter_(1, positions, torch.full_like(positions, step))

    def scan(self, drafted: Tensor, first: Tensor, positions: Tensor, facts: Mapping[str, Tensor]) -> None:
        """Count one scan: drafts stood where `drafted` [B, T], the first rejection was at slot `first` [B].

        `facts` [B, T] are averaged over the free slots the scan reached.
        """
        slot = torch.arange(positions.shape[1], device=positions.device)
        counted = drafted & self._free[positions]
        tested = counted & (slot <= first[:, None])
        width = positions.shape[1]
        self._nfe += positions[:, 0] < self._length
        self._drafted[:, :width] += counted
        self._tested[:, :width] += tested
        self._accepted[:, :width] += counted & (slot < first[:, None])
        for name, value in facts.items():
            total = self._facts.setdefault(name, torch.zeros_like(self._logp[:, 0]))
            total += torch.where(tested, value, 0.0).sum(1)

    def rows(self, tokens: Tensor, forced: np.ndarray, spans_ms: Mapping[str, float]) -> list[Generation]:
        """One `Generation` per row of the finished batch."""
        per_slot = (tokens, self._logp, self._entropy, self._top1, self._step)
        slots = [x[:, : self._length].cpu().numpy() for x in per_slot]
        offsets = [x.cpu().numpy() for x in (self._drafted, self._tested, self._accepted)]
        facts = {name: total.cpu().numpy() for name, total in self._facts.items()}
        generations = []
        for row, nfe in enumerate(self._nfe.tolist()):
            token, logp, entropy, top1, step = (x[row] for x in slots)
            drafted, tested, accepted = (x[row] for x in offsets)
            reached = tested.sum()
            generations.append(
                Generation(
                    tokens=token.astype(np.int32),
                    forced=forced,
                    logp=logp,
                    entropy=entropy,
                    top1=top1,
                    committed_step=step.astype(np.int32),
                    nfe=nfe,
                    prefills=1,
                    drafted=drafted,
                    tested=tested,
                    accepted=accepted,
                    facts={name: float(total[row] / reached) for name, total in facts.items() if reached},
                    spans_ms=dict(spans_ms),
                    batch=len(tokens),
                )
            )
        return generations
