"""The main measurements: AR, and SJD with a narrow and a wide window, at Lumina's true size and length."""

from collections.abc import Iterator

from bench import step_cost
from llama import RandomLlama
from timing import CAPTION, timed_decode

from parts.claims import Outcome, claim
from parts.scales import AIM, SIDE, Scale, filtered, floor_ms, has_graphs, random_llama
from specbench.decoding.loop import Decoding, warm_up_steps
from specbench.models.transformer import model as transformer_model
from specbench.models.transformer.compilation import compile_facts
from specbench.prompts import Request
from specbench.specs.presets import DecoderSpec, resolve

STEP_AIMS = {16: 1.05, 96: 1.10}
"""Goals for the ratio of the time of SJD's step to the time of its forward, by window."""


def decisive(device: str, scale: Scale) -> Iterator[Outcome]:
    """Time one image of each decoder, after the steps that compile; yield each row as soon as it is measured."""
    model = _compiled_llama(device, scale)
    yield _ar(model, device, scale, AIM)
    for window, aim in STEP_AIMS.items():
        name, row = f"sjd, window {window}", _image(model, resolve("sjd", {"window": window}), scale)
        cost = step_cost(row)
        over = cost["step"] / cost["forward"]
        value = f"{over:.3f} ({cost['step']:.2f} over {cost['forward']:.2f} ms, {row['steps']})"
        claims = [claim(f"{name}: step over forward", value, f"{aim:.2f}", over <= aim)]
        spans = ", ".join(f"{span} {ms / row['nfe']:.2f}" for span, ms in row["spans_ms"].items() if span != "prefill")
        claims.append(claim(f"{name}: milliseconds a step", f"{spans}; {row['tokens'] / row['nfe']:.2f} tokens a step"))
        yield claims, [{"name": name, **row}]


def apart(device: str, scale: Scale) -> Outcome:
    """Time AR again with a separate product for each matrix, to show how much time joined products save."""
    vars(transformer_model).update(join_products=lambda network: None)
    return _ar(_compiled_llama(device, scale), device, scale)


def _compiled_llama(device: str, scale: Scale) -> RandomLlama:
    compiled = has_graphs(device)
    model = random_llama(device, scale, side=SIDE if compiled else None)
    if compiled:
        model.compile()
    return model


def _image(model: RandomLlama, decoder: DecoderSpec, scale: Scale) -> dict:
    """Time one image after a warm-up."""
    sampling = filtered(scale)
    for _ in warm_up_steps(Decoding(model, decoder, sampling, 0), [Request(CAPTION, "gpu")], render=False):
        pass
    facts = compile_facts(model.compiled, model.device)
    row = timed_decode(model, decoder, sampling, 1)
    return row | facts | {"steps": "compiled" if facts.get("compiled_forms") else "eager"}


def _ar(model: RandomLlama, device: str, scale: Scale, aim: float | None = None) -> Outcome:
    """Ratio of AR's step, without prefill, to the time to read weights and KV cache; `aim` is the goal."""
    row = _image(model, resolve("ar"), scale)
    step, prefill = step_cost(row), row["spans_ms"].get("prefill", 0.0)
    value = f"{step['step']:.3f} ms ({step['forward']:.3f} of it forward, {row['steps']}); prefill {prefill:.1f} ms"
    claims = [claim(f"AR: a step of an image of {model.layout.length} tokens", value)]
    claims += [claim("AR: compilation", f"{row['compile_s']:.0f} s")] if "compile_s" in row else []
    floor, weights = (floor_ms(model, device, scale, cache) for cache in (True, False))
    if floor is None:
        claims.append(claim("AR over the reading of weights and cache", "peaks are unknown: doctor --measure"))
    else:
        value = f"{step['step'] / floor:.3f} ({step['step'] / weights:.3f} of the weights alone, {weights:.2f} ms)"
        what = f"AR: a step over the reading of weights and cache ({floor:.2f} ms)"
        goal = (str(aim), step["step"] <= aim * floor) if aim else ()
        claims.append(claim(what, value, *goal))
    return claims, [{"name": "ar", **row}]
