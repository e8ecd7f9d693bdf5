"""AR against compiled `generate()`, at Lumina's true size."""

from collections.abc import Callable
from functools import partial

from generate import causal_lm, timed_generate
from llama import PROMPT
from timing import in_turns, median, timed_decode

from parts.claims import Outcome, claim
from parts.scales import Scale, filtered, has_graphs, random_llama
from specbench.specs.presets import resolve


def generate(device: str, scale: Scale) -> Outcome:
    """Time AR, and `generate()` with every cache, eager and compiled, in wall-clock time. With a static cache,
    transformers also compiles on CUDA without being asked."""
    sampling = filtered(scale)
    model = random_llama(device, scale)
    compiled = has_graphs(device)
    if compiled:
        model.compile()
    length = model.layout.length
    contenders: dict[str, Callable[[int], dict]] = {
        "specbench ar": partial(timed_decode, model, resolve("ar"), sampling)
    }
    for cache, compile_it in (("dynamic", False), ("static", False), ("static", True))[: 3 if compiled else 1]:
        theirs = causal_lm(model.backbone, model.output, compile_it)
        name = f"generate() {cache}{', compiled' if compile_it else ''}"
        contenders[name] = partial(timed_generate, theirs, PROMPT, length, sampling, cache)
    rows = in_turns(contenders, scale.rounds)
    spent = {name: median(rows, name) / length for name in contenders}
    ours = spent.pop("specbench ar")
    best = min(spent, key=spent.__getitem__)
    claims = [
        claim("AR over the best of generate()", f"{ours / spent[best]:.2f} ({best})", "0.9", ours <= 0.9 * spent[best]),
        claim("milliseconds a token of a short image: AR, generate()", f"{ours:.2f}, {spent[best]:.2f}"),
    ]
    return claims, rows
