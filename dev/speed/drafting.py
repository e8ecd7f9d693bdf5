"""Cost of drafting: CPU milliseconds of the parts of a step and of a call of a vertical head, on `shapes`, eager.

    python dev/speed/drafting.py --rounds 4 > results/speed/drafting.json

CPU time is measured in turns, which is least affected by other load; the milliseconds still depend on the load.
"""

import argparse
import json
import time
from collections.abc import Callable
from functools import partial
from types import SimpleNamespace

import torch
from timing import in_turns, timed_decode

from specbench.decoding import timing as spans
from specbench.decoding.sampling import Target, draw
from specbench.models.catalog import find_model, load_model
from specbench.models.vertical_head import vertical_head_for
from specbench.specs.presets import resolve

CHAIN = {"window": 16, "siblings": 1}
DECODERS = {
    "ar": resolve("ar"),
    "eagle": resolve("eagle"),
    "best-lossless": resolve("best-lossless"),
    "vertical, chain of 15": resolve("vertical", CHAIN),
    "vertical-coupled, chain of 15": resolve("vertical-coupled", CHAIN),
}
TIMES = 400


def shares(rounds: int) -> dict[str, dict[str, float]]:
    """Tokens per step, speed-up over AR, milliseconds of a step's parts, and the realised share of the ideal speed-up
    (tokens per step over the cost of the window), by decoder: ratios of sums."""
    spans.time = SimpleNamespace(perf_counter=time.process_time)
    model, sampling = load_model("shapes"), find_model("shapes").sampling()
    rows = in_turns({name: partial(timed_decode, model, spec, sampling) for name, spec in DECODERS.items()}, rounds)
    by_name = {}
    for name in DECODERS:
        of_name = [row for row in rows if row["name"] == name]
        steps = sum(row["nfe"] for row in of_name)
        parts = {
            part: sum(row["spans_ms"].get(part, 0.0) for row in of_name) / steps
            for part in ("draft", "target", "verify")
        }
        tokens = sum(row["tokens"] for row in of_name) / steps
        by_name[name] = {
            "images": len(of_name),
            "tokens_per_step": tokens,
            "step_ms": sum(row["cpu_ms"] for row in of_name) / steps,
        }
        by_name[name] |= {f"{part}_ms": ms for part, ms in parts.items()}
        gain = tokens * by_name["ar"]["step_ms"] / by_name[name]["step_ms"]
        by_name[name] |= {"speed_up": gain, "realised": gain / (tokens * by_name["ar"]["target_ms"] / parts["target"])}
    return by_name


@torch.inference_mode()
def call_us() -> dict[str, float]:
    """CPU microseconds of the parts of a call of the vertical head, and of the target's forward."""
    model, sampling = load_model("shapes"), find_model("shapes").sampling()
    head, target, table = (
        vertical_head_for(model, ""),
        Target(model.layout, sampling, model.device),
        model.token_table(),
    )
    session = model.begin(model.encode(["a red circle"]), sampling.guidance, 16)
    session.forward(torch.zeros(1, 1, dtype=torch.long), torch.zeros(1, 1, dtype=torch.long))
    word, mixed, feature = (torch.randn(2, 1, width) for width in (head.width, head.hidden, head.width))
    logits, position, uniform = session.logits(feature), torch.tensor([[5]]), torch.rand(1, 1).double()
    cheaper, p = (
        Target(model.layout, type(sampling)(sampling.guidance, min_p=0.02), model.device),
        target(logits, position),
    )
    prepared, chosen = head.mixed_before(table[None])[0], torch.tensor([[3], [3]])
    run = torch.zeros(1, 16, dtype=torch.long), torch.arange(100, 116)[None]
    parts: dict[str, Callable] = {
        "first layer, token before": lambda: head.mixed_before(word),
        "the same from a table": lambda: prepared[chosen],
        "other layers": lambda: head.features(mixed),
        "logits and guidance": lambda: session.logits(feature),
        "distribution with top-p": lambda: target(logits, position),
        "distribution with min-p": lambda: cheaper(logits, position),
        "draw": lambda: draw(p, uniform),
        "target forward, 16 columns": lambda: session.forward(*run),
    }
    spent = {}
    for name, part in parts.items():
        times = TIMES if "forward" not in name else TIMES // 10
        part()
        start = time.process_time()
        for _ in range(times):
            part()
        spent[name] = round((time.process_time() - start) / times * 1e6, 1)
    return spent


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=4)
    torch.set_num_threads(1)
    print(json.dumps({"call_us": call_us(), "decoders": shares(parser.parse_args().rounds)}, indent=1))


if __name__ == "__main__":
    main()
