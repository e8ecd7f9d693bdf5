"""Ratio of a step to its forward, and the realised share of the ideal speed-up, at Lumina's true size."""

from collections.abc import Iterator
from functools import partial

from bench import Share, in_turns, realised, realised_shares, timed_decode

from parts.claims import Outcome, claim
from parts.scales import SIDE, Scale, filtered, has_graphs, random_llama
from specbench.models.vertical_head import new_vertical_head
from specbench.specs.presets import resolve


def steps(device: str, scale: Scale) -> Outcome:
    """Time compiled decoders on images of a quarter of Lumina's length. Random weights determine the acceptance.

    In shorter images the last steps would weigh too much: their window is not full, and they run eagerly.
    """
    compiled = has_graphs(device)
    model = random_llama(device, scale, side=SIDE // 2 if compiled else None)
    if compiled:
        model.compile()
    names = ("ar", "sjd", "gsd", "scd-gs") if compiled else ("ar", "sjd")
    rows, _ = realised(model, names, filtered(scale), scale.rounds)
    shares = realised_shares(rows)
    value = ", ".join(f"{name} {shares[name].image_ms / 1e3:.1f}" for name in names)
    claims = [claim(f"seconds of an image of {model.layout.length} tokens", value)]
    if compiled:
        seconds = ", ".join(f"{part.seconds:.0f} s ({part.forms})" for part in model.compiled)
        claims.append(claim("compilation (forms): forwards, then each decoder's sampling and drafting", seconds))
    return [*claims, *step_claims(shares)], rows


def eager_steps(device: str, scale: Scale) -> Outcome:
    """Time the same decoders uncompiled, on short images."""
    names = ("ar", "sjd", "gsd", "scd-mc", "scd-gs") if has_graphs(device) else ("ar", "sjd")
    rows, _ = realised(random_llama(device, scale), names, filtered(scale), scale.rounds)
    return step_claims(realised_shares(rows)), rows


def vertical_steps(device: str, scale: Scale) -> Iterator[Outcome]:
    """Time drafts of an untrained vertical head, one by one (0 passes) and in passes over all rows of a window. Each
    variant is compiled separately, and its rows are returned as soon as they are measured."""
    model = random_llama(device, scale, side=SIDE // 2 if has_graphs(device) else None)
    head = new_vertical_head(model.feature_size, model.feature_size // 2, 0).to(device, scale.dtype)
    model.own_vertical_head = lambda: head
    if has_graphs(device):
        model.compile()
    window = min(32, model.layout.length // 2)
    decoders = {"ar": resolve("ar")} | {
        f"vertical, {passes} passes": resolve("vertical", {"window": window, "passes": passes})
        for passes in (0, 2, 4, 6)
    }
    rows: list[dict] = []
    for name, decoder in decoders.items():
        measured = in_turns({name: partial(timed_decode, model, decoder, filtered(scale))}, scale.rounds)
        rows += measured
        yield step_claims({name: realised_shares(rows)[name]}), measured


def step_claims(shares: dict[str, Share]) -> list[dict[str, object]]:
    """Claims on the time of a step outside its forward."""
    claims = []
    for name, share in shares.items():
        value = f"{share.step_ms / share.forward_ms:.2f} ({share.step_ms:.2f} over {share.forward_ms:.2f} ms)"
        claims.append(claim(f"{name}: step over forward", value, "1.05", share.step_ms <= 1.05 * share.forward_ms))
        if name != "ar":
            realised = f"{share.realised:.2f} (speed-up {share.speed_up:.2f}, {share.compression:.2f} tokens a step)"
            claims.append(
                claim(f"{name}: realised share of the ideal speed-up", realised, "0.95", share.realised >= 0.95)
            )
    return claims
