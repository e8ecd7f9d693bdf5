"""What a KV cache of a few image rows saves: memory, and images per hour, by batch, beside AR in one run.

    python dev/frontier/line_cache.py --threads 1 --out results/frontier/line-cache.jsonl

One line per round, batch and decoder: seconds from the prompts to the last token of one batch, by the clock and of the
processor, and bytes of the keys and values. In each round the decoders take turns; the first is a warm-up.
"""

from __future__ import annotations

import argparse
import json
import time
from pathlib import Path

import torch

from specbench.decoding.loop import begin
from specbench.decoding.recorder import NoRecorder
from specbench.decoding.timing import Spans
from specbench.models.catalog import find_model, load_model
from specbench.prompts import Request
from specbench.prompts.loading import load_prompts
from specbench.specs.presets import resolve

DECODERS = ("ar", "linear-kv", "linear-kv anchor-rows=1 middle-rows=0 recent-rows=1", "linear-kv middle-rows=4")


def resolved(text: str):
    """The decoder "name option=value ..."."""
    name, *options = text.split()
    return resolve(name, dict(option.split("=") for option in options))


@torch.inference_mode()
def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--batches", type=int, nargs="+", default=[1, 8, 32, 64])
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("decoders", nargs="*", default=DECODERS)
    given = parser.parse_args()
    torch.set_num_threads(given.threads)
    model, sampling = load_model("shapes"), find_model("shapes").sampling()
    texts = [prompt.text for prompt in load_prompts("shapes").prompts]
    for number in range(given.rounds + 1):
        for batch in given.batches:
            requests = [Request(texts[row % len(texts)], f"{row}") for row in range(batch)]
            for name in given.decoders:
                start, cpu = time.perf_counter(), time.process_time()
                loop = begin(model, requests, resolved(name), sampling, number, Spans(model.device), False, False)
                loop.recorder = NoRecorder()
                for _ in loop.run():
                    pass
                taken = {"seconds": time.perf_counter() - start, "cpu_seconds": time.process_time() - cpu}
                cache = sum(buffer.nbytes for pair in loop.session._cache.buffers() for buffer in pair)
                row = {"decoder": name, "batch": batch, "round": number, **taken, "cache_bytes": cache}
                if number:
                    with given.out.open("a") as file:
                        file.write(json.dumps(row | {"threads": given.threads}) + "\n")
                print(row, flush=True)


if __name__ == "__main__":
    main()
