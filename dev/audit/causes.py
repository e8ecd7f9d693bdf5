"""Plant known faults in images of three models: does the audit name the right cause, a wrong cause, or none?

    python dev/audit/causes.py

Each plant, model and seed is written to results/audit/causes.jsonl at once, and a later call continues after the last
line. The table of docs/tokens.md is printed at the end. A cause counts as named if the tokens are samples of it.
"""

import argparse
import json
import sys
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import torch
from transformers import LlamaConfig, LlamaModel

ROOT = Path(__file__).parents[2]
sys.path[:0] = [str(ROOT / "dev"), str(ROOT / "tests" / "support")]

import planted_causes as planted  # noqa: E402 - found through the line above
import tiny_llama  # noqa: E402
from json_rows import read_rows  # noqa: E402

from specbench.checks.likely_causes import Cause, alike, likely_causes  # noqa: E402
from specbench.checks.token_likelihood import Alternative  # noqa: E402
from specbench.errors import SpecbenchError  # noqa: E402
from specbench.models.catalog import load_model  # noqa: E402
from specbench.models.interface import TokenLayout  # noqa: E402
from specbench.prompts import load_prompts  # noqa: E402
from specbench.specs.run_spec import Sampling  # noqa: E402

OUT = ROOT / "results" / "audit" / "causes.jsonl"
SEEDS = 5
SHARPER, BROADER = 15, 10
CLAIM = Sampling(1.5, 0.9, 100, 0.9)


class Random(tiny_llama.Tiny):
    """A random network in which each token depends on the prompt and on the positions of the earlier tokens."""

    def __init__(self, name: str, side: int, codes: int, row_ends: bool):
        torch.manual_seed(3)
        config = LlamaConfig(vocab_size=codes + 1, num_hidden_layers=1, pad_token_id=None, **tiny_llama.SIZES)
        self.name, self.backbone = name, LlamaModel(config).eval().requires_grad_(False)
        self.backbone.embed_tokens.weight.mul_(40)
        for name, matrix in self.backbone.layers[0].self_attn.named_parameters():
            matrix.mul_(SHARPER if name[0] in "qk" else BROADER)
        self.layout = (TokenLayout.with_row_ends if row_ends else TokenLayout.plain)(side, side, codes)
        self.codebook, self.matrix = None, 1.5 * torch.randn(tiny_llama.WIDTH, codes)

    def encode(self, prompts):
        seeds = [torch.Generator().manual_seed(sum(map(ord, text))) for text in prompts]
        words = torch.stack([3 * torch.randn(tiny_llama.WIDTH, generator=seed) for seed in seeds])
        return replace(super().encode(prompts), state=(torch.cat([words, torch.zeros_like(words)]),))

    def embed(self, tokens, positions, state):
        words = self.backbone.embed_tokens(tokens)
        return words + state[0][: len(tokens), None].to(words.dtype)


MODELS: dict[str, Callable[[], object]] = {
    "shapes": lambda: load_model("shapes"),
    "random, 512 codes": lambda: Random("random-512", 14, 512, True),
    "random, 8,192 codes": lambda: Random("random-8192", 10, 8192, False),
}


def _sampled(**changed) -> Callable:
    """A plant that samples with other settings."""
    ways = {name: changed.pop(name) for name in list(changed) if name in vars(Alternative(CLAIM))}
    return lambda model, texts, seed: planted.drawn_by(
        model, texts, Alternative(replace(CLAIM, **changed), **ways), seed
    )


def _honest(model, texts, seed):
    return planted.drawn_by(model, texts, Alternative(CLAIM), seed)


def _exchanged(some: int) -> Callable:
    def plant(model, texts, seed):
        other = [*texts[1:some], texts[0], *texts[some:]]
        return planted.drawn_by(model, other, Alternative(CLAIM), seed)

    return plant


def _reordered(order: Callable) -> Callable:
    return lambda model, texts, seed: planted.reordered(model, _honest(model, texts, seed), order, len(texts))


def _copied(model, texts, seed):
    tokens = _honest(model, texts, seed)
    tokens[len(tokens) // 2 :] = tokens[: len(tokens) - len(tokens) // 2]
    return tokens


def _of_text(change: Callable[[str], str]) -> Callable:
    return lambda model, texts, seed: planted.drawn_by(
        model, [change(text) for text in texts], Alternative(CLAIM), seed
    )


def _moved(*shift: int) -> Callable:
    return lambda model, texts, seed: planted.drawn_by(model, texts, Alternative(CLAIM), seed, shift=shift)


PLANTS: dict[str, tuple[Callable, tuple[str, ...]]] = {
    "none": (_honest, ()),
    "guidance 2.5": (_sampled(guidance=2.5), ("guidance",)),
    "no unconditional row": (_sampled(guidance=1.0), ("guidance",)),
    "temperature 1": (_sampled(temperature=1.0), ("temperature",)),
    "temperature 0.7": (_sampled(temperature=0.7), ("temperature",)),
    "top-k 20": (_sampled(top_k=20), ("top_k",)),
    "no top-k": (_sampled(top_k=0), ("top_k",)),
    "top-p 0.8": (_sampled(top_p=0.8), ("top_p",)),
    "no top-p": (_sampled(top_p=1.0), ("top_p",)),
    "min-p 0.1": (_sampled(min_p=0.1), ("min_p",)),
    "truncation before temperature": (_sampled(early=True), ("early",)),
    "repetition penalty 1.2": (_sampled(repetition=1.2), ("repetition",)),
    "frequency penalty 0.2": (_sampled(frequency=0.2), ("frequency",)),
    "one token in ten greedy": (_sampled(greedy=0.1), ("greedy",)),
    "one token in 50 random": (_sampled(uniform=0.02), ("uniform",)),
    "all prompts exchanged": (_exchanged(10**6), ("prompts",)),
    "prompts of a quarter exchanged": (_exchanged(2), ("prompts",)),
    "the prompt is cut": (
        _of_text(lambda text: " ".join(text.split()[: max(2, len(text.split()) // 2)])),
        ("prompts",),
    ),
    "transposed": (_reordered(lambda grid: grid.T), ("order",)),
    "shifted by one": (_reordered(lambda grid: np.roll(grid.ravel(), -1).reshape(grid.shape)), ("order",)),
    "half the images are copies": (_copied, ("copies",)),
    "positions off by one": (_moved(1), ("positions",)),
    "no token sees itself in the cache": (_moved(0, 1), ("cache",)),
}


def measure(name: str, model, plant: str, seed: int) -> dict[str, object]:
    """Plant a fault, audit the images, and return the outcome."""
    texts = [prompt.text for prompt in load_prompts("shapes").prompts[seed::19]][: 5 if name == "shapes" else 12]
    make, right = PLANTS[plant]
    rows = planted.as_rows(model, texts, make(model, texts, seed))
    causes, _ = likely_causes(lambda dtype: in_format(name, model, dtype), rows, CLAIM, "float32", True)
    close = alike(causes) if causes else []
    named = [cause.kind for cause in close] if causes and causes[0].explains is not False and len(close) < 3 else []
    outcome = (
        "not seen" if not causes else "not named" if not named else "rightly" if {*named} & {*right} else "wrongly"
    )
    return {"model": name, "plant": plant, "seed": seed, "outcome": outcome, "causes": [_short(c) for c in close]}


def _short(cause: Cause) -> list[object]:
    return [cause.what, round(cause.nats, 1), cause.images, cause.explains]


def in_format(name: str, model, dtype: str):
    if dtype == "float32":
        return model
    if dtype != "bfloat16":
        raise SpecbenchError("not tried")
    other = MODELS[name]() if name != "shapes" else load_model(name, "cpu", dtype)
    if name != "shapes":
        planted.in_format(other.backbone, dtype)
        other.matrix = other.matrix.to(torch.bfloat16)
    return other


def table() -> None:
    """Print the outcomes by plant and model."""
    rows = read_rows(OUT)
    print(f"| planted | {' | '.join(MODELS)} |\n| --- |{' --- |' * len(MODELS)}")
    for plant in PLANTS:
        cells = []
        for model in MODELS:
            counts = Counter(row["outcome"] for row in rows if (row["plant"], row["model"]) == (plant, model))
            cells.append(", ".join(f"{number} {outcome}" for outcome, number in counts.most_common()) or "-")
        print(f"| {plant} | {' | '.join(cells)} |")
    print(Counter(row["outcome"] for row in rows if row["plant"] != "none"))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", action="append", choices=MODELS, help="of these models alone")
    parser.add_argument("--seed", action="append", type=int, choices=range(SEEDS), help="of these seeds alone")
    options = parser.parse_args()
    torch.set_num_threads(1)
    done = {(row["model"], row["plant"], row["seed"]) for row in read_rows(OUT)}
    models = {name: make() for name, make in MODELS.items() if name in (options.model or MODELS)}
    with OUT.open("a") as out:
        for seed in options.seed or range(SEEDS):
            for plant in PLANTS:
                for name, model in models.items():
                    if (name, plant, seed) not in done:
                        out.write(json.dumps(measure(name, model, plant, seed)) + "\n")
                        out.flush()
    table()


if __name__ == "__main__":
    main()
