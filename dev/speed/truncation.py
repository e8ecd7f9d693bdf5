"""Time of p from logits, and of whole steps of SJD, before and after a change of `specbench/decoding/sampling.py`.

    python dev/speed/truncation.py 967be91c > results/speed/truncation.json

The commit is the last commit before the change. Times are CPU milliseconds of one thread, in turns; both versions must
give bitwise equal p.
"""

import argparse
import json
import statistics
import subprocess
import sys
import time
from functools import partial
from pathlib import Path
from types import ModuleType

import torch
from timing import timed_decode
from transformers import LlamaConfig, LlamaModel

from specbench.decoding import sampling as after
from specbench.models.interface import TokenLayout
from specbench.specs.presets import resolve
from specbench.specs.run_spec import Sampling

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT / "tests" / "support"))

from tiny_llama import SIZES, WIDTH, Tiny  # noqa: E402 - found through the line above

FILTERS = {
    "top-k 1,200, top-p 0.95": Sampling(1.0, 0.9, 1200, 0.95),
    "top-k 1,200": Sampling(1.0, 0.9, 1200),
    "top-k 100, top-p 0.9": Sampling(1.0, 0.9, 100, 0.9),
    "top-p 0.95": Sampling(1.0, 0.9, 0, 0.95),
}
SIDE = 10


class Wide(Tiny):
    """A network whose steps mainly process the vocabulary: one layer, `codes` tokens."""

    def __init__(self, codes: int):
        torch.manual_seed(0)
        config = LlamaConfig(vocab_size=codes + 1, num_hidden_layers=1, pad_token_id=None, **SIZES)
        self.backbone = LlamaModel(config).eval().requires_grad_(False)
        self.layout, self.codebook = TokenLayout.plain(SIDE, SIDE, codes), None
        self.matrix = 1.5 * torch.randn(WIDTH, codes)


def sampling_of(commit: str) -> ModuleType:
    """The module `sampling` of a commit."""
    name = "specbench/decoding/sampling.py"
    source = subprocess.run(["git", "show", f"{commit}:{name}"], cwd=ROOT, capture_output=True, text=True, check=True)
    module = ModuleType("specbench.decoding.sampling_before")
    sys.modules[module.__name__] = module
    exec(source.stdout.replace("specbench::", "specbench_before::"), vars(module))  # names of operators are unique
    return module


def spent(work) -> float:
    start = time.process_time()
    work()
    return 1e3 * (time.process_time() - start)


@torch.inference_mode()
def of_p(before: ModuleType, codes: int, window: int, sampling: Sampling, rounds: int) -> dict[str, object]:
    """CPU milliseconds of a call of `Target` by both modules, and whether p is the same."""
    logits = 2.5 * torch.randn(1, window, codes, generator=torch.Generator().manual_seed(0))
    positions = torch.arange(window)[None]
    layout = TokenLayout.plain(1, window, codes)
    works = {
        name: partial(module.Target(layout, sampling, torch.device("cpu")), logits, positions)
        for name, module in (("before", before), ("after", after))
    }
    times: dict[str, list[float]] = {name: [] for name in works}
    same = torch.equal(works["before"](), works["after"]())
    for _ in range(rounds):
        for name, work in works.items():
            times[name].append(spent(work))
    return {name: statistics.median(values) for name, values in times.items()} | {"same": same}


def of_steps(before: ModuleType, codes: int, window: int, sampling: Sampling, rounds: int) -> dict[str, object]:
    """CPU milliseconds of a step of SJD, eager, with `truncate` of both modules, and whether the steps are equal."""
    model, decoder = Wide(codes), resolve("sjd", {"window": window})
    works = {"before": before.truncate, "after": after.truncate}
    rows: dict[str, list[dict]] = {name: [] for name in works}
    for turn in range(rounds + 1):
        for name, truncate in works.items():
            after.truncate = truncate
            row = timed_decode(model, decoder, sampling, turn)
            rows[name] += [row] if turn else []
    after.truncate = works["after"]
    ms = {name: statistics.median(row["cpu_ms"] / row["nfe"] for row in some) for name, some in rows.items()}
    steps = [[row["nfe"] for row in some] for some in rows.values()]
    return ms | {"same": steps[0] == steps[1]}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("commit")
    parser.add_argument("--rounds", type=int, default=9)
    options = parser.parse_args()
    torch.set_num_threads(1)
    before, rows = sampling_of(options.commit), []
    for codes in (8192, 65536):
        for window in (16, 64):
            for filters, sampling in FILTERS.items():
                measure = partial(dict, codes=codes, window=window, filters=filters)
                rows.append(measure(what="p", **of_p(before, codes, window, sampling, options.rounds)))
                if filters == next(iter(FILTERS)):
                    rows.append(measure(what="step", **of_steps(before, codes, window, sampling, 2)))
    for row in rows:
        row["ratio"] = row["before"] / row["after"]
        print(row, file=sys.stderr)
    print(json.dumps({"commit": options.commit, "rows": rows}, indent=1))


if __name__ == "__main__":
    main()
