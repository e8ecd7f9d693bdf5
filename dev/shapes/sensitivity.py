"""Test whether scores detect damage: pictures of the prompt set with 10, 20, 40 % of their tokens replaced at random.

The pictures are renders of the captions, through the tokenizer, or with `--run` pictures of runs of the model. Each
level is compared with the previous level over the same pictures. Prints a table, and writes `sensitivity-renders.json`
(with the small CLIP's retrieval) or `sensitivity-model.json`.
"""

import argparse
import json
from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np
import pandas as pd
import torch
from torch import Tensor

from dev.shapes.retrieval import retrieval
from specbench.errors import SpecbenchError
from specbench.metrics.base import Metric, Sample
from specbench.metrics.shapes import ShapesClip, ShapesDetector, ShapesFrechet
from specbench.models.shapes.network import load_tokenizer
from specbench.models.shapes.render import render
from specbench.models.shapes.scene import SceneRequest, realize
from specbench.models.shapes.tokenizer import GRID, ShapesTokenizer
from specbench.prompts import Prompt, load_prompts
from specbench.store.run_store import RunStore

SHARES = (0.0, 0.1, 0.2, 0.4)
_METRICS = {metric.name: metric for metric in (ShapesDetector, ShapesClip, ShapesFrechet)}
_BETTER = {"shapes-detector": 1, "shapes-clip": 1, "shapes-frechet": -1}
"""Direction of each score when pictures get better."""


def rendered_tokens(prompts: Sequence[Prompt], tokenizer: ShapesTokenizer, seed: int) -> Tensor:
    """Tokens [N, 256] of a true picture of each caption."""
    rng = np.random.default_rng([13, seed])
    pictures = [render(realize(SceneRequest.from_json(prompt.meta["scene"]), rng)) for prompt in prompts]
    return tokenizer.encode(torch.from_numpy(np.stack(pictures)).permute(0, 3, 1, 2))


def damaged(tokens: Tensor, share: float, codes: int, seed: int) -> Tensor:
    """Tokens of which about `share` are replaced by uniformly random tokens; a larger share includes the replacements
    of a smaller share."""
    generator = torch.Generator().manual_seed(seed)
    hit = torch.rand(tokens.shape, generator=generator) < share
    return torch.where(hit, torch.randint(codes, tokens.shape, generator=generator), tokens)


def features(metric: Metric, samples: Sequence[Sample]) -> pd.DataFrame:
    """Values that `scoring` would store for the samples."""
    keys = [{"prompt_id": s.prompt_id, "sample": s.sample, "category": s.category} for s in samples]
    starts = range(0, len(samples), metric.batch)
    kept = [row for start in starts for row in metric.features(samples[start : start + metric.batch])]
    return pd.DataFrame([key | row for key, row in zip(keys, kept, strict=True)])


def measure(metrics: Sequence[Metric], levels: Mapping[str, Sequence[Sample]]) -> list[dict]:
    """The score of every metric at every level, and its difference from the previous level: `metric, level, n, value,
    low, high, change, change_low, change_high`, and `seen`, whether it became significantly worse."""
    rows = []
    for metric in metrics:
        before = None
        for level, samples in levels.items():
            kept = features(metric, samples)
            score = metric.scores(metric.statistics(kept))[0]
            row = {"metric": metric.name, "level": level, "n": score.n} | _bounds(score.estimate)
            change = None if before is None else metric.difference(kept, before)
            if change:
                row |= {f"change_{k}".removesuffix("_value"): v for k, v in _bounds(change[0]).items()}
                row["seen"] = _worse(change[0], _BETTER[metric.name])
            rows.append(row)
            before = kept
    return rows


def damage_levels(
    prompts: Sequence[Prompt], numbers: Sequence[int], tokens: Tensor, tokenizer: ShapesTokenizer, seed: int
) -> dict[str, list[Sample]]:
    """Pictures of tokens [N, 256] at every share of `SHARES`; row i is sample `numbers[i]` of `prompts[i]`."""
    levels = {}
    for share in SHARES:
        broken = damaged(tokens, share, len(tokenizer.codebook), seed)
        pictures = torch.cat([tokenizer.decode(part) for part in broken.split(64)]).permute(0, 2, 3, 1).numpy()
        levels[f"{share:.0%}"] = [
            Sample(p.id, number, p.text, p.category, p.meta, picture)
            for p, number, picture in zip(prompts, numbers, pictures, strict=True)
        ]
    return levels


def stored_tokens(runs: Sequence[Path]) -> tuple[list[Prompt], list[int], Tensor]:
    """Prompts, sample numbers and tokens [N, 256] of runs of the model; the samples of each run get separate
    numbers."""
    parts = [RunStore(run).samples(["prompt", "category", "meta", "status", "tokens"]) for run in runs]
    rows = pd.concat(part.assign(sample=part["sample"] * len(runs) + i) for i, part in enumerate(parts))
    rows = rows[rows["status"] == "ok"]
    prompts = [Prompt(r.prompt_id, r.prompt, r.category, json.loads(r.meta)) for r in rows.itertuples()]
    if (rows["tokens"].str.len() != GRID * GRID).any():
        raise SpecbenchError("--run: these are not only runs of shapes")
    return prompts, rows["sample"].to_list(), torch.from_numpy(np.stack(rows["tokens"].to_list()).astype(np.int64))


def table(rows: Sequence[Mapping]) -> str:
    """The measurements as markdown."""
    lines = ["| metric | replaced | n | score | change from the level before |", "|---|---|---|---|---|"]
    for row in rows:
        change = f"{row['change']:+.3f} [{row['change_low']:+.3f}, {row['change_high']:+.3f}]" if "seen" in row else "-"
        value = f"{row['value']:.3f} [{row['low']:.3f}, {row['high']:.3f}]"
        lines.append(f"| {row['metric']} | {row['level']} | {row['n']} | {value} | {change} |")
    return "\n".join(lines)


def _bounds(estimate) -> dict[str, float | None]:
    return {"value": estimate.value, "low": estimate.low, "high": estimate.high}


def _worse(change, better: int) -> bool:
    bounds = (change.low, change.high)
    return None not in bounds and max(better * bound for bound in bounds) < 0


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m dev.shapes.sensitivity", description=__doc__)
    parser.add_argument("--out", type=Path, default=Path("results/shapes-training"))
    parser.add_argument("--run", type=Path, nargs="+", help="folders of runs of shapes, whose pictures are damaged")
    parser.add_argument("--metric", choices=_METRICS, nargs="+", default=list(_METRICS))
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    tokenizer = load_tokenizer()
    if args.run:
        prompts, numbers, tokens = stored_tokens(args.run)
    else:
        prompts = load_prompts("shapes").prompts
        numbers, tokens = [0] * len(prompts), rendered_tokens(prompts, tokenizer, args.seed)
    levels = damage_levels(prompts, numbers, tokens, tokenizer, args.seed)
    rows = measure([_METRICS[name]() for name in args.metric], levels)
    content = {"pictures": "model", "damage": rows}
    if not args.run:
        content |= {"pictures": "renders", "retrieval": retrieval()}
    args.out.mkdir(parents=True, exist_ok=True)
    name = f"sensitivity-{content['pictures']}.json"
    (args.out / name).write_text(json.dumps(content, indent=1) + "\n")
    print(table(rows))
    print(json.dumps(content.get("retrieval", {})))


if __name__ == "__main__":
    main()
