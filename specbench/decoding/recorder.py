"""Per-step measurements, kept on the device until the images are complete."""

from collections.abc import Mapping, Sequence
from itertools import groupby

import numpy as np
import torch
from torch import Tensor

from specbench.decoding.draft_tree import RECORDED_DEPTHS
from specbench.decoding.generation import Generation
from specbench.decoding.noise import Noise
from specbench.decoding.recorded_step import Committed, RecordedStep, StepOutcome, WaitingStep, committed_slots
from specbench.decoding.sampling import at, entropy, kept
from specbench.decoding.timing import Spans
from specbench.decoding.uniforms import UniformsRecorder
from specbench.decoding.verification.ratio_tests import distances

WAITING = 2 * 2**20  # Maximum bytes of distributions of collected steps


class NoRecorder:
    """Replacement of a `StepRecorder` if only the tokens are needed."""

    def step(self, *_: object) -> None:
        pass

    slots = count_forward = restart = flush = step


class StepRecorder:
    """Measurements per slot, per window offset and per image of a batch. B rows, N stream slots, window W."""

    collects = True  # Whether eager steps on a CPU are recorded together; False while GPU memory is measured

    def __init__(
        self, rows: int, length: int, window: int, forced: Tensor, noise: Noise | None = None, compiled: bool = False
    ):
        """`forced` [N + 1]: forced id per stream slot, -1 if free. `noise`: if given, the u_i are recorded. `compiled`:
        whether steps may be compiled; all buffers must then be created by an eager step."""
        device = forced.device
        self._collects = self.collects and device.type == "cpu" and not compiled
        self._own = torch.arange(rows, device=device)
        self._waiting: list[WaitingStep] = []
        self._bytes = 0
        self._length = length
        self._free = torch.cat([forced[:-1] < 0, torch.zeros(window, dtype=torch.bool, device=device)])
        self._slots = torch.zeros(rows, 4, length + window, device=device)
        """log p, entropy, top-1 and step of each slot's token."""
        self._offsets = torch.zeros(3, rows, window, dtype=torch.long, device=device)
        """Drafts by window offset: drafted, tested, accepted."""
        self._nfe, self._rounds = torch.zeros(2, rows, dtype=torch.long, device=device)
        self._sums: dict[tuple[str, ...], Tensor] = {}
        """Per group of verifier facts, [1 + facts, B]: number of drafts tested, and the sum of each fact."""
        self._by_depth = torch.zeros(2, rows, RECORDED_DEPTHS, dtype=torch.double, device=device)
        """By depth: number of tested first drafts, and the sum of their total variations."""
        self._siblings: Tensor | None = None
        """[2, B, ranks] tested and accepted drafts by sibling index, for trees with siblings."""
        self._spans: Spans | None = None
        self._uniforms = UniformsRecorder(rows, length + window, noise, device) if noise else None

    def trace(self, spans: Spans) -> None:
        """Enable traces: total variation between p and q of every tested draft, timed in a separate span."""
        self._spans = spans
        self._draft_tv, self._draft_top1 = (torch.full_like(self._slots[:, 0], torch.nan) for _ in range(2))

    def step(self, step: RecordedStep) -> None:
        """Record one step. Eager steps on a CPU are collected and computed together, because their many small
        operations would cost more than the arithmetic. The time of traces is measured inside verification, so a traced
        step is recorded at once."""
        if self._spans or not self._collects:
            self._record(step.outcome, step.every_slot())
            return
        waiting = step.waiting()
        tables = waiting.p, waiting.q, waiting.before and waiting.before.q
        size = sum(table.nbytes for table in tables if table is not None)
        if self._bytes + size > WAITING:
            self.flush()
        self._waiting.append(waiting)
        self._bytes += size

    def slots(self, p: Tensor, tokens: Tensor, positions: Tensor, step: Tensor) -> None:
        """Record p [B, T, V] and the new tokens [B, T] of the `step`-th [B, 1] forward. Slots that are not committed
        are overwritten by a later step."""
        self._note_slots(Committed(self._own[:, None], positions, tokens, p, step))

    def count_forward(self, running: Tensor) -> None:
        """Count one target forward for the rows [B] that were not complete before it."""
        self._nfe += running

    def flush(self) -> None:
        """Record the collected steps. Callers that time images call it within the `verify` span."""
        for _, steps in groupby(self._waiting, key=lambda step: step.kind):
            self._record(*committed_slots(list(steps), len(self._own)))
        self._waiting, self._bytes = [], 0

    def _record(self, outcome: StepOutcome, seen: Committed) -> None:
        """Record the slots of joined steps, the accepted drafts by window offset, and every draft tested."""
        tables, positions = outcome.tables, outcome.positions
        running = self._by_row(positions[:, 0] < self._length)
        self.count_forward(running)
        self._note_slots(seen)
        if seen.q is None:
            return
        self._rounds += running
        if tables is None:
            free = self._free[positions[:, :-1]]
            drafted = outcome.drafted & free
        else:
            drafted = outcome.drafted.gather(1, outcome.columns) & self._free[positions]
            free = self._free[outcome.predicted[:, 1:] - 1]
        slot, first = torch.arange(drafted.shape[1], device=positions.device), outcome.first[:, None]
        offsets = torch.stack([drafted, drafted & (slot <= first), drafted & (slot < first)])
        self._offsets[:, :, : len(slot)] += self._by_row(offsets, 1)
        self._drafts(outcome.facts, outcome.tested & free, outcome.by_depth)
        if tables is not None and tables.levels:
            self._count_siblings(outcome.tested & free, outcome.accepted & free, tables.by_rank)
        if self._spans:
            with self._spans("trace"):
                self._trace(seen, seen.q)

    def _by_row(self, values: Tensor, dim: int = 0) -> Tensor:
        """Sum values over the joined steps, which reduces dimension `dim` from K B to B."""
        return values.unflatten(dim, (-1, len(self._own))).sum(dim)

    def _note_slots(self, seen: Committed) -> None:
        mass = kept(seen.p).mass
        steps = seen.steps.float().expand(seen.tokens.shape)
        values = torch.stack([at(seen.p, seen.tokens).log(), entropy(mass), mass.amax(-1), steps], -1)
        self._slots[seen.rows, :, seen.positions] = values
        if self._uniforms:
            self._uniforms.note(seen)

    def _trace(self, seen: Committed, q: Tensor) -> None:
        """Record the distance between p and q of the first draft in each tested slot."""
        tested = seen.tested & self._free[seen.positions]
        tv, top1 = (seen.p - q).abs().sum(-1) / 2, q.amax(-1)
        for traced, value in ((self._draft_tv, tv), (self._draft_top1, top1)):
            traced[seen.rows, seen.positions] = torch.where(tested, value, torch.nan)

    def _drafts(self, facts: Mapping[str, Tensor], tested: Tensor, by_depth: Tensor) -> None:
        """Add the `facts` of the drafts `tested` [R, C - 1], except for drafts of forced slots."""
        facts = dict(facts)
        if "ratio" in facts:
            facts |= distances(facts.pop("acceptance"), facts.pop("ratio"))
        if not facts:
            return
        names = tuple(facts)
        # The facts of drafts that were not tested may be NaN.
        values = torch.where(tested, torch.stack([torch.ones_like(facts[names[0]]), *facts.values()]), 0.0).double()
        if names not in self._sums:
            self._sums[names] = values.new_zeros(len(values), len(self._own))
        sums = self._sums[names]
        sums += self._by_row(values.sum(-1), 1)
        if "distance" in names:
            first_drafts = torch.stack([values[0], values[1 + names.index("distance")]])
            self._by_depth += self._by_row(first_drafts @ by_depth.double(), 1)

    def _count_siblings(self, tested: Tensor, accepted: Tensor, by_rank: Tensor) -> None:
        """Count drafts [R, C - 1] by sibling index, `by_rank` [C - 1, ranks] float32."""
        counts = self._by_row(torch.stack([tested, accepted]).float() @ by_rank, 1)
        if self._siblings is None or self._siblings.shape[2] < counts.shape[2]:
            wider = torch.zeros_like(counts)
            if self._siblings is not None:
                wider[..., : self._siblings.shape[2]] = self._siblings
            self._siblings = wider
        self._siblings[..., : counts.shape[2]] += counts

    def restart(self, rows: Tensor) -> None:
        """Reset the counts of `rows` [K], which start another image."""
        self.flush()
        self._nfe[rows] = self._rounds[rows] = 0
        siblings = [] if self._siblings is None else [self._siblings]
        for counted in (self._offsets, self._by_depth, *self._sums.values(), *siblings):
            counted[:, rows] = 0
        if self._spans:
            self._draft_tv[rows] = self._draft_top1[rows] = torch.nan

    def rows(
        self, rows: Tensor, tokens: Tensor, forced: np.ndarray, spans_ms: Sequence[Mapping[str, float]]
    ) -> list[Generation]:
        """One `Generation` for each of the complete `rows` [K], with its time spans; `tokens` [B, L] of all rows."""
        self.flush()
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
        facts: list[dict[str, float]] = [{} for _ in range(len(rows))]
        if not self._rounds.any():
            return facts
        for fact, rounds in zip(facts, self._rounds[rows].tolist(), strict=True):
            fact["rounds"] = float(rounds)
        for names, sums in self._sums.items():
            for fact, (count, *totals) in zip(facts, sums[:, rows].T.tolist(), strict=True):
                for name, total in zip(names, totals, strict=True):
                    if name == "excess":
                        fact["theorem2_bound"] = total
                    elif name != "distance" and count:
                        fact[name] = total / count
        for fact, (counts, totals) in zip(facts, self._by_depth[:, rows].transpose(0, 1).tolist(), strict=True):
            pairs = enumerate(zip(totals, counts, strict=True), start=1)
            fact |= {f"draft_tv_{depth}": total / count for depth, (total, count) in pairs if count}
        if self._siblings is not None:
            for fact, (tested, accepted) in zip(facts, self._siblings[:, rows].transpose(0, 1).tolist(), strict=True):
                for rank, (count, total) in enumerate(zip(tested, accepted, strict=True)):
                    fact[f"sibling_{rank}_tested"] = count
                    if count:
                        fact[f"sibling_{rank}_accepted"] = total / count
        return facts
