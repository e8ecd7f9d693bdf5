"""The decode loop of all decoders that fill one window, and `decode`, which runs a batch of requests.

One step: propose drafts, run one target forward, verify the drafts, commit the accepted drafts and one more token,
refine the rest into the next drafts. Rows of a batch commit at different speeds.

Decoders of several image rows in parallel have separate loops (`specbench.decoding.zipar`, `row_jacobi`).
Continuous batching (`specbench.decoding.continuous_batching`) runs the steps of this loop and refills complete rows.
"""

import time
from collections.abc import Callable, Iterator, Sequence
from itertools import islice
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from specbench.decoding.build import Method, build, is_built_in
from specbench.decoding.draft_tree import Routes, first_drafts_by_depth, routes
from specbench.decoding.generation import Generation
from specbench.decoding.interfaces import Batch, DecodeLoop, OwnSessionDrafter, Proposal, Verification
from specbench.decoding.noise import Noise, row_key
from specbench.decoding.recorded_step import RecordedStep
from specbench.decoding.recorder import NoRecorder, StepRecorder
from specbench.decoding.sampling import Target
from specbench.decoding.timing import Spans
from specbench.decoding.verification.chain_verification import verify_chain
from specbench.decoding.verification.tree_verification import verify_tree
from specbench.errors import PARTIAL, SpecbenchError
from specbench.models.interface import Call, CompilableModel, FallibleModel, ImageModel, PartedSession, StagedModel
from specbench.models.transformer.compilation import call_eager
from specbench.models.transformer.host_sync import LaggingHostCopy
from specbench.prompts import Request
from specbench.prompts.prompt_set import second_stage_id
from specbench.specs.presets import DecoderSpec, resolve
from specbench.specs.run_spec import Sampling
from specbench.system.torch_state import PinnedTorch

WARM_UP_STEPS = 32
"""Maximum steps of a warm-up. On a GPU the first three steps of a new shape run, capture and replay it."""
_LAST_SLOTS = 8  # Slots at the end of an image that a warm-up decodes, because their windows are narrower


class Decoding(NamedTuple):
    """Model, decoder and settings with which images are decoded."""

    model: ImageModel
    decoder: DecoderSpec
    sampling: Sampling
    seed: int  # random seed of the run; with prompt id and sample it determines an image's noise
    trace: bool = False  # whether to record `Generation.draft_tv` and `draft_top1`; no span includes their time


@PinnedTorch()
def decode(
    model: ImageModel,
    requests: Sequence[Request],
    decoder: DecoderSpec,
    sampling: Sampling,
    seed: int,
    render: bool = True,
    trace: bool = False,
    rare: bool = False,
    watch: Callable[[Any], object] | None = None,
) -> list[Generation | SpecbenchError]:
    """Decode `requests` as one batch.

    Args:
        decoder, sampling, seed, trace: see `Decoding`.
        render: whether to decode the tokens into pixels.
        rare: whether batches of this size are too rare to compile the decoder for.
        watch: called with the committed tokens after each step, see `DecodeLoop.run`.

    Returns:
        For each request its `Generation`, or the `SpecbenchError` that made the image fail (for example NaN logits). A
        failure does not affect other rows.
    """
    spans = Spans(model.device)
    loop = begin(Decoding(model, decoder, sampling, seed, trace), requests, spans, rare)
    start = time.perf_counter()
    for committed in loop.run():
        if watch:
            watch(committed)
    with spans("verify"):
        loop.recorder.flush()
    total_ms = (time.perf_counter() - start) * 1e3
    tokens = loop.tokens[:, : model.layout.length]
    pictures: list[tuple[np.ndarray | None, dict[str, float]]] = [(None, {})] * len(requests)
    if render:
        with spans("render"):
            pictures = drawn(model, tokens, requests, decoder, seed)
    spans_ms = spans.totals_ms()
    spans_ms["host"] = max(0.0, total_ms - sum(spans_ms[name] for name in ("draft", "target", "verify")))
    spans_ms["verify"] -= spans_ms.pop("trace", 0.0)
    every = torch.arange(len(requests), device=model.device)
    rows = loop.recorder.rows(every, tokens, np.array(model.layout.forced) >= 0, [spans_ms] * len(requests))
    for row, (image, facts) in zip(rows, pictures, strict=True):
        row.image, row.facts = image, row.facts | facts
    return [checked(row, request, model) for row, request in zip(rows, requests, strict=True)]


@PinnedTorch()
def decode_tokens(how: Decoding, requests: Sequence[Request], rare: bool = False) -> Tensor:
    """Decode `requests` as one batch with the steps of `decode`; return stream tokens [B, N] without measurements.

    With `trace`, the steps are still recorded and traced.
    """
    loop = begin(how, requests, Spans(how.model.device), rare)
    if not how.trace:
        loop.recorder = NoRecorder()
    for _ in loop.run():
        pass
    return loop.tokens[:, : how.model.layout.length]


@PinnedTorch()
def warm_up_steps(how: Decoding, requests: Sequence[Request], render: bool = True) -> Iterator[int]:
    """Run at most `WARM_UP_STEPS` steps that compile, allocate or load everything an image needs. Yield their number
    after each step. `render`: whether to decode tokens into pixels at the end."""
    model, batch = how.model, (how, requests, Spans(how.model.device))
    loop, done = begin(*batch), 0
    slots = loop.warm_up_slots()
    for slot in slots:
        if slot:
            del loop  # frees its cache, so that the next loop has the same addresses, which graphs need
            loop = begin(*batch)
        for _ in islice(loop.run(slot), WARM_UP_STEPS // len(slots)):
            done += 1
            yield done
    tokens, every = loop.tokens[:, : model.layout.length], torch.arange(len(requests), device=model.device)
    loop.recorder.rows(every, tokens, np.array(model.layout.forced) >= 0, [{}] * len(requests))
    if isinstance(model, StagedModel):
        second, asked, decoder, sampling = second_stage(model, tokens, requests, how.decoder)
        yield from warm_up_steps(Decoding(second, decoder, sampling, how.seed), asked, render)
    elif render:
        drawn(model, tokens, requests, how.decoder, how.seed)


def drawn(
    model: ImageModel, tokens: Tensor, requests: Sequence[Request], decoder: DecoderSpec, seed: int
) -> list[tuple[np.ndarray | None, dict[str, float]]]:
    """Render stream tokens [B, N]. Return for each image its pixels, uint8 [3, H, W] (None if it cannot render), and
    the facts of its second stage ({} without a second stage). The image's noise key seeds random rendering."""
    if isinstance(model, StagedModel):
        made = []
        for image in decode(*second_stage(model, tokens, requests, decoder), seed):
            if isinstance(image, SpecbenchError):
                raise image
            made.append((image.image, second_stage_facts(image)))
        return made
    if not getattr(model, "draws", True):
        return [(None, {})] * len(requests)
    texts = [request.text for request in requests]
    pixels = model.render(model.layout.image_tokens(tokens), texts, noise_keys(requests, seed)).cpu().numpy()
    if pixels.dtype != np.uint8 or pixels.ndim != 4 or pixels.shape[:2] != (len(tokens), 3) or not pixels.size:
        what = f"the model rendered {pixels.dtype} {list(pixels.shape)}, not uint8 [{len(tokens)}, 3, H, W]"
        raise SpecbenchError(what, exit_code=PARTIAL)
    return [(picture, {}) for picture in pixels]


def second_stage(
    model: StagedModel, tokens: Tensor, requests: Sequence[Request], decoder: DecoderSpec
) -> tuple[ImageModel, list[Request], DecoderSpec, Sampling]:
    """Return the arguments of `decode` for the second stage. It uses the first stage's decoder, but AR if the decoder
    has a draft head, because a head fits one network only. The prompt ids differ, so that the stages share no noise."""
    asked = [
        Request(model.second_text(request.text, row), second_stage_id(request.prompt_id, request.sample))
        for request, row in zip(requests, tokens.tolist(), strict=True)
    ]
    has_head = decoder.options.get("head") is not None
    return model.second, asked, resolve("ar") if has_head else decoder, model.second_sampling


def second_stage_facts(image: Generation) -> dict[str, float]:
    """`Generation.facts` of a first stage about its second stage: target forwards, milliseconds from prefill to the
    last token, drafts tested and accepted."""
    ms = sum(ms for name, ms in image.spans_ms.items() if name not in ("encode", "render")) / image.batch
    counts = {"tested": image.tested.sum(), "accepted": image.accepted.sum()}
    return {"stage2_nfe": image.nfe, "stage2_ms": ms} | {f"stage2_{name}": int(n) for name, n in counts.items()}


def begin(how: Decoding, requests: Sequence[Request], spans: Spans, rare: bool = False) -> DecodeLoop:
    """Create the loop of a batch, with its prompts in the target's cache; see `decode`."""
    model, decoder, sampling = how.model, how.decoder, how.sampling
    method = build(decoder, model)
    noise = Noise(noise_keys(requests, how.seed), model.layout.vocab, model.device)
    with spans("encode"):
        prefix = model.encode([request.text for request in requests])
    with spans("prefill"):
        if isinstance(method.drafter, OwnSessionDrafter):
            session = method.drafter.open(prefix, sampling.guidance)
        else:
            session = model.begin(prefix, sampling.guidance, method.drafter.columns)
    target = Target(model.layout, sampling, model.device)
    call = call_eager
    # Traces are timed inside verification, and plug-in components may hold state between steps: neither can be
    # compiled.
    if isinstance(model, CompilableModel) and not how.trace and not rare and is_built_in(decoder):
        call = model.call_for((decoder, sampling), len(requests))
    loop = method.loop(method, session, target, noise, len(requests), spans, call)
    if how.trace:
        loop.recorder.trace(spans)
    return loop


def noise_keys(requests: Sequence[Request], seed: int) -> list[int]:
    return [row_key(seed, request.prompt_id, request.sample) for request in requests]


def checked(row: Generation, request: Request, model: ImageModel) -> Generation | SpecbenchError:
    """Return the image, or the error for which it counts as failed."""
    if isinstance(model, FallibleModel) and (problem := model.problem(row.tokens)):
        return SpecbenchError(f"prompt '{request.prompt_id}': {problem}", exit_code=1)
    if np.isnan(row.entropy).any():
        slot = int(np.isnan(row.entropy).argmax())
        narrow = "; float16 may overflow, try --dtype bfloat16" if model.dtype == torch.float16 else ""
        what = f"prompt '{request.prompt_id}': the model gave NaN logits at token {slot}{narrow}"
        return SpecbenchError(what, exit_code=1)
    return row


class Loop:
    """The draft-and-verify loop of a batch. B rows, N stream slots, window W.

    Attributes:
        tokens: [B, N + W] committed tokens, then drafts, by stream slot.
        committed: [B] committed tokens per row.
        steps: [B, 1] target forwards per row.
        session: the target's session.
        recorder: measurements of the batch.
    """

    def __init__(
        self,
        method: Method,
        session: Any,
        target: Target,
        noise: Noise,
        rows: int,
        spans: Spans,
        call: Call = call_eager,
    ):
        """`session`: a `Session`, for draft heads a `FeatureSession`. `call(fn, *args)` runs fn eagerly or
        compiled."""
        self._drafter, self._verifier, self._refinement = method.drafter, method.verifier, method.refinement
        self.session, self._target, self._noise, self._spans, self._call = session, target, noise, spans, call
        device = target.forced.device
        self._length = len(target.forced) - 1
        window = self._drafter.window
        self.tokens = torch.zeros(rows, self._length + window, dtype=torch.long, device=device)
        self.committed = torch.zeros(rows, dtype=torch.long, device=device)
        self.steps = torch.zeros(rows, 1, dtype=torch.long, device=device)
        self.recorder = StepRecorder(rows, self._length, window, target.forced, noise, call is not call_eager)
        self._was_full = False
        self._drafter.begin(Batch(session, target, noise, self.tokens, call))

    def run(self, slot: int = 0) -> Iterator[Tensor]:
        """Decode every row to its end from stream slot `slot`; see `DecodeLoop`."""
        self.committed = self.committed + slot
        bounds = CommittedBounds(self._length, self._drafter.window, slot)
        while not bounds.done:
            self.step(bounds.behind)
            bounds.step(self.committed)
            yield self.committed

    def warm_up_slots(self) -> list[int]:
        """Return the first slot, slots from which more of the cache is read, and a slot near the end."""
        parts = self.session.part_starts() if isinstance(self.session, PartedSession) else []
        return sorted({0, *parts, max(0, self._length - _LAST_SLOTS)})

    def step(self, behind: int) -> None:
        """Queue one step without waiting for the device; every row has committed at least `behind` tokens."""
        self.steps = self.steps + 1
        # Near the end a full window would only predict slots past it. One extra column lets the last slot hold a tested
        # draft in every batch, so that an image does not depend on the other rows.
        width = min(self._drafter.window, self._length - behind + 1)
        with self._spans("draft"):
            proposal = self._drafter.propose(self.committed, width, self.steps)
        with self._spans("target"):
            logits = self.session.forward(proposal.tokens, proposal.positions, proposal.branches)
        with self._spans("verify"):
            self._commit(logits, proposal)

    def restart(self, rows: Tensor, keys: Sequence[int]) -> None:
        """Start other images, with noise `keys`, in `rows` [K]; the session already has their prompts."""
        self._noise.rekey(rows, keys)
        for state in (self.tokens, self.committed, self.steps):
            state[rows] = 0
        self.recorder.restart(rows)
        self._drafter.restart(rows)

    def _commit(self, logits: Tensor, proposal: Proposal) -> None:
        """Verify the drafts, commit the accepted drafts and one more token, and update drafter and cache."""
        tree, device = proposal.tree, logits.device
        tables = None if tree.is_chain else routes(tree, device)
        full = len(tree.parents) == self._drafter.columns
        # The first full window after a narrower window runs eagerly. So all recorder buffers exist before tracing, and
        # the previous step's q, which the recorder reads, always has the same shape in compiled code.
        call = self._call if full and self._was_full else call_eager
        arguments = (logits, proposal, tables, first_drafts_by_depth(tree, device), self.committed, self.steps)
        verified, positions, shift = call(Loop._verify, self, *arguments)
        self._was_full = full
        if tables is not None:
            self.session.keep(verified.columns[:, 1:], positions[:, 1:])
        self._drafter.observe(verified, positions, shift, self._refinement.keeps_tail)
        self.committed = self.committed + shift

    def _verify(
        self,
        logits: Tensor,
        proposal: Proposal,
        tables: Routes | None,
        by_depth: Tensor,
        committed: Tensor,
        step: Tensor,
    ) -> tuple[Verification, Tensor, Tensor]:
        """Verify and record the drafts. Return the outcome, its slots [B, T], and the number [B] to commit."""
        p = self._target(logits, proposal.positions)
        verified = self._judged(p, proposal, tables, step)
        positions = proposal.positions
        if tables is not None:
            positions = committed[:, None] + torch.arange(verified.tokens.shape[1], device=p.device)
        self.tokens.scatter_(1, positions, verified.tokens)
        self.recorder.step(
            RecordedStep(verified, proposal, tables=tables, by_depth=by_depth, positions=positions, steps=step)
        )
        return verified, positions, (verified.first + 1).minimum(self._length - committed)

    def _commit_chain(self, verified: Verification, tested: Proposal, columns: Tensor | None) -> Tensor:
        """Store and record a tree's path: `tested`, a chain, with `columns` [B, T]. Return the number [B] to commit."""
        self.tokens.scatter_(1, tested.positions, verified.tokens)
        if columns is not None:
            self.session.keep(columns[:, 1:], tested.positions[:, 1:])
        by_depth = first_drafts_by_depth(tested.tree, self.tokens.device)
        self.recorder.step(
            RecordedStep(verified, tested, tables=None, by_depth=by_depth, positions=tested.positions, steps=self.steps)
        )
        return (verified.first + 1).minimum(self._length - self.committed)

    def _judged(self, p: Tensor, proposal: Proposal, tables: Routes | None, step: Tensor) -> Verification:
        """Test the drafts, given the target distributions p of all tokens of the forward."""
        parts = self._verifier, self._refinement, self._noise, step
        return verify_chain(p, proposal, *parts) if tables is None else verify_tree(p, proposal, tables, *parts)


class CommittedBounds:
    """Bounds on the committed tokens of the slowest row, if a step commits 1 to `most` of `length` tokens per row.

    The host synchronises with the device only if the bounds cannot decide whether the batch is complete: never for AR,
    for a window W once per W / (tokens per step) steps, and in every step of the last window. On a GPU the host reads
    the count of the previous step, so at most one step is superfluous.

    Attributes:
        behind: lower bound on the tokens that the slowest row has committed.
    """

    def __init__(self, length: int, most: int, start: int = 0):
        """`start`: maximum of the rows' tokens; no row is more than `most` behind it."""
        self.behind, self._ahead = max(0, start - most), start
        self._length, self._most = length, most
        self._copy, self._steps = LaggingHostCopy(), 0

    @property
    def done(self) -> bool:
        return self.behind >= self._length

    def step(self, committed: Tensor) -> None:
        """Update the bounds for a queued step; `committed` [B]: tokens per row after it."""
        self._steps += 1
        self.behind += 1
        self._ahead += self._most
        if self.behind < self._length <= self._ahead and (copied := self._copy.take(committed, self._steps)):
            slowest, since = min(copied[0]), self._steps - copied[1]
            self.behind, self._ahead = max(self.behind, slowest + since), slowest + since * self._most
