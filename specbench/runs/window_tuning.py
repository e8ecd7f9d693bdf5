"""`--window auto`: measure which window has the lowest latency on pilot prompts, which have noise of their own and are
discarded. A wider window needs fewer but slower steps."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import nullcontext

from specbench.decoding.generation import Generation
from specbench.decoding.loop import decode
from specbench.errors import FAILURE, SpecbenchError
from specbench.models.interface import CompilableModel, ImageModel
from specbench.prompts import Prompt, Request
from specbench.runs.decoder_args import with_window
from specbench.specs.presets import DecoderSpec, resolve
from specbench.specs.run_spec import Sampling
from specbench.store.schema import AR_SPANS

PILOTS = 2
PILOT_ID = "(pilot)"


def tune_window(
    model: ImageModel,
    prompts: Sequence[Prompt],
    decoder: DecoderSpec,
    sampling: Sampling,
    seed: int,
    windows: Sequence[int],
    tell: Callable[[int], None] = lambda tried: None,
) -> tuple[int, list[dict[str, float]]]:
    """Choose the one of `windows` with the lowest latency on the pilots; also return the measured curve, see `_point`.
    Windows are tried in growing order until two in a row are slower than the best; `tell` learns how many were tried.
    Of a compiled model the forwards alone are compiled and counted, with an overhead of 1: all functions of every
    window would take minutes to compile."""
    if "window" not in dict(decoder.options):
        raise SpecbenchError(f"decoder '{decoder.name}' has no window to choose", "omit --window")
    requests = [Request(prompts[number % len(prompts)].text, PILOT_ID, number) for number in range(PILOTS)]
    compiles = isinstance(model, CompilableModel) and model.compiles
    if not compiles:
        decode(model, requests[:1], with_window(decoder, 2), sampling, seed)
    with model.forwards_alone() if compiles else nullcontext():
        ar = _measure(model, requests, resolve("ar"), sampling, seed, compiles)
        curve, best = [_point(1, ar, ar, compiles)], None
        for window in sorted(windows):
            tell(len(curve))
            images = _measure(model, requests, with_window(decoder, window), sampling, seed, compiles)
            point = _point(window, images, ar, compiles)
            curve.append(point)
            if best is None or point["latency_ms"] < best["latency_ms"]:
                best = point
            if all(tried["latency_ms"] > best["latency_ms"] for tried in curve[-2:]):
                break
    return int(best["window"]), curve


def _measure(
    model: ImageModel, requests: Sequence[Request], decoder: DecoderSpec, sampling: Sampling, seed: int, compiles: bool
) -> list[Generation]:
    """Decode the pilots one at a time, as in latency mode, after compilation."""
    if compiles:
        decode(model, requests[:1], decoder, sampling, seed, render=False)
    images = [decode(model, [request], decoder, sampling, seed, render=False)[0] for request in requests]
    for image in images:
        if isinstance(image, SpecbenchError):
            raise SpecbenchError(
                f"--window auto: a pilot failed: {image.what}", "set a window, for example --window 16", FAILURE
            )
    return images


def _point(window: int, images: Sequence[Generation], ar: Sequence[Generation], alone: bool) -> dict[str, float]:
    """A point of the curve, which begins with AR as window 1: tokens per target forward, accepted over tested drafts,
    time of a forward over AR's, latency over forward time over AR's, latency of an image, speed-up over AR."""
    forward_ms, overhead, latency_ms = _costs(images, alone)
    ar_forward_ms, ar_overhead, ar_latency_ms = _costs(ar, alone)
    tested = sum(int(image.tested.sum()) for image in images)
    return {
        "window": window,
        "tokens_per_step": sum(image.committed for image in images) / sum(image.nfe for image in images),
        "acceptance": sum(int(image.accepted.sum()) for image in images) / tested if tested else None,
        "window_cost": forward_ms / ar_forward_ms,
        "overhead": overhead / ar_overhead,
        "latency_ms": latency_ms,
        "speed_up": ar_latency_ms / latency_ms,
    }


def _costs(images: Sequence[Generation], alone: bool) -> tuple[float, float, float]:
    """Milliseconds per forward, latency over forward time, milliseconds per image; of the forwards `alone` or of
    all."""
    target = sum(image.spans_ms["target"] for image in images)
    latency = target if alone else sum(image.spans_ms.get(span, 0.0) for image in images for span in AR_SPANS)
    return target / sum(image.nfe for image in images), latency / target, latency / len(images)
