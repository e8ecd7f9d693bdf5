"""The one decode loop. Every decoder is this loop with another drafter, verifier, residual or refinement.

One step: fill the window with drafts, run one target forward, accept drafts from the left until the first rejection,
commit the accepted ones and one more token, turn the rest into the next drafts. Rows of a batch accept at their own
pace.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from specbench.decoding.build import Method, build, is_built_in
from specbench.decoding.draft_tree import Routes, routes
from specbench.decoding.generation import Generation
from specbench.decoding.interfaces import Batch, Proposal, Verification
from specbench.decoding.noise import Noise, row_key
from specbench.decoding.progress_bounds import CommittedBounds
from specbench.decoding.recorder import StepRecorder
from specbench.decoding.sampling import Target
from specbench.decoding.timing import Spans
from specbench.decoding.verification.tree_verification import verify_tree
from specbench.errors import SpecbenchError
from specbench.models.interface import ImageModel, Session
from specbench.models.transformer.compilation import call_eager
from specbench.specs.presets import DecoderSpec
from specbench.specs.run_spec import Sampling


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
    trace: bool = False,
    rare: bool = False,
) -> list[Generation | SpecbenchError]:
    """Decode `requests` as one batch.

    `trace` keeps `Generation.draft_tv` and `draft_top1`; the time it takes is in no span. A batch of a `rare` size is
    not worth compiling the decoder for.

    Returns:
        Per request its `Generation`, or the `SpecbenchError` that made this image fail (for example NaN logits); one
        row's failure leaves the others intact.
    """
    spans = Spans(model.device)
    loop = begin(model, requests, decoder, sampling, seed, spans, trace, rare)
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
    spans_ms["verify"] -= spans_ms.pop("trace", 0.0)
    every = torch.arange(len(requests), device=model.device)
    rows = loop.recorder.rows(every, tokens, np.array(model.layout.forced) >= 0, [spans_ms] * len(requests))
    for row, image in zip(rows, pixels if render else [None] * len(rows), strict=True):
        row.image = image
    return [checked(row, request) for row, request in zip(rows, requests, strict=True)]


def begin(
    model: ImageModel,
    requests: Sequence[Request],
    decoder: DecoderSpec,
    sampling: Sampling,
    seed: int,
    spans: Spans,
    trace: bool,
    rare: bool,
) -> Loop:
    """The loop of one batch, its prompts in the target's cache; see `decode`."""
    method = build(decoder, model)
    noise = Noise(noise_keys(requests, seed), model.layout.vocab, model.device)
    with spans("encode"):
        prefix = model.encode([request.text for request in requests])
    with spans("prefill"):
        session = model.begin(prefix, sampling.guidance, method.drafter.columns)
    target = Target(model.layout, sampling, model.device)
    call = call_eager
    # What a trace takes is timed inside verification; what plug-ins keep between steps is not known.
    if hasattr(model, "call_for") and not trace and not rare and is_built_in(decoder):
        call = model.call_for((decoder, sampling), len(requests))
    make = getattr(method.drafter, "loop", Loop)
    loop = make(method, session, target, noise, len(requests), spans, call)
    if trace:
        loop.recorder.trace(spans)
    return loop


def noise_keys(requests: Sequence[Request], seed: int) -> list[int]:
    """What addresses the noise of each image."""
    return [row_key(seed, request.prompt_id, request.sample) for request in requests]


def checked(row: Generation, request: Request) -> Generation | SpecbenchError:
    """The image, or why it is none."""
    if np.isnan(row.entropy).any():
        slot = int(np.isnan(row.entropy).argmax())
        return SpecbenchError(f"prompt '{request.prompt_id}': the model gave NaN logits at token {slot}", exit_code=1)
    return row


class Loop:
    """State of one batch while it decodes. B rows, N stream slots, window W.

    Attributes:
        tokens: [B, N + W] committed tokens, then drafts, by stream slot.
        committed: [B] tokens committed per row.
        steps: [B, 1] target forwards each row has been through.
        session: of the target.
        recorder: what is measured along the way.
    """

    def __init__(
        self,
        method: Method,
        session: Session,
        target: Target,
        noise: Noise,
        rows: int,
        spans: Spans,
        call: Callable = call_eager,
    ):
        """`call(fn, *args)` runs fn eagerly or as a compiled function."""
        self._drafter, self._verifier, self._refine = method
        self.session, self._target, self._noise, self._spans, self._call = (
            session,
            target,
            noise,
            spans,
            call,
        )
        device = target.forced.device
        self._length = len(target.forced) - 1
        window = self._drafter.window
        self.tokens = torch.zeros(rows, self._length + window, dtype=torch.long, device=device)
        self.committed = torch.zeros(rows, dtype=torch.long, device=device)
        self.steps = torch.zeros(rows, 1, dtype=torch.long, device=device)
        self.recorder = StepRecorder(rows, self._length, window, target.forced)
        self._was_full = False
        self._drafter.begin(Batch(session, target, noise, self.tokens, call))

    def run(self) -> None:
        """Decode every row to its end."""
        progress = CommittedBounds(self._length, self._drafter.window)
        while not progress.done:
            self.step(progress.behind)
            progress.step(self.committed)

    def step(self, behind: int) -> None:
        """Queue one target forward and what follows from it, without waiting for either; no row has committed fewer
        than `behind` slots."""
        self.steps = self.steps + 1
        # Near the end a full window would only predict slots past it. The one column too many lets the last slot
        # hold a tested draft whatever else is in the batch, so that an image does not depend on it.
        width = min(self._drafter.window, self._length - behind + 1)
        with self._spans("draft"):
            proposal = self._drafter.propose(self.committed, width, self.steps)
        with self._spans("target"):
            logits = self.session.forward(proposal.tokens, proposal.positions, proposal.branches)
        with self._spans("verify"):
            self._verify(logits, proposal)

    def restart(self, rows: Tensor, keys: Sequence[int]) -> None:
        """Begin other images, of these noise keys, in `rows` [K]; their prompts are in the session already."""
        self._noise.rekey(rows.tolist(), keys)
        for state in (self.tokens, self.committed, self.steps):
            state[rows] = 0
        self.recorder.restart(rows)
        self._drafter.restart(rows)

    def _verify(self, logits: Tensor, proposal: Proposal) -> None:
        """Verify the drafts, commit what holds, and tell the drafter."""
        tables = routes(proposal.tree, logits.device)
        full = len(proposal.tree.parents) == self._drafter.columns
        # Compiled code must not find anything new: a first full window makes all that the record will ever hold.
        call = self._call if full and self._was_full else call_eager
        verified, positions, shift = call(Loop._judge, self, logits, proposal, tables, self.committed, self.steps)
        self._was_full |= full
        if proposal.branches is not None:
            self.session.keep(verified.columns[:, 1:], positions[:, 1:])
        self._drafter.observe(verified, positions, shift, self._refine.keeps_tail)
        self.committed = self.committed + shift

    def _judge(
        self, logits: Tensor, proposal: Proposal, tables: Routes, committed: Tensor, step: Tensor
    ) -> tuple[Verification, Tensor, Tensor]:
        """Verify the drafts and record the outcome: it, the slots [B, T] of its path, and the tokens [B] to commit."""
        p = self._target(logits, proposal.positions)
        verified = verify_tree(p, proposal, tables, self._verifier, self._refine, self._noise, step)
        positions = committed[:, None] + torch.arange(verified.tokens.shape[1], device=p.device)
        self.tokens.scatter_(1, positions, verified.tokens)
        self.recorder.slots(verified.p, verified.tokens, positions, step)
        self.recorder.verification(verified, proposal, tables, positions)
        return verified, positions, (verified.first + 1).minimum(self._length - committed)
