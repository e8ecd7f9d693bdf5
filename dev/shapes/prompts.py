"""Write the prompt sets `shapes` and `shapes-hard`: captions whose meaning training never saw."""

import argparse
import hashlib
import itertools
import json
from collections import defaultdict
from collections.abc import Iterable
from pathlib import Path

import numpy as np

from specbench.models.shapes import captions
from specbench.models.shapes.scene import (
    CATEGORIES,
    COLORS,
    RELATIONS,
    SHAPES,
    TEXTURES,
    Clause,
    SceneError,
    SceneRequest,
    describe,
    realize,
    sample_request,
)

WANTED = {"single_object": 12, "two_object": 28, "counting": 72, "colors": 60, "position": 80, "color_attr": 80}
HARD = 60
TEXTURED = 0.3


def few() -> Iterable[SceneRequest]:
    """Every request of the three kinds that can be listed completely."""
    for texture in (None, *TEXTURES):
        for shape in SHAPES:
            yield SceneRequest((Clause(shape),), (), texture)
        for pair in itertools.permutations(SHAPES, 2):
            yield SceneRequest(tuple(Clause(s) for s in pair), (), texture)
        for shape, color in itertools.product(SHAPES, COLORS):
            yield SceneRequest((Clause(shape, color),), (), texture)


def many(rng: np.random.Generator) -> Iterable[SceneRequest]:
    """An endless stream of counting, position and color_attr requests."""
    while True:
        yield describe(realize(sample_request(rng), rng), rng)


def chained(rng: np.random.Generator) -> Iterable[SceneRequest]:
    """An endless stream of requests for three colored objects, two of them placed relative to the first."""
    kinds = list(itertools.product(SHAPES, COLORS))
    while True:
        chosen = rng.permutation(len(kinds))[:3]
        clauses = tuple(Clause(*kinds[i]) for i in chosen)
        relations = tuple((str(rng.choice(RELATIONS)), 0, j) for j in (1, 2))
        texture = str(rng.choice(TEXTURES)) if rng.random() < TEXTURED else None
        request = SceneRequest(clauses, relations, texture)
        try:
            realize(request, rng)
        except SceneError:
            continue
        yield request


def prompt(request: SceneRequest) -> dict:
    """One line of a prompt set; the id depends on the wording alone."""
    text = captions.caption(request)
    digest = hashlib.sha256(text.encode()).hexdigest()[:8]
    name = f"{request.category}-{digest}"
    return {"id": name, "prompt": text, "category": request.category, "scene": request.to_json()}


def standard_prompts(seed: int = 2026) -> list[dict]:
    """The `shapes` set, with its categories in turn so that the first prompts cover all categories."""
    rng = np.random.default_rng(seed)
    lines: dict[str, dict[str, dict]] = defaultdict(dict)
    listed = [r for r in few() if r.held_out()]
    drawn = (r for r in many(rng) if r.held_out() and r.category in ("counting", "position", "color_attr"))
    for request in itertools.chain((listed[i] for i in rng.permutation(len(listed))), drawn):
        line = prompt(request)
        if len(lines[request.category]) < WANTED[request.category]:
            lines[request.category][line["id"]] = line
        if all(len(lines[c]) == WANTED[c] for c in ("counting", "position", "color_attr")):
            break
    columns = [list(lines[c].values()) for c in CATEGORIES]
    return [line for row in itertools.zip_longest(*columns) for line in row if line]


def hard_prompts(seed: int = 2027) -> list[dict]:
    """The `shapes-hard` set."""
    lines: dict[str, dict] = {}
    for request in chained(np.random.default_rng(seed)):
        if request.held_out():
            line = prompt(request)
            lines[line["id"]] = line
        if len(lines) == HARD:
            return list(lines.values())
    raise AssertionError("unreachable")


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m dev.shapes.prompts", description=__doc__)
    parser.add_argument("folder", type=Path, nargs="?", default=Path("prompts"))
    folder = parser.parse_args().folder
    for name, lines in (("shapes", standard_prompts()), ("shapes-hard", hard_prompts())):
        (folder / f"{name}.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))


if __name__ == "__main__":
    main()
