"""The numbers that decide: AR, and SJD with a narrow and a wide window, at Lumina's true size and length."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from bench import step_cost
from llama import PROMPT, RandomLlama
from timing import CAPTION, timed_decode

from parts.claims import Outcome, claim
from parts.scales import AIM, SIDE, Scale, filtered, has_graphs, random_llama
from specbench.decoding.loop import warm_up_steps
from specbench.models.transformer.compilation import compile_facts
from specbench.prompts import Request
from specbench.specs.presets import DecoderSpec, resolve
from specbench.system.device_peaks import find_peak

STEP_AIMS = {16: 1.05, 96: 1.10}
"""Goals of a step of SJD over its forward, by window."""


def decisive(device: str, scale: Scale) -> Iterator[Outcome]:
    """One image of each, after the steps that compile; a row as soon as it is measured."""
    compiled = has_graphs(device)
    model = random_llama(device, scale, side=SIDE if compiled else None)
    if compiled:
        model.compile()
    row = _image(model, resolve("ar"), scale)
    yield _ar_claims(model, row, device, scale), [{"name": "ar", **row}]
    for window, aim in STEP_AIMS.items():
        name, row = f"sjd, window {window}", _image(model, resolve("sjd", {"window": window}), scale)
        cost = step_cost(row)
        over = cost["step"] / cost["forward"]
        told = f"{over:.3f} ({cost['step']:.2f} over {cost['forward']:.2f} ms, {row['steps']})"
        claims = [claim(f"{name}: step over forward", told, f"{aim:.2f}", over <= aim)]
        spans = ", ".join(f"{span} {ms / row['nfe']:.2f}" for span, ms in row["spans_ms"].items() if span != "prefill")
        claims.append(claim(f"{name}: milliseconds a step", f"{spans}; {row['tokens'] / row['nfe']:.2f} tokens a step"))
        yield claims, [{"name": name, **row}]


def _image(model: RandomLlama, decoder: DecoderSpec, scale: Scale) -> dict:
    """Time one image after a warm-up."""
    sampling = filtered(scale)
    for _ in warm_up_steps(model, [Request(CAPTION, "gpu")], decoder, sampling, 0, render=False):
        pass
    facts = compile_facts(model.compiled, model.device)
    row = timed_decode(model, decoder, sampling, 1)
    return row | facts | {"steps": "compiled" if facts.get("compiled_forms") else "eager"}


def _ar_claims(model: RandomLlama, row: dict, device: str, scale: Scale) -> list[dict[str, object]]:
    """AR's step, its prefill apart, over the reading of weights and KV cache."""
    step, prefill = step_cost(row), row["spans_ms"].get("prefill", 0.0)
    told = f"{step['step']:.3f} ms ({step['forward']:.3f} of it forward, {row['steps']}); prefill {prefill:.1f} ms"
    claims = [claim(f"AR: a step of an image of {model.layout.length} tokens", told)]
    claims += [claim("AR: compilation", f"{row['compile_s']:.0f} s")] if "compile_s" in row else []
    dtype = str(scale.dtype).removeprefix("torch.")
    peak = find_peak(device, dtype, torch.get_num_threads())
    if peak is None:
        return [*claims, claim("AR over the reading of weights and cache", "peaks are unknown: doctor --measure")]
    read = [model.size.read(1, 2, slots, scale.dtype.itemsize) for slots in (PROMPT + model.layout.length / 2, 0)]
    floor, weights = (1e3 * size / peak.bandwidth(size) for size in read)
    told = f"{step['step'] / floor:.3f} ({step['step'] / weights:.3f} of the weights alone, {weights:.2f} ms)"
    what = f"AR: a step over the reading of weights and cache ({floor:.2f} ms)"
    return [*claims, claim(what, told, str(AIM), step["step"] <= AIM * floor)]
