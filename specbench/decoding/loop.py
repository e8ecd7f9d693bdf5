"""The one decode loop. Every decoder is this loop with another drafter, verifier, residual or refinement.

One step: fill the window with drafts, run one target forward, accept drafts from the left until the first rejection,
commit the accepted ones and one more token, turn the rest into the next drafts. Rows of a batch accept at their own
pace.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from specbench.config import Sampling
from specbench.decoding.build import Method, build
from specbench.decoding.drafters import Columns, Path
from specbench.decoding.generation import Generation
from specbench.decoding.init import Slots
from specbench.decoding.noise import Noise, Stream, row_key
from specbench.decoding.presets import DecoderSpec
from specbench.decoding.record import Record
from specbench.decoding.sampling import Target, one_hot, run_race
from specbench.decoding.spans import Spans
from specbench.decoding.verifiers import Window
from specbench.errors import SpecbenchError
from specbench.models.base import ImageModel, Session


@dataclass(frozen=True)
class Request:
    """One image to make: `sample` counts images of the same prompt."""

    text: str
    prompt_id: str
    sample: int = 0


@torch.inference_mode()
def decode(
    model: ImageModel,
    requests: Sequence[Request],
    decoder: DecoderSpec,
    sampling: Sampling,
    seed: int,
    render: bool = True,
) -> list[Generation | SpecbenchError]:
    """Decode `requests` as one batch.

    Returns:
        Per request its `Generation`, or the `SpecbenchError` that made this image fail (for example NaN logits); one
        row's failure leaves the others intact.
    """
    method = build(decoder, model)
    spans = Spans(model.device)
    noise = Noise([row_key(seed, request.prompt_id, request.sample) for request in requests], model.device)
    with spans("encode"):
        prefix = model.encode([request.text for request in requests])
    with spans("prefill"):
        session = model.begin(prefix, sampling.guidance, method.drafter.columns)
    loop = Loop(method, session, Target(model.layout, sampling, model.device), noise, len(requests), spans)
    start = time.perf_counter()
    loop.run()
    total_ms = (time.perf_counter() - start) * 1e3
    tokens = loop.tokens[:, : model.layout.length]
    pixels = None
    if render:
        with spans("render"):
            pixels = model.render(model.layout.image_tokens(tokens)).cpu().numpy()
    spans_ms = spans.totals_ms()
    spans_ms["host"] = max(0.0, total_ms - sum(spans_ms[name] for name in ("draft", "target", "verify")))
    rows = loop.record.rows(tokens, np.array(model.layout.forced) >= 0, spans_ms)
    for row, image in zip(rows, pixels if render else [None] * len(rows), strict=True):
        row.image = image
    return [_checked(row, request) for row, request in zip(rows, requests, strict=True)]


def _checked(row: Generation, request: Request) -> Generation | SpecbenchError:
    if np.isnan(row.entropy).any():
        slot = int(np.isnan(row.entropy).argmax())
        return SpecbenchError(f"prompt '{request.prompt_id}': the model gave NaN logits at token {slot}", exit_code=1)
    return row


class Loop:
    """State of one batch while it decodes. B rows, N stream slots, window W, T = columns of the walked path.

    Attributes:
        tokens: [B, N + W] committed tokens, then drafts, by stream slot.
        committed: [B] tokens committed per row.
        record: what is measured along the way.
    """

    def __init__(self, method: Method, session: Session, target: Target, noise: Noise, rows: int, spans: Spans):
        self._drafter, self._verifier, self._refine = method
        self._session, self._target, self._noise, self._spans = session, target, noise, spans
        device = target.forced.device
        self._length, self._vocab = len(target.forced) - 1, target.vocab
        window = self._drafter.window
        self.tokens = torch.zeros(rows, self._length + window, dtype=torch.long, device=device)
        self.committed = torch.zeros(rows, dtype=torch.long, device=device)
        self._drafted_to = self.committed.clone()
        self._laws: Tensor | None = None
        self._shift = self.committed
        self._history: Tensor | None = None
        if self._drafter.needs_history:
            self._history = torch.zeros(*self.tokens.shape, target.vocab, device=device)
        self._rows = torch.arange(rows, device=device)[:, None]
        self.record = Record(rows, self._length, window, target.forced)

    def run(self) -> None:
        """Decode every row to its end."""
        behind, step = 0, 0
        while behind < self._length:
            step += 1
            # Near the end a full window would only predict slots past it.
            width = min(self._drafter.window, self._length - behind + 1)
            with self._spans("draft"):
                slots, q = self._fill(width, step)
                fed = self._drafter.expand(slots, q, self._noise)
            with self._spans("target"):
                logits = self._session.forward(*fed)
            with self._spans("verify"):
                self._verify(logits, fed, slots, q)
            behind = int(self.committed.min())

    def _fill(self, width: int, step: int) -> tuple[Slots, Tensor]:
        """The `width - 1` draft slots with every fresh one filled, and all slots' laws q [B, width, V]."""
        positions = self.committed[:, None] + torch.arange(width - 1, device=self.committed.device)
        fresh = positions >= self._drafted_to[:, None]
        slots = Slots(self.committed, positions, fresh, self.tokens, self._history, step)
        if width == 1:
            return slots, torch.zeros(len(positions), 1, self._vocab, device=positions.device)
        tokens, q = self._drafter.fill(slots, self._noise)
        forced = self._target.forced_at(positions)
        tokens = torch.where(forced >= 0, forced, tokens)
        q = torch.where((forced >= 0)[..., None], one_hot(forced.clamp(min=0), q.shape[-1]), q)
        self.tokens.scatter_(1, positions, torch.where(fresh, tokens, self.tokens.gather(1, positions)))
        if self._laws is not None:
            kept = torch.arange(width - 1, device=positions.device) + self._shift[:, None]
            kept = self._laws[self._rows, kept.clamp(max=self._laws.shape[1] - 1)]
            q = torch.where(fresh[..., None], q, kept)
        return slots, torch.nn.functional.pad(q, (0, 0, 0, 1))

    def _verify(self, logits: Tensor, fed: Columns, slots: Slots, q: Tensor) -> None:
        """Scan the window, commit what holds, and leave the refined rest as the next drafts."""
        width, step = q.shape[1], slots.step
        offset = torch.arange(width, device=q.device)
        positions = self.committed[:, None] + offset
        path = self._drafter.choose(self._target(logits, fed.positions), fed, slots, q, self._noise)
        drafted = (offset < width - 1).expand_as(positions)
        if width == 1:
            tokens, first, facts = (
                self._after_the_last_draft(path.p[:, 0], positions),
                torch.zeros_like(slots.start),
                {},
            )
        else:
            tokens, first, facts = self._scan(path, drafted, positions, step)
        self.tokens.scatter_(1, positions, tokens)
        self.record.slots(path.p, tokens, positions, step)
        self.record.scan(drafted & (offset < path.limit[:, None]), first, positions, facts)
        if path.columns is not None:
            self._session.keep(path.columns, positions[:, 1 : 1 + path.columns.shape[1]])
        if self._history is not None:
            self._history[self._rows, positions] = path.p
        self._laws = path.p
        self._shift = torch.minimum(first + 1, path.limit).minimum(self._length - self.committed)
        self._drafted_to = self.committed + (width if self._refine.keeps_tail else self._shift)
        self.committed = self.committed + self._shift

    def _scan(self, path: Path, drafted: Tensor, positions: Tensor, step: int) -> tuple[Tensor, Tensor, dict]:
        """New tokens [B, T] of the window, the first slot [B] whose draft did not hold, and facts [B, T] to record."""
        coin = self._noise.uniform(positions, Stream.COIN, step)
        window = Window(path.tested_p, path.q, path.draft, drafted, coin)
        refined = self._refine.refine(window, self._noise, positions, step)
        accepted, facts = self._verifier.verify(window, refined)
        first = (accepted & drafted).long().cumprod(1).sum(1, keepdim=True)
        p, q = window.p[self._rows, first].squeeze(1), window.q[self._rows, first].squeeze(1)
        race = self._noise.race(positions.gather(1, first), p.shape[-1], Stream.RESIDUAL, step).squeeze(1)
        rejected = self._verifier.replace(p, q, refined.gather(1, first).squeeze(1), race)[:, None]
        fresh = self._after_the_last_draft(window.p[:, -1], positions[:, -1:])
        replacement = torch.where(first == positions.shape[1] - 1, fresh, rejected)
        offset = torch.arange(positions.shape[1], device=first.device)
        tokens = torch.where(offset < first, path.draft, refined)
        return torch.where(offset == first, replacement, tokens), first.squeeze(1), facts

    def _after_the_last_draft(self, p: Tensor, positions: Tensor) -> Tensor:
        """[B, 1] draws from p [B, V] at slots `positions` [B, 1], where no draft stands.

        They use the slot's own frozen noise, as AR does, so a window of one is AR.
        """
        race = self._noise.race(positions, p.shape[-1], Stream.TOKEN)
        return run_race(p[:, None], race)
