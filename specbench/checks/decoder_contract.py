"""Conformance tests for decoders, on models small enough to enumerate.

`specbench audit` measures how far a decoder is from exact sampling. These tests check whether its counters and records
can be trusted. For a vocabulary that cannot be enumerated, a small transformer with random weights is decoded like real
models: the Rosenblatt transform of its tokens under a float64 reference must be uniform and independent.
"""

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
import torch

from specbench.checks.audit_settings import in_window
from specbench.checks.divergence import AUDIT_LEVEL
from specbench.checks.enumerable_model import EnumerableModel, EnumerableTransformer, processed
from specbench.checks.findings import FAILED, OK, SKIPPED, SLOW, Finding, finding, run_tests
from specbench.checks.losslessness import (
    AUDIT_SAMPLES,
    LOSSLESS,
    LOSSY,
    Auditable,
    Decode,
    audit_one,
    load_decoder,
    own_images,
    tokens_of,
    verdict_line,
    without_errors,
)
from specbench.decoding.continuous_batching import decode_each
from specbench.decoding.generation import Generation, Order
from specbench.decoding.loop import decode
from specbench.errors import SpecbenchError
from specbench.models.interface import ImageModel, TokenLayout
from specbench.prompts import Request
from specbench.runs.decoder_args import labelled_decoders
from specbench.specs.presets import DecoderSpec, resolve
from specbench.specs.run_spec import Sampling
from specbench.stats.rosenblatt import RosenblattResult, Tokens, audit_tokens
from specbench.system.torch_state import PinnedTorch

SLOW_RULE = 3.0
"""A decoder is slow if its time per step outside target forwards exceeds exact SJD's (same window) by this factor."""
_SAMPLING = Sampling(guidance=2.0, temperature=0.9)
_LAYOUT = TokenLayout.with_row_ends(2, 3, 3)
_TEXTS = ("one", "two")
WIDE_SAMPLING = Sampling(guidance=2.0, temperature=3.0, top_k=1000, top_p=0.95)
"""At this high temperature drafts are often kept, so that drafts at the end of the window are also tested."""
WINDOW, ROWS = 12, 48
_WIDE = TokenLayout.plain(1, 18, 4160)
_IMAGES = 240
_TOGETHER = 24
WIDE_DTYPES = {"float32": (torch.float32, 1e-3, 0.001), "bfloat16": (torch.bfloat16, 0.1, 0.05)}
"""Tolerances for rounding: error of a recorded log p in nats; share of tokens with a larger error or with p = 0."""


@PinnedTorch(False)
def check_decoder(decoder: Auditable, samples: int = AUDIT_SAMPLES) -> list[Finding]:
    """Run every conformance test on a decoder, named as for `specbench.checks.losslessness.audit_decoders`. `samples`:
    images for the exactness test, on the settings of `specbench audit`."""
    torch.set_num_threads(1)  # more threads are slower with such small tensors; `PinnedTorch` restores the number
    return run_tests(ContractChecks(*load_decoder(decoder), seed=0).all(samples))


def check_named(
    names: Sequence[str], samples: int | None, announce: Callable[[str], None]
) -> Iterator[dict[str, object]]:
    """Yield `decoder, check, status, detail` of every test of decoders, see `specbench.checks.contracts.check_all`."""
    for label, decoder in labelled_decoders(names):
        announce(label)
        for result in check_decoder(decoder, samples or AUDIT_SAMPLES):
            yield {"decoder": label, **vars(result)}


class ContractChecks:
    """The tests of one decoder."""

    def __init__(self, name: str, decoder: DecoderSpec | Decode, seed: int):
        self._name, self._decoder, self._seed = name, decoder, seed
        self._spec = in_window(decoder, 3) if isinstance(decoder, DecoderSpec) else None
        self._model = EnumerableModel(_LAYOUT, _TEXTS, seed=seed)
        self._requests = [Request(_TEXTS[n % 2], f"prompt {n % 2}", n // 2) for n in range(6)]

    def all(self, samples: int) -> Iterator[tuple[str, Callable[[], Finding]]]:
        yield "exactness", lambda: self.exactness(samples)
        yield "counters", self.counters
        yield "log-probabilities", self.log_probabilities
        yield "resume", self.resume
        yield "batch", self.batch
        yield "continuous batching", self.continuous_batching
        yield "trace", self.trace
        yield "forced slots", self.forced_slots
        yield "wide vocabulary", self.wide_vocabulary
        yield "speed", self.speed

    def exactness(self, samples: int) -> Finding:
        """The audit does not find a deviation in a decoder that is declared lossless."""
        row = audit_one(self._name, self._decoder, samples, self._seed)
        seen = f"total variation {row['tv']:.4f} over {row['samples']:,} images"
        if row["declared"] == LOSSLESS and row["verdict"] == LOSSY:
            return Finding(
                "exactness", FAILED, f"it is declared lossless, but its images do not have the distribution of AR "
                f"sampling: {seen}, p = {row['p_value']:.1e}, most clearly in '{row['worst_setting']}'; declare it "
                "lossless=False, or correct its acceptance and residual",
            )  # fmt: skip
        declared = row["declared"] or "nothing"
        return Finding("exactness", OK, f"declared {declared}, {verdict_line(row)}: {seen}")

    def counters(self) -> Finding:
        """Steps, drafts and acceptances are consistent with each other."""
        wrong = []
        for image in self._generations(self._requests):
            free = int((~image.forced).sum())
            steps = image.committed_step[~image.forced]  # forced slots may be filled without a forward
            wrong += [
                words
                for broken, words in (
                    (len(image.tokens) != _LAYOUT.length, f"{len(image.tokens)} tokens instead of {_LAYOUT.length}"),
                    (not 1 <= image.nfe <= _LAYOUT.length, f"nfe is {image.nfe} for {free} free slots"),
                    (steps.min() < 1 or steps.max() > image.nfe,
                     f"committed_step runs from {steps.min()} to {steps.max()}, but nfe is {image.nfe}"),
                    (set(range(1, image.nfe + 1)) - set(image.committed_step.tolist()), "a step committed nothing"),
                    (np.any(image.tested > image.drafted), "more drafts tested than drafted"),
                    (np.any(image.accepted > image.tested), "more drafts accepted than tested"),
                    (image.accepted.sum() > free, f"{image.accepted.sum()} drafts accepted for {free} free slots"),
                )
                if broken
            ]  # fmt: skip
        return finding("counters", wrong, "steps, drafts and acceptances add up")

    def log_probabilities(self) -> Finding:
        """`logp` and `entropy` equal the target's values given the final tokens before the slot."""
        worst, place = 0.0, 0
        for request, image in zip(self._requests, self._generations(self._requests), strict=True):
            for slot, (logp, entropy) in enumerate(self._truth(request.text, image.tokens)):
                pairs = ((logp, image.logp[slot]), (entropy, image.entropy[slot]))
                off = max(0.0 if true == stored else abs(true - float(stored)) for true, stored in pairs)
                if off > worst:
                    worst, place = off, slot
        if worst > 1e-3:
            return Finding("log-probabilities", FAILED,
                           f"logp or entropy at slot {place} is off by {worst:.3g}: it must be the target's value "
                           "after guidance, temperature, top-k and top-p, given its final prefix")  # fmt: skip
        return Finding("log-probabilities", OK, f"equal to the target's within {worst:.1e}")

    def resume(self) -> Finding:
        """An image depends on its seed, prompt id and sample, not on images decoded before it."""
        first = self._tokens(self._requests)
        self._tokens(self._requests[:3])
        again = self._tokens(self._requests[::-1])[::-1]
        renamed = [Request(request.text, request.prompt_id + "'", request.sample) for request in self._requests]
        other = self._tokens(renamed)
        wrong = []
        if not np.array_equal(first, again):
            wrong.append("the same requests in another order give other images: noise must depend on seed, prompt, "
            "sample and slot, not on the order of calls, and calls must share no state")  # fmt: skip
        if np.array_equal(first, other):
            wrong.append("prompts with another id give the same images: the noise ignores the id")
        return finding("resume", wrong, "an interrupted run continues with the same images")

    def batch(self) -> Finding:
        """An image decoded alone equals the image decoded in a batch."""
        alone = np.concatenate([self._tokens([request]) for request in self._requests])
        return self._unchanged("batch", alone, f"decoded in a batch of {len(alone)}", "alone or in a batch")

    def continuous_batching(self) -> Finding:
        """An image decoded in a refilled row equals the image decoded alone."""
        if self._spec is None:
            return Finding(
                "continuous batching", SKIPPED, "only a Preset or DecoderSpec is decoded by continuous batching"
            )
        decoded = dict(decode_each(self._model, self._requests, 2, self._spec, _SAMPLING, self._seed))
        refilled = tokens_of(without_errors([decoded[request] for request in self._requests]))
        return self._unchanged("continuous batching", refilled, "rows are refilled", "in refilled rows")

    def trace(self) -> Finding:
        """Tokens are the same with and without traces."""
        if self._spec is None:
            return Finding("trace", SKIPPED, "only a Preset or DecoderSpec is traced")
        traced = decode(self._model, self._requests, self._spec, _SAMPLING, self._seed, render=False, trace=True)
        tokens = tokens_of(without_errors(traced))
        return self._unchanged("trace", tokens, "traces are recorded", "with and without traces")

    def _unchanged(self, name: str, tokens: np.ndarray, when: str, where: str) -> Finding:
        """Compare stream tokens [B, N] of the images with the tokens of a single batch."""
        differing = int((self._tokens(self._requests) != tokens).any(1).sum())
        wrong = [f"{differing} of {len(tokens)} images change when {when}"] * bool(differing)
        return finding(name, wrong, f"{where}, the same images")

    def forced_slots(self) -> Finding:
        """Forced tokens are in exactly the slots that the grammar demands."""
        tokens, forced = self._tokens(self._requests), np.array(_LAYOUT.forced)
        wrong = []
        if (tokens[:, forced >= 0] != forced[forced >= 0]).any():
            wrong.append("a slot that the grammar forces holds another token")
        if ((tokens < 0) | (tokens >= _LAYOUT.v_image))[:, forced < 0].any():
            wrong.append("a free slot holds a token that is not an image token")
        return finding("forced slots", wrong, "row ends are in their slots, and image tokens in all others")

    def wide_vocabulary(self) -> Finding:
        """Tokens match a float64 reference, with a large vocabulary, eleven drafts per window, and refilled rows."""
        wrong, seen = [], []
        for dtype in WIDE_DTYPES:
            faults, result = wide_faults(self._wide_images, dtype, self._seed)
            wrong += faults
            seen.append(result.detectable)
        declared = getattr(self._decoder, "lossless", None)
        if wrong and not declared:
            return Finding("wide vocabulary", OK, f"not declared lossless, so it may deviate; {wrong[0]}")
        fine = f"samples of p in {' and '.join(WIDE_DTYPES)} (detects a share of {max(seen):.3f} wrong tokens)"
        return finding("wide vocabulary", wrong, fine)

    def _wide_images(self, model: EnumerableTransformer, requests: Sequence[Request]) -> Sequence[Any]:
        if not isinstance(self._decoder, DecoderSpec):
            return own_images(self._decoder, model, requests, WIDE_SAMPLING, self._seed)
        spec = in_window(self._decoder, WINDOW)
        images = dict(decode_each(model, requests, ROWS, spec, WIDE_SAMPLING, self._seed))
        return without_errors([images[request] for request in requests])

    def speed(self) -> Finding:
        """Time of a step outside its target forward, on the embedded model, relative to exact SJD."""
        if not isinstance(self._decoder, DecoderSpec):
            return Finding("speed", SKIPPED, "only a Preset or DecoderSpec is timed, not a function")
        from specbench.models.catalog import load_model  # imports the networks, which only this test needs

        model, window = load_model("shapes"), self._decoder.options.get("window")
        mine = _rule_ms(model, self._decoder)
        exact = _rule_ms(model, in_window(resolve("sjd"), window))
        status = OK if mine <= SLOW_RULE * exact else SLOW
        advice = "" if status == OK else "; look for Python loops over the vocabulary, and for host syncs"
        return Finding(
            "speed", status, f"{mine:.2f} ms a step outside the forward, {mine / exact:.1f} times SJD's{advice}"
        )

    def _tokens(self, requests: Sequence[Request]) -> np.ndarray:
        """Stream tokens [B, N] of the requests."""
        return tokens_of(self._decode(requests))

    def _generations(self, requests: Sequence[Request]) -> list[Generation]:
        decoded = self._decode(requests)
        if not isinstance(decoded[0], Generation):
            raise SpecbenchError("the decoder returns only tokens; runs need a Generation with counters for each image")
        return list(decoded)

    def _decode(self, requests: Sequence[Request]) -> Sequence[Any]:
        if isinstance(self._decoder, DecoderSpec):
            spec = in_window(self._decoder, 3)
            return without_errors(decode(self._model, requests, spec, _SAMPLING, self._seed, render=False))
        return own_images(self._decoder, self._model, requests, _SAMPLING, self._seed)

    def _truth(self, text: str, tokens: np.ndarray) -> Iterator[tuple[float, float]]:
        """log p and entropy at every slot, from the model's tables; both are 0 at forced slots."""
        code = 0
        for slot, (forced, token) in enumerate(zip(_LAYOUT.forced, tokens.tolist(), strict=True)):
            if forced >= 0:
                yield 0.0, 0.0
            else:
                p = processed(self._model.guided(text, slot, code, _SAMPLING.guidance), _SAMPLING)
                yield float(np.log(p[token])), float(-(p * np.log(p)).sum())
            code += token * _LAYOUT.vocab**slot


def _rule_ms(model: ImageModel, spec: DecoderSpec) -> float:
    """Milliseconds per step for drafting, verification and host work; the minimum over two images."""
    sampling, times = Sampling(), []
    for sample in range(3):
        request = Request("a red circle", "(check)", sample)
        (image,) = without_errors(decode(model, [request], spec, sampling, 0, render=False))
        times.append(sum(image.spans_ms.get(span, 0.0) for span in ("draft", "verify", "host")) / image.nfe)
    return min(times[1:])


def wide_faults(
    decode: Callable[[EnumerableTransformer, Sequence[Request]], Sequence[Any]], dtype: str, seed: int
) -> tuple[list[str], RosenblattResult]:
    """Return the problems of a decoder's images in `dtype`, as sentences, and the result of the test of their tokens.
    `decode`: function that returns the images, or their stream tokens, in the order of the requests."""
    kind, distance, share = WIDE_DTYPES[dtype]
    model = EnumerableTransformer(_WIDE, _TEXTS, seed)
    embedding = model.backbone.embed_tokens.weight[: _WIDE.vocab]
    # With similar embeddings, drafts that were drawn after other tokens are often kept, also at the window's end.
    embedding.mul_(0.1).add_(10 * embedding[0])
    model.backbone.to(kind)
    model.codebook, model.matrix = model.codebook.to(kind), model.matrix.to(kind)
    requests = [Request(_TEXTS[n % 2], f"prompt {n % 2}", n // 2) for n in range(_IMAGES)]
    images = decode(model, requests)
    tokens: np.ndarray = tokens_of(images).astype(np.int64)
    values = np.empty((4, *tokens.shape))
    for number, text in enumerate(_TEXTS):
        of_text = range(number, _IMAGES, len(_TEXTS))
        for start in range(0, len(of_text), _TOGETHER):
            rows = of_text[start : start + _TOGETHER]
            values[:, rows] = _reference(model, text, tokens[rows], seed + start)
    by_id, by_p, logp, entropy = values
    impossible = float(np.isinf(logp).mean())
    wrong = [f"{impossible:.1%} of the tokens have probability 0"] * (impossible > share)
    if isinstance(images[0], Generation):
        with np.errstate(invalid="ignore"):
            off = np.abs(np.stack([image.logp for image in images]) - logp) > distance
        beyond = float(off.mean())
        wrong += [f"{beyond:.1%} of the recorded log p are more than {distance:g} off"] * (beyond > share)
    orders: dict[Order, np.ndarray] = {"u_id": by_id, "u_p": by_p}
    if all("u_pq" in getattr(image, "uniforms", {}) for image in images):
        orders["u_pq"] = np.stack([image.uniforms["u_pq"] for image in images]).astype(float)
    result = audit_tokens(Tokens(orders, None, entropy), AUDIT_LEVEL)
    if result.deviates:
        test = result.tests[0]
        wrong.append(f"tokens are not samples of p (p = {test.corrected:.1e}, {test.order}, {test.kind} {test.group})")
    return [f"{dtype}: {text}" for text in wrong], result


@PinnedTorch()
def _reference(model: EnumerableTransformer, text: str, tokens: np.ndarray, seed: int) -> np.ndarray:
    """Compute [4, n, N] for `tokens` given earlier tokens: uniform by id, uniform by descending p, log p, entropy."""
    logits = model.guided(text, torch.from_numpy(tokens[:, :-1]), WIDE_SAMPLING.guidance)
    p = processed(logits, WIDE_SAMPLING)
    p_token = np.take_along_axis(p, tokens[..., None], -1)
    before = np.arange(p.shape[-1]) < tokens[..., None]
    by_id = np.where(before, p, 0).sum(-1)
    by_p = np.where((p > p_token) | ((p == p_token) & before), p, 0).sum(-1)
    p_token, v = p_token[..., 0], np.random.default_rng(seed).random(tokens.shape)
    with np.errstate(divide="ignore"):
        logp = np.log(p_token)
    entropy = -(p * np.log(np.where(p > 0, p, 1))).sum(-1)
    return np.stack([by_id + v * p_token, by_p + v * p_token, logp, entropy])
