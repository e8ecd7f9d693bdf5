"""python wrong.py RUN ... PNG: classify images of `shapes` that the detector finds wrong, and draw 96 of them.

The categories take turns. Prints the number of images, the number of wrong images and the faults per category: fewer or
more objects than requested, a relation that does not hold, or else the kind of an object (its color or shape).
"""

import json
import sys
from collections import Counter, defaultdict
from itertools import zip_longest
from pathlib import Path

import numpy as np
import torch
from PIL import Image

from dev.shapes.evaluate import grid
from specbench.models.shapes.detector import detect, judge
from specbench.models.shapes.scene import SceneRequest

PROMPTS = Path(__file__).parents[2] / "prompts" / "shapes.jsonl"
SHOWN, COLUMNS = 96, 12
CATEGORIES = ("position", "color_attr", "counting", "colors", "two_object", "single_object")


def fault(request: SceneRequest, picture: np.ndarray) -> str | None:
    """Fault of `picture` (uint8 [64, 64, 3]); None if it is correct."""
    objects = detect(picture)
    verdict = judge(request, objects)
    asked = sum(clause.count for clause in request.clauses)
    if verdict.correct:
        return None
    if len(objects) != asked:
        return f"{'fewer' if len(objects) < asked else 'more'} than {asked}"
    return "relation" if verdict.position is False and verdict.bound is not False and verdict.count else "kind"


def main(runs: list[Path], to: Path) -> None:
    prompts = {line["id"]: line for line in map(json.loads, PROMPTS.read_text().splitlines())}
    images, faults, wrong = Counter(), defaultdict(Counter), defaultdict(list)
    for file in (file for run in runs for file in sorted((run / "images").glob("*.png"))):
        prompt = prompts[file.stem.rsplit("-", 1)[0]]
        request, picture = SceneRequest.from_json(prompt["scene"]), np.array(Image.open(file))
        images[request.category] += 1
        if problem := fault(request, picture):
            faults[request.category][problem] += 1
            wrong[request.category].append((picture, prompt["prompt"]))
    for category in CATEGORIES:
        print(category, images[category], len(wrong[category]), dict(faults[category]))
    turns = zip_longest(*(wrong[category] for category in CATEGORIES))
    shown = [row for turn in turns for row in turn if row is not None][:SHOWN]
    pictures = torch.from_numpy(np.stack([picture for picture, _ in shown])).permute(0, 3, 1, 2)
    grid(pictures, [text for _, text in shown], COLUMNS).save(to)


if __name__ == "__main__":
    *runs, last = map(Path, sys.argv[1:])
    main(runs, last)
