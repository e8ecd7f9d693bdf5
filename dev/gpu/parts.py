"""The parts of `make gpu`: each proves or measures one thing on a device, and returns claims and raw rows.

exactness   the audit's transformer settings, sampled on the device, for every decoder
forwards    forwards by window, at Lumina's true size, against the forecast of `specbench forecast`
families    every family with random weights and every decoder without a draft head; draft heads on `shapes`
graphs      compiled steps: the same tokens, forms, captures, addresses of the KV caches
generate    AR against compiled `generate()` and against the weight-read floor, at Lumina's true size
steps       step over forward, realised share of the ideal speed-up
throughput  images per hour, batched over one at a time
memory      planned against peak
energy      joules per image, where the driver tells
"""

from __future__ import annotations

import os
import statistics
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from multiprocessing import get_context

import numpy as np
import torch
from bench import realised, realised_shares
from generate import causal_lm, timed_generate
from llama import PROMPT, RandomLlama
from memory import peak, predicted
from throughput import timed_images
from timing import CAPTION, in_turns, median, timed_decode

from specbench.checks.audit_settings import (
    AUDIT_SETTINGS,
    COMPILED_SETTINGS,
    DEVICE_SETTINGS,
    AuditSetting,
    setting_model,
)
from specbench.checks.divergence import AUDIT_LEVEL, p_value
from specbench.checks.losslessness import observe
from specbench.decoding.continuous_batching import decode_each
from specbench.decoding.loop import decode
from specbench.errors import SpecbenchError
from specbench.models.catalog import find_model, load_model, models
from specbench.models.hub_model import HubModel
from specbench.models.transformer.compilation import graph_bytes
from specbench.models.transformer.model import TransformerModel
from specbench.papers.forecast_sources import BANDWIDTH, FLOPS
from specbench.prompts import Request, load_prompts
from specbench.specs.presets import PRESETS, DecoderSpec, resolve
from specbench.specs.run_spec import Sampling
from specbench.stats.forward_time import Forward, Reached, forward_ms
from specbench.system.device_peaks import Peak, find_peak
from specbench.system.monitor import joules

MET, MISSED, TOLD = "met", "missed", "told"
"""Verdicts of a claim; `told` is a number without a goal."""
_GIB = 2**30
_AUDITORS = 8
"""Processes of the audit at most."""
WINDOWS = (1, 2, 4, 8, 16, 32, 64, 96, 128)
"""Windows whose forward is compared with the forecast."""


@dataclass(frozen=True)
class Scale:
    """How much of everything.

    Attributes:
        images: of each table of an audit setting.
        decoders: that are audited; all presets if empty.
        families: that decode; one of every loading module if empty.
        llama: sizes of the random model in the place of Lumina's.
        dtype: of it.
        rounds: timed rounds of each contender.
        batches: rows of the batches.
        memory: models whose memory is planned and measured, at random weights if they have any.
    """

    images: int
    decoders: tuple[str, ...]
    families: tuple[str, ...]
    llama: dict[str, int]
    dtype: torch.dtype
    rounds: int
    batches: tuple[int, ...]
    memory: tuple[str, ...]


_LUMINA = {"vocabulary": 8192, "side": 8, "width": 4096, "inner": 11_008, "layers": 32, "heads": 32}
_TINY = {"vocabulary": 32, "side": 3, "width": 32, "inner": 48, "layers": 2, "heads": 2}
SCALES = {
    "full": Scale(6000, (), (), _LUMINA, torch.bfloat16, 3, (1, 16, 64), ("shapes", "lumina")),
    "tiny": Scale(60, ("ar", "sjd"), ("lumina",), _TINY, torch.float32, 1, (1, 2), ("shapes",)),
}


def claim(what: str, value: object, goal: str = "-", met: bool | None = None) -> dict[str, object]:
    """One line of the report; `met` None is a number without a goal."""
    return {"what": what, "value": value, "goal": goal, "verdict": TOLD if met is None else MET if met else MISSED}


Outcome = tuple[list[dict], list[dict]]
"""Claims and raw rows."""


def exactness(device: str, scale: Scale) -> Outcome:
    """Audit decoders on the transformer that can be enumerated, its weights and noise on the device.

    The calls of so small a model keep a GPU waiting, so several processes share it.
    """
    names = scale.decoders or tuple(PRESETS)
    settings = [*(one for one in AUDIT_SETTINGS if one.model == "transformer"), *DEVICE_SETTINGS]
    jobs = [(setting, name) for name in names for setting in settings]
    if _has_graphs(device):
        jobs += [(setting, name) for setting in COMPILED_SETTINGS for name in ("ar", "sjd", "gsd", "scd-gs")]
    audit = partial(_audited, device, scale.images)
    if len(jobs) < 10:
        rows = list(map(audit, jobs))
    else:
        workers = min(_AUDITORS, len(os.sched_getaffinity(0)))
        with ProcessPoolExecutor(workers, get_context("spawn")) as pool:
            rows = list(pool.map(audit, jobs))
    return judged(rows), rows


def judged(rows: list[dict[str, object]]) -> list[dict[str, object]]:
    """The claim that audits of decoders support."""
    wrong = [row for row in rows if row.get("p_value") is not None and row["lossless"] and row["p_value"] < AUDIT_LEVEL]
    tried = sum(row.get("p_value") is not None for row in rows)
    found = f"{tried - len(wrong)} of {tried} audits" + "".join(f"; deviates: {row['decoder']}" for row in wrong)
    return [claim("no decoder declared lossless deviates from the exact joint", found, "all", not wrong)]


def _audited(device: str, images: int, job: tuple[AuditSetting, str]) -> dict[str, object]:
    setting, name = job
    decoder = resolve(name)
    row = {"setting": setting.name, "decoder": name, "lossless": decoder.lossless}
    start = time.perf_counter()
    try:
        with _moved(setting_model(setting, 0)[0], device):
            found = p_value(observe(setting, decoder, images, 0))
    except SpecbenchError as error:
        return row | {"p_value": None, "refused": str(error)}
    return row | {"p_value": found, "images": images * setting.tables, "seconds": time.perf_counter() - start}


@contextmanager
def _moved(model, device: str) -> Iterator[None]:
    """A cached model on the device, and back on the CPU afterwards."""
    model.move(device)
    try:
        yield
    finally:
        model.move("cpu")


def families(device: str, scale: Scale) -> Outcome:
    """Decode two images as a batch with every decoder; refill and trace one; AR and `predictive` agree."""
    by_module = {model.target: name for name, model in models().items() if isinstance(model, HubModel)}
    rows = [row for name in scale.families or by_module.values() for row in _family(name, device)]
    shapes = load_model("shapes", device)
    heads = [name for name in PRESETS if _has_head(name)]
    rows += [
        _decoded(shapes, name, find_model("shapes").sampling()) for name in (heads if not scale.decoders else heads[:1])
    ]
    return family_claims(rows), rows


def family_claims(rows: list[dict]) -> list[dict[str, object]]:
    """The claim that all of `rows` decoded; failures of a decoder that differ in nothing but the model are joined."""
    failed: dict[tuple[str, str], list[str]] = {}
    for row in rows:
        if row["error"]:
            failed.setdefault((row["decoder"], row["error"].replace(row["model"], "MODEL")), []).append(row["model"])
    found = f"{sum(not row['error'] for row in rows)} of {len(rows)}"
    found += "".join(f"; {decoder} on {len(models)}: {error}" for (decoder, error), models in failed.items())
    return [claim("every decoder decodes every family on the device", found, "all", not failed)]


def _family(name: str, device: str) -> Iterator[dict[str, object]]:
    info = find_model(name).configured(random=True, tiny=True)
    model, sampling = load_model(info, device, "float32"), info.sampling()
    tokens = {}
    for decoder in PRESETS:
        if not _has_head(decoder):
            row = _decoded(model, decoder, sampling)
            tokens[decoder] = row.pop("tokens", None)
            yield row
    same = tokens["ar"] is not None and tokens["ar"] == tokens["predictive"]
    yield {"model": name, "decoder": "predictive = ar", "error": None if same else "other tokens than AR"}
    requests = [Request(CAPTION, "gpu", number) for number in range(3)]
    refilled = [image for _, image in decode_each(model, requests, 2, resolve("sjd"), sampling, 0, trace=True)]
    bad = next((str(image) for image in refilled if isinstance(image, SpecbenchError)), None)
    yield {"model": name, "decoder": "sjd, refilled and traced", "error": bad}


def _has_head(decoder: str) -> bool:
    """Whether a decoder drafts with a trained head, which only `shapes` brings with it."""
    return resolve(decoder).drafter in ("eagle", "vertical")


def _decoded(model, name: str, sampling: Sampling) -> dict[str, object]:
    """Two images of one batch; what went wrong under `error`."""
    row: dict[str, object] = {"model": model.name, "decoder": name, "error": None}
    try:
        images = decode(model, [Request(CAPTION, "gpu", number) for number in range(2)], resolve(name), sampling, 0)
        if problem := next((image for image in images if isinstance(image, SpecbenchError)), None):
            raise problem
    except Exception as error:  # one decoder's failure is a row
        return row | {"error": f"{type(error).__name__}: {error}"}
    return row | {"nfe": [image.nfe for image in images], "tokens": [image.tokens.tolist() for image in images]}


def graphs(device: str, scale: Scale) -> Outcome:
    """Decode successive images eagerly and compiled; count forms and captures, and look where the caches are."""
    eager, compiled = load_model("shapes", device), load_model("shapes", device)
    if _has_graphs(device):
        compiled.compile()
    names, sampling = ("ar", "sjd", "eagle") if _has_graphs(device) else ("ar",), find_model("shapes").sampling()
    rows = []
    with _counting_captures() as captured, _noting_addresses() as addresses:
        for name in names:
            for number in range(4 if _has_graphs(device) else 2):
                request = [Request(CAPTION, "gpu", number)]
                [one] = decode(eager, request, resolve(name), sampling, 0, render=False)
                addresses.clear()
                [other] = decode(compiled, request, resolve(name), sampling, 0, render=False)
                forms = sum(function.forms for function in getattr(compiled, "compiled", []))
                rows.append(
                    {
                        "decoder": name,
                        "image": number,
                        "same": float(np.mean(one.tokens == other.tokens)),
                        "forms": forms,
                        "captures": captured[0] or 0,
                        "addresses": list(addresses),
                    }
                )
    same = statistics.mean(row["same"] == 1 for row in rows)
    again = sum(row["captures"] > before["captures"] for before, row in pairwise(rows) if row["image"] > 1)
    held = graph_bytes() / _GIB if _has_graphs(device) else 0.0
    unlike = len({address for row in rows for address in row["addresses"]})
    claims = [
        claim("images whose compiled tokens equal the eager ones", f"{same:.0%}", "all", same == 1),
        claim("different addresses of the KV cache over all images", unlike),
        claim("compiled forms; captured graphs; GiB they hold", f"{rows[-1]['forms']}; {captured[0]}; {held:.2f}"),
    ]
    if _has_graphs(device):
        claims.append(claim("images after a decoder's second that captured a graph again", again, "0", again == 0))
    return claims, rows


@contextmanager
def _counting_captures() -> Iterator[list[int | None]]:
    """Number of CUDA graphs that torch records meanwhile; None where this torch keeps them elsewhere."""
    count: list[int | None] = [0]
    try:
        from torch._inductor.cudagraph_trees import CUDAGraphNode
    except ImportError:
        yield [None]
        return
    made = CUDAGraphNode.__init__

    def counted(self, *args, **kwargs):
        count[0] += 1
        made(self, *args, **kwargs)

    CUDAGraphNode.__init__ = counted
    try:
        yield count
    finally:
        CUDAGraphNode.__init__ = made


@contextmanager
def _noting_addresses() -> Iterator[list[int]]:
    """Addresses of the first layer's keys of the caches that sessions make meanwhile."""
    from specbench.models.transformer.kv_cache import PositionLayer

    found: list[int] = []
    hold = PositionLayer._hold

    def noted(self, keys, values):
        hold(self, keys, values)
        found.append(keys.data_ptr())

    PositionLayer._hold = noted
    try:
        yield found
    finally:
        PositionLayer._hold = hold


def generate(device: str, scale: Scale) -> Outcome:
    """Time AR and `generate()` with every cache, eager and compiled, by the clock."""
    sampling = Sampling(3.0, 1.0, min(2000, scale.llama["vocabulary"] // 2))
    model = _llama(device, scale)
    compiled = _has_graphs(device)
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
        claim("milliseconds a token: AR, generate()", f"{ours:.2f}, {spent[best]:.2f}"),
    ]
    size, item = model.size, scale.dtype.itemsize
    dtype = str(scale.dtype).removeprefix("torch.")
    peak_here = find_peak(device, dtype, torch.get_num_threads())
    if peak_here is None:
        return [
            *claims,
            claim("AR over the weight-read floor", "the device's peaks are unknown: doctor --measure"),
        ], rows
    floor = 1e3 * item * size.weights / peak_here.bandwidth(item * size.weights)
    billions = f"{size.weights / 1e9:.2g} billion weights, {floor:.2f} ms"
    claims.append(
        claim(f"AR over the weight-read floor ({billions})", f"{ours / floor:.2f}", "1.3", ours <= 1.3 * floor)
    )
    return claims, rows


def forwards(device: str, scale: Scale) -> Outcome:
    """Time forwards with guidance in the middle of an image, by window, beside the range of the forecast.

    On a GPU a captured graph is replayed: what is timed are the kernels, without the calls that start them.
    """
    model = _llama(device, scale, side=48 if _has_graphs(device) else None)
    dtype, start = str(scale.dtype).removeprefix("torch."), model.layout.length // 2
    peak_here = find_peak(device, dtype, torch.get_num_threads())
    rows = []
    for window in WINDOWS:
        if window < model.layout.length:
            launched, kernels = _forward_ms(model, window, start)
            row = {"window": window, "context": PROMPT + start, "called_ms": launched, "ms": kernels}
            rows.append(row | (_forecast_ms(model, scale.dtype, window, start, peak_here) if peak_here else {}))
    told = ", ".join(f"{row['ms']:.2f} at {row['window']}" for row in rows)
    free = max(row["window"] for row in rows if row["ms"] <= 1.1 * rows[0]["ms"])
    claims = [
        claim("milliseconds of a forward, kernels only, by window", told),
        claim("widest window within 1.1 times the forward of one column", free),
        claim("the same with its calls, one column", f"{rows[0]['called_ms']:.2f} ms"),
    ]
    if peak_here is None:
        return [*claims, claim("forecast", "the device's peaks are unknown: doctor --measure")], rows
    outside = [row["window"] for row in rows if not row["low_ms"] <= row["ms"] <= row["high_ms"]]
    within = f"{len(rows) - len(outside)} of {len(rows)}" + (f"; outside: {outside}" if outside else "")
    ratios = [row["middle_ms"] / row["ms"] for row in rows]
    claims.append(claim("windows whose forward is within the forecast's range", within, "all", not outside))
    claims.append(claim("middle of the forecast over measured", f"{min(ratios):.2f} to {max(ratios):.2f}"))
    return claims, rows


@torch.inference_mode()
def _forward_ms(model: TransformerModel, window: int, start: int) -> tuple[float, float]:
    """Milliseconds of a forward called from Python, and of its kernels alone (the same on a CPU)."""
    session = model.begin(model.encode(["a"]), 3.0, window)
    positions = (start + torch.arange(window, device=model.device)).expand(2, -1)
    tokens, slots = torch.zeros_like(positions), PROMPT - 1 + positions
    visible = PROMPT + start + window

    def call() -> None:
        session._step(tokens, positions, slots, None, visible)

    if model.device.type != "cuda":
        spent = _best_ms(call, 3, lambda: None)
        return spent, spent
    for _ in range(3):
        call()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        call()
    return _best_ms(call, 5, torch.cuda.synchronize), _best_ms(graph.replay, 20, torch.cuda.synchronize)


def _best_ms(call: Callable[[], None], times: int, wait: Callable[[], None]) -> float:
    """Median over three rounds of the mean milliseconds of `times` calls."""
    spent = []
    for _ in range(3):
        wait()
        start = time.perf_counter()
        for _ in range(times):
            call()
        wait()
        spent.append((time.perf_counter() - start) * 1e3 / times)
    return statistics.median(spent)


def _forecast_ms(model: RandomLlama, dtype: torch.dtype, window: int, start: int, peak: Peak) -> dict[str, float]:
    """The forecast's range, its middle, and the floor at the device's peaks."""
    layers, vocabulary = model.backbone.config.num_hidden_layers, model.layout.vocab
    work = Forward(model.size, layers, vocabulary, dtype.itemsize, window, 1, True, PROMPT + start)

    def at(bandwidth: float, flops: float) -> float:
        return sum(forward_ms(work, peak, Reached(bandwidth, flops)).values())

    low, high = at(BANDWIDTH[1], FLOPS[1]), at(BANDWIDTH[0], FLOPS[0])
    middle = at(sum(BANDWIDTH) / 2, sum(FLOPS) / 2)
    return {"low_ms": low, "high_ms": high, "middle_ms": middle, "floor_ms": at(1, 1)}


def steps(device: str, scale: Scale) -> Outcome:
    """Time eager decoders on the model of Lumina's size; acceptance there is that of random weights.

    Compiling a forward of this size for every width of the window would take longer than the program has.
    """
    model = _llama(device, scale)
    names = ("ar", "sjd", "gsd", "scd-mc", "scd-gs") if _has_graphs(device) else ("ar", "sjd")
    sampling = Sampling(3.0, 1.0, min(2000, scale.llama["vocabulary"] // 2))
    rows, _ = realised(model, names, sampling, scale.rounds)
    return step_claims(rows), rows


def step_claims(rows: list[dict]) -> list[dict[str, object]]:
    """Claims on what a step takes besides its forward."""
    claims = []
    for line in realised_shares(rows)[1:]:
        name, numbers = line.split(": ")
        compression, speed_up, step, forward, share = map(float, numbers.split(", "))
        told = f"{step / forward:.2f} ({step:.2f} over {forward:.2f} ms)"
        claims.append(claim(f"{name}: step over forward", told, "1.05", step <= 1.05 * forward))
        if name != "ar":
            found = f"{share:.2f} (speed-up {speed_up:.2f}, {compression:.2f} tokens a step)"
            claims.append(claim(f"{name}: realised share of the ideal speed-up", found, "0.95", share >= 0.95))
    return claims


def throughput(device: str, scale: Scale) -> Outcome:
    """Decode images of `shapes` one at a time and in batches that are refilled."""
    model, sampling = load_model("shapes", device), find_model("shapes").sampling()
    texts = [prompt.text for prompt in load_prompts("shapes").prompts]
    rows = []
    for batch in scale.batches:
        images = texts[: batch if batch < 16 else 2 * batch]
        timed_images(model, resolve("ar"), sampling, batch, images[:1], 99)
        row = timed_images(model, resolve("sjd"), sampling, batch, images, 0)
        rows.append({**row, "per_hour": 3.6e6 * row["images"] / row["wall_ms"]})
    one, most = rows[0]["per_hour"], max(row["per_hour"] for row in rows)
    told = ", ".join(f"{row['per_hour']:,.0f} at {row['batch']}" for row in rows)
    claims = [claim("images per hour of shapes with SJD, by batch", told)]
    return [*claims, claim("best batch over one image at a time", f"{most / one:.1f}x", "10x", most >= 10 * one)], rows


def memory(device: str, scale: Scale) -> Outcome:
    """Compare the planned bytes with those of live tensors, and on a GPU with the allocator's peak."""
    rows = []
    for name in scale.memory:
        info = find_model(name)
        info = info.configured(random=True) if isinstance(info, HubModel) else info
        model, sampling = load_model(info, device), info.sampling()
        for decoder in ("ar", "sjd", "gsd") if _has_graphs(device) else ("ar",):
            rows.append(_remembered(info, model, resolve(decoder), sampling, device))
        del model
    return memory_claims(rows), rows


def memory_claims(rows: list[dict]) -> list[dict[str, object]]:
    """Claims on the planned memory."""
    claims = []
    for row in rows:
        share = row["planned"] / row["live"]
        told = f"{share:.2f} ({row['live'] / _GIB:.3f} GiB of tensors, {row['allocated'] / _GIB:.3f} by the allocator)"
        within = 0.9 <= share <= 1.1 if row["model"] == "shapes" else share >= 0.95
        claims.append(claim(f"{row['model']}, {row['decoder']}: planned over peak", told, "0.9 to 1.1", within))
    return claims


def _remembered(info, model, decoder: DecoderSpec, sampling: Sampling, device: str) -> dict[str, object]:
    before = 0
    if _has_graphs(device):
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats(device)
        before = torch.cuda.memory_allocated(device)
    live = peak(model, decoder, sampling, 1)
    allocated = torch.cuda.max_memory_allocated(device) - before if _has_graphs(device) else 0
    planned = predicted(info, decoder, sampling, 1, info.dtype, device)["besides"]
    return {"model": info.name, "decoder": decoder.name, "live": live, "allocated": allocated, "planned": planned}


def energy(device: str, scale: Scale) -> Outcome:
    """Joules per image of AR and SJD on `shapes`, from the driver's counter."""
    if joules(device) is None:
        return [claim("joules per image", "the driver does not tell")], []
    model, sampling, rows = load_model("shapes", device), find_model("shapes").sampling(), []
    for name in ("ar", "sjd"):
        decode(model, [Request(CAPTION, "gpu", 99)], resolve(name), sampling, 0)
        start, before, images = time.perf_counter(), joules(device), 0
        while time.perf_counter() < start + 10:
            decode(model, [Request(CAPTION, "gpu", images)], resolve(name), sampling, 0)
            images += 1
        rows.append({"decoder": name, "joules": (joules(device) - before) / images, "images": images})
    return [claim(f"{row['decoder']}: joules per image of shapes", f"{row['joules']:.1f}") for row in rows], rows


def _llama(device: str, scale: Scale, side: int | None = None) -> RandomLlama:
    sizes = scale.llama if side is None else scale.llama | {"side": side}
    return RandomLlama(**sizes, device=device, dtype=scale.dtype)


def _has_graphs(device: str) -> bool:
    return device.startswith("cuda")


PARTS: dict[str, tuple[Callable[[str, Scale], Outcome], int]] = {
    "exactness": (exactness, 200),
    "families": (families, 100),
    "graphs": (graphs, 240),
    "forwards": (forwards, 60),
    "generate": (generate, 330),
    "steps": (steps, 90),
    "throughput": (throughput, 60),
    "memory": (memory, 60),
    "energy": (energy, 60),
}
"""The parts and the seconds each may take, 20 minutes in all."""
