"""Benchmarks of specbench itself: raw timings as JSON, one file per question, under results/speed/.

    generate   AR in our loop against transformers' own `generate()` with the same weights and sampling.
    overhead   What a step costs besides its forward, by window and vocabulary, and its share beside a real
    forward. window     Milliseconds per step and per forward against the window. decoders   Speed-up realised
    against step compression, per decoder.

Contenders of a comparison take turns within every round, so that drift of the machine hits all of them.
Numbers are kept as measured; the summary on stdout is medians of them.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import shlex
import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import asdict
from functools import partial
from pathlib import Path

import torch
from transformers import LlamaConfig, LlamaForCausalLM
from transformers.generation import LogitsProcessor, LogitsProcessorList

from specbench import provenance
from specbench.config import Sampling
from specbench.decoding.loop import Request, decode
from specbench.decoding.presets import PRESETS, DecoderSpec, resolve
from specbench.models.base import ImageModel, TokenLayout
from specbench.models.catalog import find_model, load_model

PROMPT = "a red circle left of a blue square"
STEPS = 16
WARM_UP = 3


def timed_decode(model: ImageModel, decoder: DecoderSpec, sampling: Sampling, sample: int) -> dict:
    """One image at batch 1: wall milliseconds without rendering, the loop's spans, forwards and tokens."""
    start = time.perf_counter()
    [image] = decode(model, [Request(PROMPT, "bench", sample)], decoder, sampling, seed=0, render=False)
    wall_ms = (time.perf_counter() - start) * 1e3
    return {"wall_ms": wall_ms, "spans_ms": image.spans_ms, "nfe": image.nfe, "tokens": image.committed}


def in_turns(contenders: dict[str, Callable[[int], dict]], rounds: int) -> list[dict]:
    """Run every contender once per round, after one round of warm-up; the order rotates."""
    names, rows = list(contenders), []
    for name in names:
        contenders[name](0)
    for turn in range(rounds):
        for place in range(len(names)):
            name = names[(turn + place) % len(names)]
            rows.append({"name": name, "round": turn, **contenders[name](turn + 1)})
            print(f"{name}: round {turn + 1} of {rounds}", file=sys.stderr)
    return rows


def median(rows: list[dict], name: str, value: Callable[[dict], float] = lambda row: row["wall_ms"]) -> float:
    return statistics.median(value(row) for row in rows if row["name"] == name)


class SharedDraw(LogitsProcessor):
    """Guidance as one batch of (conditional, unconditional): mix, truncate, draw, and give both rows the same
    token."""

    def __init__(self, guidance: float, top_k: int):
        self._guidance, self._top_k = guidance, top_k

    def __call__(self, input_ids, scores):
        conditional, unconditional = scores.chunk(2)
        mixed = unconditional + self._guidance * (conditional - unconditional)
        kth = mixed.topk(self._top_k).values[:, -1:]
        token = mixed.masked_fill(mixed < kth, -torch.inf).softmax(-1).multinomial(1)
        return torch.full_like(scores, -torch.inf).scatter_(1, token.repeat(2, 1), 0.0)


def causal_lm(backbone: torch.nn.Module, head: torch.nn.Linear) -> LlamaForCausalLM:
    """The library's own class around the same weights."""
    config = LlamaConfig(**{**backbone.config.to_dict(), "vocab_size": head.out_features})
    theirs = LlamaForCausalLM(config).to(head.weight.dtype)
    theirs.model.layers, theirs.model.norm = backbone.layers, backbone.norm
    theirs.lm_head = head
    return theirs.eval()


@torch.inference_mode()
def timed_generate(
    theirs: LlamaForCausalLM, prompt: int, length: int, sampling: Sampling, cache: str, sample: int
) -> dict:
    """`generate()` of `length` tokens after `prompt` ids, guided in one batch when guidance is not 1."""
    torch.manual_seed(sample)
    ids = torch.arange(prompt)[None]
    options = {"do_sample": True, "top_k": sampling.top_k}
    if sampling.guidance != 1.0:
        ids = ids.repeat(2, 1)
        draw = SharedDraw(sampling.guidance, sampling.top_k)
        options = {"do_sample": False, "logits_processor": LogitsProcessorList([draw])}
    start = time.perf_counter()
    tokens = theirs.generate(
        ids,
        attention_mask=torch.ones_like(ids),
        min_new_tokens=length,
        max_new_tokens=length,
        pad_token_id=0,
        cache_implementation=cache,
        **options,
    )
    wall_ms = (time.perf_counter() - start) * 1e3
    if tokens.shape[1] != prompt + length:
        raise RuntimeError(f"generate() made {tokens.shape[1] - prompt} tokens instead of {length}")
    return {"wall_ms": wall_ms, "tokens": length}


def bench_generate(model: ImageModel, sampling: Sampling, rounds: int) -> tuple[list[dict], list[str]]:
    """Both sides pay their own prefill. The library's side skips the caption's pooled vector and grid
    positions."""
    theirs = causal_lm(model.backbone, model._network.head)
    prompt, length = model._network.prefix, model.layout.length
    rows, lines = [], []
    for guidance in (1.0, sampling.guidance):
        same = Sampling(guidance, 1.0, sampling.top_k)
        ours = f"specbench ar, guidance {guidance:g}"
        contenders = {ours: partial(timed_decode, model, resolve("ar"), same)}
        for cache in ("dynamic", "static"):
            name = f"generate() {cache}, guidance {guidance:g}"
            contenders[name] = partial(timed_generate, theirs, prompt, length, same, cache)
        part = in_turns(contenders, rounds)
        best = min((name for name in contenders if name != ours), key=lambda name: median(part, name))
        lines += [f"{name}: {median(part, name):.0f} ms per image" for name in contenders]
        lines.append(f"specbench over the best of generate(): {median(part, ours) / median(part, best):.3f}")
        rows += part
    return rows, lines


@torch.inference_mode()
def timed_forward(model: ImageModel, sampling: Sampling, window: int, sample: int) -> dict:
    """Forwards of `window` columns whose middle is the middle of the image."""
    session = model.begin(model.encode([PROMPT]), sampling.guidance, window)
    start = (model.layout.length - window) // 2
    positions = torch.arange(start, start + window)[None]
    tokens = torch.zeros_like(positions)
    times = []
    for _ in range(STEPS):
        start = time.perf_counter()
        session.forward(tokens, positions)
        times.append((time.perf_counter() - start) * 1e3)
    return {"wall_ms": statistics.median(times[WARM_UP:]), "steps_ms": times, "window": window}


class Enough(Exception):
    """The stub was called often enough."""


class StubModel:
    """A model whose forward costs next to nothing, and which notes how long the loop takes between
    forwards."""

    name, codebook, weights_sha256 = "stub", None, ""
    device, dtype = torch.device("cpu"), torch.float32

    def __init__(self, v_image: int, window: int):
        self.layout = TokenLayout.plain(1, (STEPS + 1) * window, v_image)
        draw = torch.Generator().manual_seed(0)
        base = 2 * torch.randn(1, window, v_image, generator=draw)
        # Two tables in turn: p changes between steps, so some drafts are rejected.
        self._tables = [base, base + 0.5 * torch.randn(base.shape, generator=draw)]

    def encode(self, prompts):
        return prompts

    def begin(self, prefix, guidance, columns):
        self.between_ms: list[float] = []
        self._left = None
        return self

    def forward(self, tokens, positions, tree=None):
        if self._left is not None:
            self.between_ms.append((time.perf_counter() - self._left) * 1e3)
        if len(self.between_ms) == STEPS:
            raise Enough
        logits = self._tables[len(self.between_ms) % 2]
        self._left = time.perf_counter()
        return logits


def timed_steps(stub: StubModel, decoder: DecoderSpec, sample: int) -> dict:
    """Milliseconds between two forwards of a full window: sampling, verification, refinement, filling."""
    with contextlib.suppress(Enough):
        decode(stub, [Request("", "bench", sample)], decoder, Sampling(1.0, 1.0, 1000), seed=0, render=False)
    return {"wall_ms": statistics.median(stub.between_ms[WARM_UP:]), "steps_ms": stub.between_ms}


def step_cost(row: dict) -> dict[str, float]:
    """Milliseconds per step: whole loop, target forward, and everything else."""
    loop = sum(row["spans_ms"].get(name, 0.0) for name in ("draft", "target", "verify", "host"))
    target = row["spans_ms"]["target"]
    return {"step": loop / row["nfe"], "forward": target / row["nfe"], "other": (loop - target) / row["nfe"]}


def with_window(name: str, window: int) -> DecoderSpec:
    return resolve(name, {"window": window} | ({"d": "inf"} if name == "gsd" else {}))


def bench_overhead(model: ImageModel, sampling: Sampling, rounds: int) -> tuple[list[dict], list[str]]:
    """Milliseconds between forwards by window and vocabulary, and their share beside a forward of `model`."""
    rows, lines = [], ["decoder, window, vocabulary: ms between forwards, share beside this model's forward"]
    names = ("sjd", "scd-mc", "scd-gs", "gsd")
    for window in (16, 32, 64):
        for vocabulary in (1024, 8192, 65536):
            stub = StubModel(vocabulary, window)
            contenders = {name: partial(timed_steps, stub, with_window(name, window)) for name in names}
            contenders["forward"] = partial(timed_forward, model, sampling, window)
            part = in_turns(contenders, rounds)
            rows += [{**row, "window": window, "vocabulary": vocabulary} for row in part]
            forward = median(part, "forward")
            for name in names:
                other = median(part, name)
                share = other / (other + forward)
                lines.append(f"{name}, {window}, {vocabulary}: {other:.2f}, {share:.0%}")
    return rows, lines


def bench_window(model: ImageModel, sampling: Sampling, rounds: int) -> tuple[list[dict], list[str]]:
    """SJD's mean step and a mid-image forward against the window; window cost is the forward's ratio to
    window 1.

    Windows shrink near the end of an image, so that wide ones' mean step can cost less than their full
    forward.
    """
    windows = (1, 2, 4, 8, 16, 32, 64, 128)
    contenders = {}
    for window in windows:
        contenders[f"decode {window}"] = partial(timed_decode, model, with_window("sjd", window), sampling)
        contenders[f"forward {window}"] = partial(timed_forward, model, sampling, window)
    rows = in_turns(contenders, rounds)
    one = median(rows, "forward 1")
    lines = ["window: ms per step, ms per forward, window cost"]
    for window in windows:
        step = median(rows, f"decode {window}", lambda row: step_cost(row)["step"])
        forward = median(rows, f"forward {window}")
        lines.append(f"{window}: {step:.2f}, {forward:.2f}, {forward / one:.2f}")
    return rows, lines


def bench_decoders(model: ImageModel, sampling: Sampling, rounds: int) -> tuple[list[dict], list[str]]:
    """Every preset at its own window. Speed-up and compression are ratios of totals over the same prompt's
    images."""
    contenders = {name: partial(timed_decode, model, resolve(name), sampling) for name in PRESETS}
    rows = in_turns(contenders, rounds)

    def total(name: str, value: Callable[[dict], float]) -> float:
        return sum(value(row) for row in rows if row["name"] == name)

    lines = ["decoder: step compression, speed-up over ar, ms per step, of which forward"]
    ar_ms = total("ar", lambda row: row["wall_ms"])
    for name in contenders:
        compression = total(name, lambda row: row["tokens"]) / total(name, lambda row: row["nfe"])
        speedup = ar_ms / total(name, lambda row: row["wall_ms"])
        step = median(rows, name, lambda row: step_cost(row)["step"])
        forward = median(rows, name, lambda row: step_cost(row)["forward"])
        lines.append(f"{name}: {compression:.2f}, {speedup:.2f}, {step:.2f}, {forward:.2f}")
    return rows, lines


BENCHES = {
    "generate": bench_generate,
    "overhead": bench_overhead,
    "window": bench_window,
    "decoders": bench_decoders,
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("benches", nargs="*", choices=[*BENCHES, []], help="which ones; all by default")
    parser.add_argument("--rounds", type=int, default=10, help="timed turns of every contender")
    parser.add_argument("--threads", type=int, help="torch threads; torch's own choice by default")
    parser.add_argument("--out", type=Path, default=Path("results/speed"), help="folder of the JSON files")
    options = parser.parse_args()
    if options.threads:
        torch.set_num_threads(options.threads)
    model, sampling = load_model("shapes"), find_model("shapes").sampling()
    options.out.mkdir(parents=True, exist_ok=True)
    for name in options.benches or BENCHES:
        rows, lines = BENCHES[name](model, sampling, options.rounds)
        document = {
            "bench": name,
            "command": shlex.join(["python", *sys.argv]),
            "threads": torch.get_num_threads(),
            "sampling": asdict(sampling),
            "weights_sha256": model.weights_sha256,
            **provenance.collect(),
            "rows": rows,
        }
        (options.out / f"{name}.json").write_text(json.dumps(document, indent=1) + "\n")
        print(f"{name}\n" + "\n".join(f"  {line}" for line in lines))


if __name__ == "__main__":
    main()
