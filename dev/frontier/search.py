"""Measure tokens per step of many decoders on the same images. A later call continues.

    python dev/frontier/search.py sjd-pac scd-mc:window=32 ...      decode, print
    python dev/frontier/search.py --grid --images 24                every combination of the grid of `lossless_grid`
    python dev/frontier/search.py --print                           print the stored results

One line per decoder, model, number of images and seed (0 if a line has no seed) goes to results/frontier/search.jsonl
at once: target forwards of every image, weights, version. Later runs skip existing lines; delete the file to measure
again.
Steps need no quiet machine. Modelled seconds come from `specbench forecast` for Lumina-mGPT 7B.
"""

import argparse
import json
import sys
import time
from collections.abc import Iterator, Sequence
from itertools import product
from pathlib import Path

import torch

from specbench.decoding.loop import begin
from specbench.decoding.recorded_step import RecordedStep
from specbench.decoding.recorder import NoRecorder
from specbench.decoding.timing import Spans
from specbench.errors import SpecbenchError
from specbench.models.catalog import find_model, load_model
from specbench.models.interface import ImageModel
from specbench.papers.forecasts import BANDWIDTH, FLOPS, OVERHEAD_MS, WINDOW
from specbench.prompts import Request, load_prompts
from specbench.reporting.forecast import Accepted, ForecastSetting, forecast_rows
from specbench.runs.decoder_args import parse_decoders
from specbench.runs.memory_estimate import most_columns
from specbench.specs.options import split_list
from specbench.specs.presets import DecoderSpec, resolve
from specbench.specs.run_spec import Sampling
from specbench.stats.intervals import Estimate, ratio_of_totals
from specbench.system.device_peaks import peak_of
from specbench.system.version import __version__

sys.path[:0] = [str(Path(__file__).parents[1]), str(Path(__file__).parent)]

from field_model import FieldModel  # noqa: E402 - found through the line above
from json_rows import read_rows  # noqa: E402 - likewise

OUT = Path("results/frontier/search.jsonl")
BASELINE = "sjd-pac"
DEVICES = {"A100": "NVIDIA A100-SXM4-80GB", "4090": "NVIDIA GeForce RTX 4090"}
TARGET = "lumina"
"""Model whose modelled seconds are printed."""


class ForwardCounter(NoRecorder):
    """Target forwards of each image until its last token."""

    def __init__(self, images: int, length: int):
        self.forwards, self._length = torch.zeros(images, dtype=torch.long), length

    def step(self, step: RecordedStep) -> None:
        self.forwards += (step.positions[:, 0] < self._length).long()


@torch.inference_mode()
def count_forwards(
    model: ImageModel, requests: Sequence[Request], decoder: DecoderSpec, sampling: Sampling, seed: int = 0
) -> list[int]:
    """Target forwards of each image, decoded as one batch."""
    loop = begin(model, requests, decoder, sampling, seed, Spans(model.device), trace=False, rare=True)
    loop.recorder = counter = ForwardCounter(len(requests), model.layout.length)
    for _ in loop.run():
        pass
    return counter.forwards.tolist()


def spread_requests(images: int) -> list[Request]:
    """Requests for one image of each of `images` prompts, which are spread over the categories of the set `shapes`."""
    prompts = load_prompts("shapes").prompts
    chosen = [prompts[number * len(prompts) // images] for number in range(images)]
    return [Request(prompt.text, prompt.id, 0) for prompt in chosen]


def lossless_grid() -> Iterator[str]:
    """Training-free lossless decoders: drafters, tests, refinements and initialisations at window 32, then windows,
    siblings and lookups of the best decoders."""
    inits, drafters = ("uniform", "above-repeat"), ("jacobi", "jacobi-tree", "jacobi-lookup")
    tested = (*product(("exact",), ("resample", "couple", "gumbel", "restart")), ("match", "gumbel"))
    for drafter, (verifier, refine), init in product(drafters, tested, inits):
        yield f"sjd:window=32,drafter={drafter},verifier={verifier},refine={refine},init={init}"
    for drafter, refine in product(("jacobi", "jacobi-lookup,siblings=1"), ("resample", "restart")):
        yield f"sjd:window=32,drafter={drafter},verifier=block,refine={refine}"
    for window in (8, 16, 64, 96):
        yield f"scd-mc:window={window}"
        yield f"sjd-pac:window={window}"
        yield f"best-lossless:window={window}"
    for changed in ("siblings=1", "siblings=5,depth=6", "lookups=4", "lookups=16"):
        yield f"best-lossless:{changed}"


def tokens_per_step(row: dict) -> Estimate:
    """Stream tokens over target forwards, with a 95 % interval over images."""
    return ratio_of_totals([row["length"]] * len(row["forwards"]), row["forwards"], range(len(row["forwards"])))


def modelled_seconds(tokens: float, decoder: DecoderSpec) -> dict[str, float]:
    """Seconds per image of TARGET by device, for `tokens` per step and the middle of every assumed range."""
    facts = find_model(TARGET)
    accepted = Accepted("search", facts.name, decoder, decoder.name, tokens)
    shares = BANDWIDTH, FLOPS, OVERHEAD_MS, WINDOW
    settings = {
        name: ForecastSetting(facts, peak_of(device, facts.dtype), facts.dtype, facts.sampling().guidance, 1, *shares)
        for name, device in DEVICES.items()
    }
    return {name: forecast_rows([accepted], setting)[0]["seconds"] for name, setting in settings.items()}


def table(rows: Sequence[dict], baseline: str) -> list[str]:
    """Markdown table of decoders on the same model and images, the most tokens per step first."""
    base = next((row for row in rows if row["decoder"] == baseline), None)
    facts = find_model("shapes")
    lines = [
        f"| decoder | columns | tokens per step | {baseline} steps / its steps | A100, s | RTX 4090, s |",
        "| --- | ---: | --- | --- | ---: | ---: |",
    ]
    for row in sorted(rows, key=lambda row: sum(row["forwards"])):
        decoder = spec_of(row["decoder"])
        seconds = modelled_seconds(tokens_per_step(row).value, decoder)
        ratio = "-"
        if base is not None:
            ratio = shown(ratio_of_totals(base["forwards"], row["forwards"], range(len(row["forwards"]))))
        lines.append(
            f"| `{row['decoder']}` | {most_columns(decoder, facts)} | {shown(tokens_per_step(row))} | {ratio} "
            f"| {seconds['A100']:.1f} | {seconds['4090']:.1f} |"
        )
    return lines


def shown(estimate: Estimate) -> str:
    """Value and interval as text."""
    if estimate.low is None:
        return f"{estimate.value:.2f}"
    return f"{estimate.value:.2f} [{estimate.low:.2f}, {estimate.high:.2f}]"


def spec_of(text: str) -> DecoderSpec:
    """The decoder of an argument such as "sjd:window=32"."""
    (name, options), *_ = parse_decoders(split_list(text))
    return resolve(name, options)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("decoders", nargs="*", help="as in `specbench run --decoder`")
    parser.add_argument("--grid", action="store_true", help="add the decoders of `lossless_grid`")
    parser.add_argument("--images", type=int, default=24, help="prompts, one image each")
    parser.add_argument("--seed", type=int, default=0, help="of the random numbers of decoding")
    parser.add_argument("--model", default="shapes", help="name of a model, or field (field_model.py)")
    parser.add_argument("--baseline", default=BASELINE, help="decoder to compare steps with")
    parser.add_argument("--out", type=Path, default=OUT)
    parser.add_argument("--print", action="store_true", dest="only_print", help="decode nothing")
    options = parser.parse_args()
    torch.set_num_threads(1)
    names = [*options.decoders, *(lossless_grid() if options.grid else ())]
    setting = (options.model, options.images, options.seed)
    rows = {(row["decoder"], row["model"], row["images"], row.get("seed", 0)): row for row in read_rows(options.out)}
    left = [name for name in names if (name, *setting) not in rows]
    if left and not options.only_print:
        if options.model == FieldModel.name:
            model, sampling = FieldModel(), Sampling(1.0)
        else:
            model, sampling = load_model(options.model), find_model(options.model).sampling()
        requests = spread_requests(options.images)
        for name in left:
            try:
                decoder = spec_of(name)
            except SpecbenchError as refused:
                print(f"{name}: {refused}", file=sys.stderr)
                continue
            start = time.process_time()
            row = {
                "decoder": name,
                "model": options.model,
                "images": options.images,
                "seed": options.seed,
                "length": model.layout.length,
                "forwards": count_forwards(model, requests, decoder, sampling, options.seed),
                "cpu_s": round(time.process_time() - start, 1),
                "lossless": decoder.lossless,
                "weights_sha256": model.weights_sha256,
                "version": __version__,
            }
            rows[name, *setting] = row
            with options.out.open("a") as out:
                out.write(json.dumps(row) + "\n")
            print(f"{name}: {shown(tokens_per_step(row))}, {row['cpu_s']} CPU s", file=sys.stderr)
    same = [row for key, row in rows.items() if key[1:] == setting]
    print("\n".join(table(same, options.baseline)))


if __name__ == "__main__":
    main()
