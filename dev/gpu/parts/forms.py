"""Other ways to compile a forward at Lumina's true size; times are ratios to the reading of weights and cache."""

from collections.abc import Iterator
from functools import partial
from importlib.util import find_spec

from bench import step_cost
from timing import in_turns, median, timed_decode

from parts.claims import Outcome, claim
from parts.scales import SIDE, Scale, filtered, floor_ms, has_graphs, random_llama
from specbench.models.checkpoint_loading import quantise_network
from specbench.models.transformer import compiled_forward
from specbench.specs.presets import resolve
from specbench.system import matrix_products

FORMS = {
    "int8wo": ({}, False, ("ar",)),
    "form-tuned": ({"coordinate_descent_tuning": True}, False, ("ar", "sjd")),
    "form-sums": ({"coordinate_descent_tuning": True}, True, ("ar", "sjd")),
    "form-autotune": ({"max_autotune": True}, False, ("ar", "sjd")),
}
"""Inductor's options in addition to the current ones, whether products of one and two states are compiled to sums, and
the timed decoders. Inductor's own rewrite of a product as multiply-and-sum needs tuning and a single row, but guidance
has two rows. "int8wo": current options, weights in eight bits."""


def form(name: str, device: str, scale: Scale) -> Iterator[Outcome]:
    """Time steps of AR, and then of SJD, compiled in one of these forms, in a separate process because a form applies
    to the whole process."""
    options, sums, decoders = FORMS[name]
    if name == "int8wo" and find_spec("torchao") is None:
        yield [claim(name, "not measured: torchao is not installed")], []
        return
    compiled = has_graphs(device)
    model = random_llama(device, scale, side=SIDE // 4 if compiled else None)
    if name == "int8wo":
        quantise_network(model.backbone)
    if compiled:
        compiled_forward.CUDA_OPTIONS.update(options)
        matrix_products.SUMMED_ON |= {"cuda"} if sums else set()
        model.compile()
    floor, steps = floor_ms(model, device, scale), {}
    for decoder in decoders:
        rows = in_turns({decoder: partial(timed_decode, model, resolve(decoder), filtered(scale))}, scale.rounds)
        spent = steps[decoder] = median(rows, decoder, lambda row: step_cost(row)["step"])
        value = f"{spent:.2f} ms a step"
        if floor is not None:
            value += f", {spent / floor:.2f} of the reading of weights and cache in {scale.dtype}"
        yield [claim(decoder, value)], rows
    claims = []
    if "sjd" in steps:
        over = steps["sjd"] / steps["ar"]
        claims.append(claim("SJD's step over AR's", f"{over:.2f}", "1.15", over <= 1.15))
    if compiled:
        seconds = ", ".join(f"{part.seconds:.0f} s ({part.forms})" for part in model.compiled)
        claims.append(claim("compilation (forms)", seconds))
    yield claims, []
