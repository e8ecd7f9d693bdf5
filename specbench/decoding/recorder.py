"""Per-step measurements, kept on the device until the images are complete."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
import torch
from torch import Tensor

from specbench.decoding.draft_tree import DEPTHS, Routes
from specbench.decoding.generation import Generation
from specbench.decoding.interfaces import Proposal, Verification
from specbench.decoding.noise import Noise
from specbench.decoding.sampling import at, entropy, kept
from specbench.decoding.timing import Spans
from specbench.decoding.uniforms import UniformsRecorder


class StepRecorder:
    """Measurements per slot, per window offset and per image of one batch. B rows, N stream slots, window W."""

    def __init__(self, rows: int, length: int, window: int, forced: Tensor, noise: Noise | None = None):
        """`forced` [N + 1]: forced id per stream slot, -1 where free. `noise`: records the u_i if given."""
        device = forced.device
        self._length = length
        self._free = torch.cat([forced[:-1] < 0, torch.zeros(window, dtype=torch.bool, device=device)])
        self._slots = torch.zeros(rows, 4, length + window, device=device)
        """log p, entropy, top-1 and step of each slot's token."""
        self._offsets = torch.zeros(3, rows, window, dtype=torch.long, device=device)
        """Drafts by window offset: drafted, tested, accepted."""
        self._nfe, self._rounds = torch.zeros(2, rows, dtype=torch.long, device=device)
        self._sums: dict[tuple[str, ...], Tensor] = {}
        """Per group of verifier facts, [1 + facts, B]: number of drafts tested, and the sum of each fact."""
        self._by_depth = torch.zeros(2, rows, DEPTHS, device=device)
        """Number of first drafts tested by depth, and the sum of their total variations."""
        self._siblings: Tensor | None = None
        """[2, B, ranks] tested and accepted drafts by sibling index, for trees with siblings."""
        self._spans: Spans | None = None
        self._uniforms = UniformsRecorder(rows, length + window, noise, device) if noise else None

    def trace(self, spans: Spans) -> None:
        """Enable traces: total variation between p and q of every tested draft, timed in a separate span."""
        self._spans = spans
        self._draft_tv, self._draft_top1 = (torch.full_like(self._slots[:, 0], torch.nan) for _ in range(2))

    def slots(self, p: Tensor, tokens: Tensor, positions: Tensor, step: Tensor) -> None:
        """Record p [B, T, V] and the new tokens [B, T] of the `step`-th [B, 1] forward. Slots that are not committed
        are overwritten by a later step."""
        mass = kept(p).mass
        values = torch.stack(
            [at(p, tokens).log(), entropy(mass), mass.amax(-1), step.float().expand_as(mass[..., 0])], 1
        )
        self._slots.scatter_(2, positions[:, None].expand_as(values), values)

    def count_forward(self, running: Tensor) -> None:
        """Count one target forward for the rows [B] that were not complete before it."""
        self._nfe += running

    def verification(
        self, verified: Verification, proposal: Proposal, tables: Routes | None, by_depth: Tensor, positions: Tensor
    ) -> None:
        """Record one step: accepted drafts among slots `positions` [B, T], and every draft tested.

        `tables` of the tree, None for a chain; `by_depth` is its `first_drafts_by_depth`.
        """
        running = positions[:, 0] < self._length
        self.count_forward(running)
        if self._uniforms:
            self._uniforms.note(verified, proposal, tables, positions)
        if proposal.tokens.shape[1] == 1:
            return
        self._rounds += running
        if tables is None:
            drafted = free = self._free[positions[:, :-1]]
        else:
            drafted = tables.has_children[verified.columns] & self._free[positions]
            free = self._free[proposal.positions[:, 1:] - 1]
        slot, first = torch.arange(drafted.shape[1], device=positions.device), verified.first[:, None]
        tested = drafted & (slot <= first)
        self._offsets[:, :, : len(slot)] += torch.stack([drafted, tested, drafted & (slot < first)])
        self._drafts(verified, verified.tested & free, by_depth)
        if tables is not None and len(tables.levels) > 1:
            self._count_siblings(verified.tested & free, verified.accepted & free, tables.by_rank)
        if self._spans:
            with self._spans("trace"):
                q = proposal.q[:, : len(slot)]
                if tables is not None:
                    q = proposal.q.gather(1, verified.columns[..., None].expand_as(verified.p))
                self._trace(verified.p[:, : len(slot)], q, positions[:, : len(slot)], tested)

    def _trace(self, p: Tensor, q: Tensor, positions: Tensor, tested: Tensor) -> None:
        """Record the distance between p and q [B, T, V] of the first draft in each tested slot of `positions` [B, T];
        a slot is tested only in the step that commits it."""
        for traced, value in ((self._draft_tv, (p - q).abs().sum(-1) / 2), (self._draft_top1, q.amax(-1))):
            traced.scatter_(1, positions, torch.where(tested, value, torch.nan))

    def _drafts(self, verified: Verification, tested: Tensor, by_depth: Tensor) -> None:
        """Add the facts of the drafts `tested` [B, C - 1], without those for forced slots."""
        facts, names = verified.facts, tuple(verified.facts)
        if not names:
            return
        # The facts of drafts that were not tested may be NaN.
        values = torch.where(tested, torch.stack([torch.ones_like(facts[names[0]]), *facts.values()]), 0.0)
        if names not in self._sums:
            self._sums[names] = torch.zeros(values.shape[:2], device=values.device)
        sums = self._sums[names]
        sums += values.sum(-1)
        if "distance" in names:
            self._by_depth += torch.stack([values[0], values[1 + names.index("distance")]]) @ by_depth

    def _count_siblings(self, tested: Tensor, accepted: Tensor, by_rank: Tensor) -> None:
        """Count drafts [B, C - 1] by sibling index, `by_rank` [C - 1, ranks] float32."""
        counts = torch.stack([tested, accepted]).float() @ by_rank
        if self._siblings is None or self._siblings.shape[2] < counts.shape[2]:
            wider = torch.zeros_like(counts)
            if self._siblings is not None:
                wider[..., : self._siblings.shape[2]] = self._siblings
            self._siblings = wider
        self._siblings[..., : counts.shape[2]] += counts

    def restart(self, rows: Tensor) -> None:
        """Reset the counts of `rows` [K], which start another image."""
        self._nfe[rows] = self._rounds[rows] = 0
        sums = (
            self._offsets,
            self._by_depth,
            *self._sums.values(),
            *([] if self._siblings is None else [self._siblings]),
        )
        for counted in sums:
            counted[:, rows] = 0
        if self._spans:
            self._draft_tv[rows] = self._draft_top1[rows] = torch.nan

    def rows(
        self, rows: Tensor, tokens: Tensor, forced: np.ndarray, spans_ms: Sequence[Mapping[str, float]]
    ) -> list[Generation]:
        """One `Generation` for each of the complete `rows` [K], with its time spans; `tokens` [B, L] of all rows."""
        slots = self._slots[rows, :, : self._length].cpu().numpy()
        tokens_of, batch = tokens[rows, : self._length].int().cpu().numpy(), len(tokens)
        traced = None
        if self._spans:
            traced = [x[rows, : self._length].cpu().numpy() for x in (self._draft_tv, self._draft_top1)]
        uniforms = self._uniforms.rows(rows, self._length) if self._uniforms else {}
        offsets, nfe = self._offsets[:, rows].cpu().numpy(), self._nfe[rows].tolist()
        facts = self._facts(rows)
        generations = []
        for row, token in enumerate(tokens_of):
            logp, entropy, top1, step = slots[row]
            drafted, tested, accepted = offsets[:, row]
            generations.append(
                Generation(
                    tokens=token,
                    forced=forced,
                    logp=logp,
                    entropy=entropy,
                    top1=top1,
                    committed_step=step.astype(np.int32),
                    nfe=nfe[row],
                    prefills=1,
                    drafted=drafted,
                    tested=tested,
                    accepted=accepted,
                    facts=facts[row],
                    spans_ms=dict(spans_ms[row]),
                    batch=batch,
                    uniforms={name: u[row] for name, u in uniforms.items()},
                    draft_tv=traced[0][row] if traced else None,
                    draft_top1=traced[1][row] if traced else None,
                )
            )
        return generations

    def _facts(self, rows: Tensor) -> list[dict[str, float]]:
        """`Generation.facts` per row: sums, and means of counted facts."""
        found: list[dict[str, float]] = [{} for _ in range(len(rows))]
        if not self._rounds.any():
            return found
        for fact, rounds in zip(found, self._rounds[rows].tolist(), strict=True):
            fact["rounds"] = float(rounds)
        for names, sums in self._sums.items():
            for fact, (count, *totals) in zip(found, sums[:, rows].T.tolist(), strict=True):
                for name, total in zip(names, totals, strict=True):
                    if name == "excess":
                        fact["theorem2_bound"] = total
                    elif name != "distance" and count:
                        fact[name] = total / count
        for fact, (counts, totals) in zip(found, self._by_depth[:, rows].transpose(0, 1).tolist(), strict=True):
            pairs = enumerate(zip(totals, counts, strict=True), start=1)
            fact |= {f"draft_tv_{depth}": total / count for depth, (total, count) in pairs if count}
        if self._siblings is not None:
            for fact, (tested, accepted) in zip(found, self._siblings[:, rows].transpose(0, 1).tolist(), strict=True):
                for rank, (count, total) in enumerate(zip(tested, accepted, strict=True)):
                    fact[f"sibling_{rank}_tested"] = count
                    if count:
                        fact[f"sibling_{rank}_accepted"] = total / count
        return found
