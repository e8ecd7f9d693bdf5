"""Benchmarks of specbench itself: raw timings as JSON, one file per question, under results/speed/.

    generate        AR in our loop against transformers' own `generate()`, eager and compiled, on `shapes`.
    generate-eager  The same without compilation, in two minutes.
    generate-100m   The same on a random Llama of 100 million parameters.
    bfloat16        The same model in float32 and bfloat16, its products, and the reading of its weights.
    products        Ways to multiply a weight matrix with few hidden states.
    plain           CPU time of a step without its forward, over a plain SJD loop without any recording.
    overhead        A step's time over its forward, by window and vocabulary.
    window          Tokens per step and speed against the window, four decoders; milliseconds of a forward.
    window-compiled  Tokens per step and speed against the window, four decoders, all compiled.
    columns         Milliseconds of a compiled forward by its columns, in ten processes.
    decoders        Speed-up realised against tokens per step, per decoder.
    decoders-compiled  The same compiled, a decoder of each kind; the first compilation takes minutes.
    decoders-100m   The same, compiled, on a random Llama of 100 million parameters.
    compile         Seconds of compilation: the first run on a machine, and the second.
    throughput      Images per hour, many rows at once over one row.
    profile         Parts of the time of a compiled step.
    parts           A compiled step of one column and of 16 by part, and products, attention and cache alone.
    memory          Peak memory of caches and distributions against the formula of `specbench.runs.memory_estimate`.
    forecast        Predicted over measured forwards of the model behind `specbench forecast`, at three sizes.
    uniforms        Cost of keeping the values of the Rosenblatt transform (`specbench audit --run`).

Contenders of a comparison take turns within every round, so that drift of the machine hits all of them.
Numbers are kept as measured; the summary on stdout has their medians.
"""

import argparse
import contextlib
import json
import shlex
import statistics
import sys
import time
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict
from functools import partial
from itertools import product
from multiprocessing import get_context
from pathlib import Path
from typing import NamedTuple

import torch
from compiling import bench_compile
from few_states import bench_products
from forecast import bench_forecast
from generate import against_generate
from llama import PROMPT, RandomLlama
from memory import bench_memory
from profiled import bench_profile
from step_parts import bench_parts
from throughput import bench_throughput
from timing import CAPTION, cpu_ms, in_turns, median, timed_decode
from torch import Tensor
from uniforms import bench_uniforms
from weights_dtype import bench_bfloat16

from specbench.decoding.loop import decode
from specbench.decoding.noise import Noise, row_key
from specbench.decoding.reference import speculative_jacobi
from specbench.models.catalog import find_model, load_model
from specbench.models.interface import ImageModel, TokenLayout
from specbench.prompts import Request, load_prompts
from specbench.specs.presets import PRESETS, DecoderSpec, resolve
from specbench.specs.run_spec import Sampling
from specbench.stats.intervals import ratio_of_totals, without_few
from specbench.system import environment

STEPS = 16
WARM_UP = 3
WINDOWS, VOCABULARIES = (16, 32, 64), (1024, 8192, 65536)
OPTIONS = {"gsd": {"d": "inf"}, "vertical": {"siblings": 1}}
"""Options of decoders that are timed with several windows: GSD without a distance filter, `vertical` with a chain."""


def bench_generate(sampling: Sampling, rounds: int, compiles: bool = True) -> tuple[list[dict], list[str]]:
    """Compare with the library's forward, which skips the pooled caption vector and the grid positions."""
    rows, lines = [], []
    for guidance in (1.0, sampling.guidance):
        same = Sampling(guidance, 1.0, sampling.top_k)
        network = load_model("shapes")._network
        part, texts = against_generate(
            lambda: load_model("shapes"), lambda m: m._network.head, network.prefix, same, rounds, compiles
        )
        rows += part
        lines += [f"guidance {guidance:g}, {line}" for line in texts]
    return rows, lines


def bench_generate_100m(sampling: Sampling, rounds: int) -> tuple[list[dict], list[str]]:
    """Decode 64 tokens with a random Llama of 100 million parameters, guidance, top-k 1000 of 8192."""
    return against_generate(RandomLlama, lambda m: m.output, PROMPT, Sampling(3.0, 1.0, 1000), rounds)


@torch.inference_mode()
def timed_forward(model: ImageModel, sampling: Sampling, window: int, steps: int, sample: int) -> dict:
    """Time forwards of `window` tokens centred on the middle of the image."""
    session = model.begin(model.encode([CAPTION]), sampling.guidance, window)
    start = max(0, (model.layout.length - window) // 2)
    positions = torch.arange(start, start + window)[None]
    tokens = torch.zeros_like(positions)
    wall, cpu = [], []
    for _ in range(steps):
        before = time.perf_counter(), time.process_time()
        session.forward(tokens, positions)
        wall.append((time.perf_counter() - before[0]) * 1e3)
        cpu.append((time.process_time() - before[1]) * 1e3)
    medians = {"wall_ms": statistics.median(wall[WARM_UP:]), "cpu_ms": statistics.median(cpu[WARM_UP:])}
    return {**medians, "steps_ms": wall, "window": window}


class Enough(Exception):
    """End of a stubbed decode: the requested number of calls is reached."""


class StubModel:
    """A model with a negligible forward that records the CPU time between forwards."""

    name, codebook, weights_sha256 = "stub", None, ""
    device, dtype = torch.device("cpu"), torch.float32

    def __init__(self, v_image: int, window: int, steps: int = STEPS):
        self.layout = TokenLayout.plain(1, (steps + 1) * window, v_image)
        self.steps = steps
        draw = torch.Generator().manual_seed(0)
        base = 2 * torch.randn(1, window, v_image, generator=draw)
        # Two alternating tables: p changes between steps, so some drafts are rejected.
        self._tables = [base, base + 0.5 * torch.randn(base.shape, generator=draw)]

    def encode(self, prompts):
        return prompts

    def begin(self, prefix, guidance, columns):
        self.between_ms: list[float] = []
        self._left = None
        return self

    def forward(self, tokens, positions, tree=None):
        if self._left is not None:
            self.between_ms.append((time.process_time() - self._left) * 1e3)
        if len(self.between_ms) == self.steps:
            raise Enough
        logits = self._tables[len(self.between_ms) % 2]
        self._left = time.process_time()
        return logits


def timed_steps(stub: StubModel, decoder: DecoderSpec, sample: int) -> dict:
    """CPU milliseconds between two forwards of a full window: sampling, verification, refinement, token init."""
    with contextlib.suppress(Enough):
        decode(stub, [Request("", "bench", sample)], decoder, Sampling(1.0, 1.0, 1000), seed=0, render=False)
    return {"cpu_ms": statistics.median(stub.between_ms[WARM_UP:]), "steps_ms": stub.between_ms}


@torch.inference_mode()
def timed_plain(stub: StubModel, window: int, sample: int) -> dict:
    """`timed_steps` for the plain SJD loop of `specbench.decoding.reference`."""
    session = stub.begin(None, 1.0, window)

    def target(tokens: Tensor, slots: Tensor) -> Tensor:
        logits = session.forward(tokens, slots)
        if (top_k := 1000) < logits.shape[-1]:
            logits = logits.masked_fill(logits < logits.topk(top_k).values[..., -1:], -torch.inf)
        return logits.softmax(-1)

    with contextlib.suppress(Enough):
        noise = Noise([row_key(0, "bench", sample)], stub.layout.vocab)
        speculative_jacobi(target, stub.layout.length, window, stub.layout.v_image, noise)
    return {"steps_ms": stub.between_ms}


def bench_plain(sampling: Sampling, rounds: int) -> tuple[list[dict], list[str]]:
    """CPU time between two forwards, recording included, and the same for a plain SJD loop written in torch."""
    rows, lines = [], ["decoder, window, vocabulary: mean ms between forwards, over the plain loop of the same round"]
    for vocabulary, window in ((512, 16), (8192, 16), (8192, 64), (65536, 64)):
        stub = StubModel(vocabulary, window, 100 if vocabulary < 65536 else STEPS)
        contenders = {name: partial(timed_steps, stub, with_window(name, window)) for name in ("sjd", "gsd", "scd-mc")}
        contenders["plain"] = partial(timed_plain, stub, window)
        part = in_turns(contenders, rounds)
        rows += [{**row, "window": window, "vocabulary": vocabulary} for row in part]
        plain = {row["round"]: mean_step(row) for row in part if row["name"] == "plain"}
        for name in contenders:
            times = [(mean_step(row), row["round"]) for row in part if row["name"] == name]
            ratio = statistics.median(ms / plain[turn] for ms, turn in times)
            lines.append(f"{name}, {window}, {vocabulary}: {statistics.median(ms for ms, _ in times):.2f}, {ratio:.2f}")
    return rows, lines


def mean_step(row: dict) -> float:
    """Mean CPU milliseconds between forwards. Unlike a median, it includes steps at which several are recorded."""
    return statistics.mean(row["steps_ms"][WARM_UP:])


def loop_ms(row: dict) -> float:
    """Milliseconds of the decode loop. Encoding and prefill, which take all decoders equally long, are not included."""
    return step_cost(row)["step"] * row["nfe"]


def step_cost(row: dict) -> dict[str, float]:
    """Milliseconds per step: whole loop, target forward, and everything else."""
    loop = sum(row["spans_ms"].get(name, 0.0) for name in ("draft", "target", "verify", "host"))
    target = row["spans_ms"]["target"]
    return {"step": loop / row["nfe"], "forward": target / row["nfe"], "other": (loop - target) / row["nfe"]}


def with_window(name: str, window: int) -> DecoderSpec:
    return resolve(name, {"window": window} | OPTIONS.get(name, {}))


def bench_overhead(sampling: Sampling, rounds: int) -> tuple[list[dict], list[str]]:
    """CPU time of a step between two forwards, and of a guided forward of a random Llama with the same vocabulary. CPU
    milliseconds are least affected by other load."""
    rows, lines = [], ["decoder, window, vocabulary: ms between forwards, ms of the forward, step over forward"]
    names, models = ("sjd", "scd-mc", "scd-gs", "gsd"), {}
    for vocabulary, window in product(VOCABULARIES, WINDOWS):
        if vocabulary not in models:
            models = {vocabulary: RandomLlama(vocabulary, side=16)}
        model = models[vocabulary]
        stub = StubModel(vocabulary, window)
        contenders = {name: partial(timed_steps, stub, with_window(name, window)) for name in names}
        contenders["forward"] = partial(timed_forward, model, sampling, window, WARM_UP + 3)
        part = in_turns(contenders, rounds)
        rows += [{**row, "window": window, "vocabulary": vocabulary} for row in part]
        forward = median(part, "forward", cpu_ms)
        for name in names:
            other = median(part, name, cpu_ms)
            ratio = (other + forward) / forward
            lines.append(f"{name}, {window}, {vocabulary}: {other:.2f}, {forward:.2f}, {ratio:.3f}")
    return rows, lines


def bench_window(sampling: Sampling, rounds: int) -> tuple[list[dict], list[str]]:
    """Images of SJD, of SJD with drafts copied from the row above, of a chain of a vertical head's drafts, and of EAGLE
    with block verification, against the window, and a mid-image forward of as many columns.

    Windows shrink near the end of an image, so the mean step of a wide window can cost less than its forward.
    """
    model, windows = load_model("shapes"), (1, 2, 4, 8, 16, 32, 64, 128)
    forwards = {f"forward {window}": partial(timed_forward, model, sampling, window, STEPS) for window in windows}
    decoders = by_window("sjd", windows) | by_window("sjd-isp", (4, 6, 8, 16))
    decoders |= by_window("vertical", (4, 6, 8, 12, 16)) | {"eagle-block": resolve("eagle-block")}
    rows = in_turns(decodes(model, decoders, sampling) | forwards, rounds)
    narrow = median(rows, "forward 1", cpu_ms)
    lines = ["window: ms per forward, window cost"]
    for window in windows:
        forward = median(rows, f"forward {window}", cpu_ms)
        lines.append(f"{window}: {forward:.2f}, {forward / narrow:.2f}")
    return rows, [*lines, *gains(rows, decoders)]


def bench_window_compiled(sampling: Sampling, rounds: int) -> tuple[list[dict], list[str]]:
    """The same images against the window. The steps of AR and of the decoders are compiled in a warm-up round."""
    model = load_model("shapes")
    model.compile()
    decoders = by_window("sjd", (4, 8, 16)) | by_window("sjd-isp", (4, 6, 8)) | by_window("vertical", (4, 6, 8, 12))
    decoders |= {"eagle-block": resolve("eagle-block")}
    rows = in_turns(decodes(model, decoders, sampling), rounds)
    return rows, gains(rows, decoders)


def bench_columns(sampling: Sampling, rounds: int) -> tuple[list[dict], list[str]]:
    """Compiled forwards of few to many columns, each round in a separate process, to show whether processes differ."""
    rows = []
    for number in range(rounds):
        with ProcessPoolExecutor(1, get_context("spawn")) as process:
            part = process.submit(forwards_by_columns, sampling, torch.get_num_threads()).result()
        rows += [{**row, "round": number} for row in part]
    lines = ["columns: median, fastest and slowest process in ms, times one column"]
    for columns in dict.fromkeys(row["window"] for row in rows):
        ms = [row["wall_ms"] for row in rows if row["window"] == columns]
        ratio = statistics.median(
            row["wall_ms"] / rows[row["round"] * len(part)]["wall_ms"] for row in rows if row["window"] == columns
        )
        lines.append(f"{columns}: {statistics.median(ms):.2f}, {min(ms):.2f}, {max(ms):.2f}, {ratio:.2f}")
    return rows, lines


def forwards_by_columns(sampling: Sampling, threads: int) -> list[dict]:
    """Milliseconds of this process's compiled forwards, beginning with one column."""
    torch.set_num_threads(threads)
    model = load_model("shapes")
    model.compile()
    return [timed_forward(model, sampling, columns, 300, 0) for columns in (1, 2, 4, 8, 16)]


def by_window(name: str, windows: Sequence[int]) -> dict[str, DecoderSpec]:
    """A decoder with every window, by name and window."""
    return {f"{name} {window}": with_window(name, window) for window in windows}


def decodes(
    model: ImageModel, decoders: dict[str, DecoderSpec], sampling: Sampling
) -> dict[str, Callable[[int], dict]]:
    """Contenders: AR and the decoders. In each round all of them decode another caption of `shapes`."""
    captions = [prompt.text for prompt in load_prompts("shapes").prompts]

    def decoded(decoder: DecoderSpec, sample: int) -> dict:
        return timed_decode(model, decoder, sampling, sample, captions[sample % len(captions)])

    return {name: partial(decoded, decoder) for name, decoder in ({"ar": resolve("ar")} | decoders).items()}


def gains(rows: Sequence[dict], names: Iterable[str]) -> list[str]:
    """Tokens per step and speed-up over AR by CPU time [95 % interval over captions], as ratios of totals."""
    lines = ["decoder: tokens per step, speed-up over ar"]
    ar_ms = [row["cpu_ms"] for row in rows if row["name"] == "ar"]
    for name in names:
        images = [row for row in rows if row["name"] == name]
        turns = [row["round"] for row in images]
        compression = sum(row["tokens"] for row in images) / sum(row["nfe"] for row in images)
        gain = without_few(ratio_of_totals(ar_ms, [row["cpu_ms"] for row in images], turns), len(turns))
        interval = "" if gain.low is None else f" [{gain.low:.2f}-{gain.high:.2f}]"
        lines.append(f"{name}: {compression:.2f}, {gain.value:.2f}{interval}")
    return lines


def bench_decoders(sampling: Sampling, rounds: int) -> tuple[list[dict], list[str]]:
    """Time every preset at its default window."""
    return realised(load_model("shapes"), PRESETS, sampling, rounds)


def bench_decoders_compiled(sampling: Sampling, rounds: int) -> tuple[list[dict], list[str]]:
    """Time one decoder of each kind, all compiled in a warm-up round, including AR."""
    model = load_model("shapes")
    model.compile()
    names = ("ar", "sjd", "sjd++", "gsd", "scd-gs", "sjd-pac", "eagle", "zipar")
    return realised(model, names, sampling, rounds)


def bench_decoders_100m(sampling: Sampling, rounds: int) -> tuple[list[dict], list[str]]:
    """Time compiled decoders without a draft head on a random Llama of 100 million parameters. With random weights,
    only the cost of a step relative to the forward is meaningful, not the acceptance."""
    model = RandomLlama()
    model.compile()
    names = ("ar", "sjd", "gsd", "scd-mc", "scd-gs")
    return realised(model, names, Sampling(sampling.guidance, 1.0, 1000), rounds)


def realised(model: ImageModel, names: Iterable[str], sampling: Sampling, rounds: int) -> tuple[list[dict], list[str]]:
    """Speed-up and tokens per step as ratios of totals over the images of one prompt; `realised` is the speed-up over
    (tokens per step / window cost)."""
    unfiltered = {"d": "inf"} if model.codebook is None else {}
    contenders = {
        name: partial(timed_decode, model, resolve(name, unfiltered if name == "gsd" else {}), sampling)
        for name in names
    }
    # A process's first decode is slow, and so is a decoder's first decode if it compiles or loads kernels.
    slow = model.compiles or model.device.type != "cpu"
    rows = in_turns(contenders, rounds, warm_up=list(contenders) if slow else ["ar"])
    lines = ["decoder: tokens per step, speed-up over ar, ms per step, of which forward, realised"]
    for name, share in realised_shares(rows).items():
        numbers = share.compression, share.speed_up, share.step_ms, share.forward_ms, share.realised
        lines.append(f"{name}: {', '.join(f'{value:.2f}' for value in numbers)}")
    return rows, lines


class Share(NamedTuple):
    """Share of the ideal speed-up over AR that a decoder realises.

    Attributes:
        compression: tokens per step.
        speed_up: speed-up over AR.
        step_ms, forward_ms: milliseconds of a step and of its forward; medians over images.
        image_ms: mean milliseconds of an image.
        realised: `speed_up` over (compression / window cost): AR's ratio of step to forward, over the decoder's ratio.
    """

    compression: float
    speed_up: float
    step_ms: float
    forward_ms: float
    image_ms: float
    realised: float


def realised_shares(rows: list[dict]) -> dict[str, Share]:
    """The share of each decoder of the rows, including AR."""

    def total(name: str, value: Callable[[dict], float]) -> float:
        return sum(value(row) for row in rows if row["name"] == name)

    def overhead(name: str) -> float:
        """Ratio of a step to its forward, computed within an image, so that drift between images cancels."""
        return median(rows, name, lambda row: step_cost(row)["step"] / step_cost(row)["forward"])

    shares = {}
    for name in dict.fromkeys(row["name"] for row in rows):
        spent, images = total(name, loop_ms), sum(row["name"] == name for row in rows)
        compression = total(name, lambda row: row["tokens"]) / total(name, lambda row: row["nfe"])
        step, forward = (median(rows, name, lambda row, of=of: step_cost(row)[of]) for of in ("step", "forward"))
        kept = overhead("ar") / overhead(name)
        shares[name] = Share(compression, total("ar", loop_ms) / spent, step, forward, spent / images, kept)
    return shares


class Bench(NamedTuple):
    """A benchmark, and the default number of rounds of each contender."""

    run: Callable[[Sampling, int], tuple[list[dict], list[str]]]
    rounds: int = 3


BENCHES = {
    "generate": Bench(bench_generate),
    "generate-eager": Bench(partial(bench_generate, compiles=False), 5),
    "generate-100m": Bench(bench_generate_100m),
    "bfloat16": Bench(bench_bfloat16, 2),
    "products": Bench(bench_products, 5),
    "plain": Bench(bench_plain),
    "overhead": Bench(bench_overhead),
    "window": Bench(bench_window, 12),
    "window-compiled": Bench(bench_window_compiled, 24),
    "columns": Bench(bench_columns, 10),
    "decoders": Bench(bench_decoders),
    "decoders-compiled": Bench(bench_decoders_compiled),
    "decoders-100m": Bench(bench_decoders_100m),
    "compile": Bench(bench_compile, 1),
    "throughput": Bench(bench_throughput),
    "profile": Bench(bench_profile),
    "parts": Bench(bench_parts),
    "memory": Bench(bench_memory),
    "uniforms": Bench(bench_uniforms, 7),
    "forecast": Bench(bench_forecast),
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("benches", nargs="*", choices=[*BENCHES, []], help="benchmarks to run; all by default")
    parser.add_argument("--rounds", type=int, help="timed rounds of each contender; the benchmark has a default")
    parser.add_argument("--threads", type=int, help="torch threads; torch's default if not given")
    parser.add_argument("--out", type=Path, default=Path("results/speed"), help="folder of the JSON files")
    options = parser.parse_args()
    if options.threads:
        torch.set_num_threads(options.threads)
    # The files that this program writes also count as changes of the checkout.
    shapes, git = find_model("shapes"), environment.git_state()
    options.out.mkdir(parents=True, exist_ok=True)
    for name in options.benches or BENCHES:
        bench = BENCHES[name]
        rows, lines = bench.run(shapes.sampling(), options.rounds or bench.rounds)
        document = {
            "bench": name,
            "command": shlex.join(["python", *sys.argv]),
            "threads": torch.get_num_threads(),
            "sampling": asdict(shapes.sampling()),
            "weights_sha256": shapes.weights_sha256(),
            **environment.environment_facts(),
            "git": git,
            "rows": rows,
        }
        (options.out / f"{name}.json").write_text(json.dumps(document, indent=1) + "\n")
        print(f"{name}\n" + "\n".join(f"  {line}" for line in lines), flush=True)


if __name__ == "__main__":
    main()
