"""Other ways to compile a forward at Lumina's true size, each beside the same weight-read floor."""

from __future__ import annotations

from dataclasses import replace
from functools import partial

from bench import realised, realised_shares
from timing import in_turns, median, timed_decode

from parts.claims import Outcome, claim
from parts.scales import AIM, SIDE, Scale, filtered, floor_ms, has_graphs, random_llama
from specbench.models.transformer import compiled_forward
from specbench.specs.presets import resolve
from specbench.system import matrix_products

FORMS = {
    "form-tuned": ({"coordinate_descent_tuning": True}, False),
    "form-sums": ({"coordinate_descent_tuning": True}, True),
    "form-autotune": ({"max_autotune": True}, False),
}
"""Inductor's options besides those of today, and whether the products of one and two states are compiled to sums. Its
own rewrite of a product as multiply-and-sum needs the tuning and a single row, and guidance has two."""


def form(name: str, device: str, scale: Scale) -> Outcome:
    """Time AR with and without guidance, and steps of SJD, compiled in one of these forms; in a process of its own,
    since the form holds for all of it."""
    options, sums = FORMS[name]
    compiled = has_graphs(device)
    model = random_llama(device, scale, side=SIDE // 4 if compiled else None)
    if compiled:
        compiled_forward.CUDA_OPTIONS.update(options)
        matrix_products.SUMMED_ON |= {"cuda"} if sums else set()
        model.compile()
    guided = filtered(scale)
    contenders = {"AR": guided, "AR without guidance": replace(guided, guidance=1.0)}
    calls = {key: partial(timed_decode, model, resolve("ar"), sampling) for key, sampling in contenders.items()}
    rows = in_turns(calls, scale.rounds)
    floor, claims = floor_ms(model, device, scale), []
    for key in contenders:
        spent = median(rows, key) / model.layout.length
        told = f"{spent:.2f} ms a token"
        if floor is None:
            claims.append(claim(key, told))
        else:
            what = f"{key} over the weight-read floor ({floor:.2f} ms)"
            claims.append(claim(what, f"{spent / floor:.2f} ({told})", str(AIM), spent <= AIM * floor))
    more, _ = realised(model, ("ar", "sjd"), guided, 1)
    ar, sjd = (realised_shares(more)[one].step_ms for one in ("ar", "sjd"))
    claims.append(
        claim("SJD's step over AR's", f"{sjd / ar:.2f} ({sjd:.2f} over {ar:.2f} ms)", "1.15", sjd <= 1.15 * ar)
    )
    if compiled:
        seconds = ", ".join(f"{part.seconds:.0f} s ({part.forms})" for part in model.compiled)
        claims.append(claim("compilation (forms)", seconds))
    return claims, [*rows, *more]
