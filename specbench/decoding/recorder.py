"""What the loop measures along the way, kept on the device until the batch is done."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
import torch
from torch import Tensor

from specbench.decoding.draft_tree import DEPTHS, Routes
from specbench.decoding.generation import Generation
from specbench.decoding.interfaces import Proposal, Verification
from specbench.decoding.sampling import at, entropy, kept
from specbench.decoding.timing import Spans


class StepRecorder:
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
        self._by_depth = torch.zeros(2, rows, DEPTHS, device=device)
        self._means: set[str] = set()
        self._spans: Spans | None = None

    def slots(self, p: Tensor, tokens: Tensor, positions: Tensor, step: Tensor) -> None:
        """Note p [B, T, V] and the new tokens [B, T] of the `step`-th [B, 1] forward; a later one overwrites what was
        not committed."""
        self._logp.scatter_(1, positions, at(p, tokens).log())
        mass = kept(p).mass
        self._entropy.scatter_(1, positions, entropy(mass))
        self._top1.scatter_(1, positions, mass.amax(-1))
        self._step.scatter_(1, positions, step.expand_as(positions))

    def trace(self, spans: Spans) -> None:
        """Note from now on how far the law of every tested draft is from p, in a span of its own."""
        self._spans = spans
        self._draft_tv, self._draft_top1 = (torch.full_like(self._logp, torch.nan) for _ in range(2))

    def count_forward(self, running: Tensor) -> None:
        """Count one target forward for the rows [B] that were not complete before it."""
        self._nfe += running

    def verification(self, verified: Verification, proposal: Proposal, tables: Routes, positions: Tensor) -> None:
        """Count one step: how far it got among slots `positions` [B, T], and every draft tested on the way."""
        self.count_forward(positions[:, 0] < self._length)
        if not tables.levels:
            return
        self._add("rounds", positions[:, 0] < self._length, None)
        slot = torch.arange(positions.shape[1], device=positions.device)
        first = verified.first[:, None]
        counted = tables.has_children[verified.columns] & self._free[positions]
        width = positions.shape[1]
        self._drafted[:, :width] += counted
        tested = counted & (slot <= first)
        self._tested[:, :width] += tested
        self._accepted[:, :width] += counted & (slot < first)
        self._tests(verified, self._free[proposal.positions - 1], tables)
        if self._spans:
            with self._spans("trace"):
                self._trace(verified, proposal, positions, tested)

    def _trace(self, verified: Verification, proposal: Proposal, positions: Tensor, tested: Tensor) -> None:
        """Note p against the law of the eldest draft, by slot; a slot is tested in the step that commits it."""
        laws = proposal.q.gather(1, verified.columns[..., None].expand_as(verified.p))
        for traced, value in (
            (self._draft_tv, (verified.p - laws).abs().sum(-1) / 2),
            (self._draft_top1, laws.amax(-1)),
        ):
            traced.scatter_(1, positions, torch.where(tested, value, torch.nan))

    def _tests(self, verified: Verification, free: Tensor, tables: Routes) -> None:
        """Add up the facts of the drafts tested, those for slots that are not `free` [B, C] left out."""
        tested = verified.tested & free
        for name, value in verified.facts.items():
            if name == "excess":
                self._add("theorem2_bound", torch.where(tested, value, 0.0).sum(1), None)
            elif name == "distance":
                eldest = (tested & (tables.rank == 0)).float()
                self._add_by_depth(torch.stack([value * eldest, eldest]) @ tables.by_depth)
            else:
                self._add(name, torch.where(tested, value, 0.0).sum(1), tested.sum(1))
        if len(tables.levels) > 1:
            for rank in range(len(tables.levels)):
                own = tested & (tables.rank == rank)
                self._add(f"sibling_{rank}_accepted", (own & verified.accepted).sum(1), own.sum(1))
                self._add(f"sibling_{rank}_tested", own.sum(1), None)

    def _add(self, name: str, total: Tensor, count: Tensor | None) -> None:
        """Add to a fact that is a mean over `count`, or a sum."""
        sums = self._facts.setdefault(name, torch.zeros(2, len(total), device=total.device))
        sums[0] += total
        if count is not None:
            sums[1] += count
            self._means.add(name)

    def _add_by_depth(self, sums: Tensor) -> None:
        """Add to the facts that are means by depth, sums and counts [2, B, D]."""
        self._by_depth += sums
        for depth in range(1, DEPTHS + 1):
            name = f"draft_tv_{depth}"
            if name not in self._means:
                self._facts[name] = self._by_depth[..., depth - 1]
                self._means.add(name)

    def restart(self, rows: Tensor) -> None:
        """Forget what was counted for `rows` [K], which begin another image."""
        for counted in (self._nfe, self._drafted, self._tested, self._accepted):
            counted[rows] = 0
        for sums in self._facts.values():
            sums[:, rows] = 0
        if self._spans:
            self._draft_tv[rows] = self._draft_top1[rows] = torch.nan

    def rows(
        self, rows: Tensor, tokens: Tensor, forced: np.ndarray, spans_ms: Sequence[Mapping[str, float]]
    ) -> list[Generation]:
        """One `Generation` for each of the finished `rows` [K], with its spans; `tokens` [B, L] are of all."""
        per_slot = (tokens.int(), self._logp, self._entropy, self._top1, self._step.int())
        slots = [x[rows, : self._length].cpu().numpy() for x in per_slot]
        traced = (
            [x[rows, : self._length].cpu().numpy() for x in (self._draft_tv, self._draft_top1)] if self._spans else None
        )
        offsets = [x[rows].cpu().numpy() for x in (self._drafted, self._tested, self._accepted)]
        facts = {name: total[:, rows].tolist() for name, total in self._facts.items()}
        generations, batch = [], len(tokens)
        for row, nfe in enumerate(self._nfe[rows].tolist()):
            token, logp, entropy, top1, step = (x[row] for x in slots)
            drafted, tested, accepted = (x[row] for x in offsets)
            generations.append(
                Generation(
                    tokens=token,
                    forced=forced,
                    logp=logp,
                    entropy=entropy,
                    top1=top1,
                    committed_step=step,
                    nfe=nfe,
                    prefills=1,
                    drafted=drafted,
                    tested=tested,
                    accepted=accepted,
                    facts=self._facts_of(row, facts),
                    spans_ms=dict(spans_ms[row]),
                    batch=batch,
                    draft_tv=traced[0][row] if traced else None,
                    draft_top1=traced[1][row] if traced else None,
                )
            )
        return generations

    def _facts_of(self, row: int, facts: Mapping[str, list[list[float]]]) -> dict[str, float]:
        """Sums as they are, means where anything was counted."""
        found = {}
        for name, (total, count) in facts.items():
            if name not in self._means:
                found[name] = total[row]
            elif count[row]:
                found[name] = total[row] / count[row]
        return found
