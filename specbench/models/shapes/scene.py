"""Scenes and requests: what a picture of the `shapes` world contains, and what a caption asks for.

A `SceneRequest` is the meaning of a caption: clauses ("two red circles"), relations between clauses, perhaps a texture.
A `Scene` is one concrete picture that satisfies a request: every object with its place and size in pixels.
`realize` draws a scene for a request, `describe` draws a request that a scene satisfies.

The image is 64 x 64 pixels, x to the right, y downwards. Every object lies on a dark square card, whose edges are on an
8-pixel lattice and which no other card touches. So a token, which covers 4 x 4 pixels, shows either card or background.

The shipped weights were trained on scenes and captions in reading order: objects are numbered by the upper left corner
of their card, row by row, and a caption without relations names them in this order (for relations see
`captions.in_normal_form`). At the corner of a card, a network that draws token by token then knows which object begins
there, and does not mix the color of one object with the shape of another.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from specbench.errors import SpecbenchError

SIZE = 64
LATTICE = 8
RIM = 2
GAP = 8
SHAPES = ("circle", "square", "triangle", "cross")
COLORS = ("red", "yellow", "green", "blue", "purple", "white")
TEXTURES = ("smooth", "gradient", "striped", "checkered", "cloudy", "grainy")
TEXTURE_SHARES = (0.08, 0.07, 0.07, 0.08, 0.35, 0.35)
RELATIONS = ("left", "right", "above", "below")
OPPOSITE = {"left": "right", "right": "left", "above": "below", "below": "above"}
MAX_COUNT = 4
CATEGORIES = ("single_object", "two_object", "counting", "colors", "position", "color_attr")
RADII = {1: (10, 14), 2: (6, 10), 3: (6,), 4: (6,)}


class SceneError(SpecbenchError, ValueError):
    """A request that no scene can satisfy."""


@dataclass(frozen=True)
class Clause:
    """`count` objects of one shape; `color` None means any color."""

    shape: str
    color: str | None = None
    count: int = 1


@dataclass(frozen=True)
class SceneRequest:
    """Content of a caption. A relation `(name, i, j)` means: clause i is `name` of clause j."""

    clauses: tuple[Clause, ...]
    relations: tuple[tuple[str, int, int], ...] = ()
    texture: str | None = None

    @property
    def category(self) -> str:
        """GenEval's tag of this request, or `hard` for more than two clauses."""
        if len(self.clauses) > 2:
            return "hard"
        if self.relations:
            return "position"
        first = self.clauses[0]
        if first.count > 1:
            return "counting"
        if len(self.clauses) == 2:
            return "color_attr" if first.color else "two_object"
        return "colors" if first.color else "single_object"

    def key(self) -> str:
        """Key of the meaning: equal for all wordings of a request (other order of clauses, left/right swapped)."""
        names = [f"{c.count} {c.color or 'any'} {c.shape}" for c in self.clauses]
        facts = []
        for name, i, j in self.relations:
            if name in ("right", "below"):
                name, i, j = OPPOSITE[name], j, i
            facts.append(f"{names[i]} {name} {names[j]}")
        return json.dumps([sorted(names), sorted(facts), self.texture])

    def held_out(self) -> bool:
        """True for a third of all meanings, which training never sees in any wording."""
        return hashlib.sha256(self.key().encode()).digest()[0] % 3 == 0

    def to_json(self) -> dict[str, Any]:
        """A plain dictionary, the `scene` field of a prompt set."""
        return {
            "objects": [{"shape": c.shape, "color": c.color, "count": c.count} for c in self.clauses],
            "relations": [list(r) for r in self.relations],
            "texture": self.texture,
        }

    @staticmethod
    def from_json(data: Mapping[str, Any]) -> SceneRequest:
        clauses = tuple(Clause(o["shape"], o.get("color"), o.get("count", 1)) for o in data["objects"])
        relations = tuple((r[0], int(r[1]), int(r[2])) for r in data.get("relations", ()))
        return SceneRequest(clauses, relations, data.get("texture"))


@dataclass(frozen=True)
class Item:
    """One object: centre (x, y) and half the side of its bounding box, in pixels."""

    shape: str
    color: str
    x: int
    y: int
    radius: int

    @property
    def card(self) -> tuple[int, int, int, int]:
        """Left, top, right and bottom of the card, in pixels; right and bottom are exclusive."""
        half = self.radius + RIM
        return self.x - half, self.y - half, self.x + half, self.y + half


@dataclass(frozen=True)
class Scene:
    """Objects on a textured background. `seed`: random seed of everything that no caption can name."""

    items: tuple[Item, ...]
    texture: str
    seed: int = 0


def holds(relation: str, ax: float, ay: float, bx: float, by: float, margin: float = 6.0) -> bool:
    """Return whether centre a is in `relation` to centre b, by more than `margin` pixels."""
    return {"left": bx - ax, "right": ax - bx, "above": by - ay, "below": ay - by}[relation] > margin


def sample_request(rng: np.random.Generator) -> SceneRequest:
    """Draw a fully specified request: the mixture of scenes the model is trained on."""
    kind = rng.choice(4, p=(0.20, 0.40, 0.27, 0.13))
    if kind == 2:
        clauses = [_clause(rng, int(rng.integers(2, MAX_COUNT + 1)))]
    else:
        clauses, count = [], {0: 1, 1: 2, 3: 3}[kind]
        while len(set(clauses)) < count:  # until they are distinct
            clauses = [_clause(rng) for _ in range(count)]
    return SceneRequest(tuple(clauses), (), str(rng.choice(TEXTURES, p=TEXTURE_SHARES)))


def realize(request: SceneRequest, rng: np.random.Generator) -> Scene:
    """Draw a scene that satisfies `request`; attributes it leaves open are drawn uniformly."""
    kinds = []
    for index, clause in enumerate(request.clauses):
        kinds += [(clause.shape, clause.color or str(rng.choice(COLORS)), index)] * clause.count
    if len(kinds) > MAX_COUNT:
        raise SceneError(f"a scene holds at most {MAX_COUNT} objects, not {len(kinds)}")
    first = {index: number for number, (_, _, index) in [*enumerate(kinds)][::-1]}
    for _ in range(5000):
        if (places := _place(len(kinds), rng)) is None:
            continue
        items = tuple(Item(shape, color, *place) for (shape, color, _), place in zip(kinds, places, strict=True))
        if all(_related(name, items[first[i]], items[first[j]], len(kinds)) for name, i, j in request.relations):
            break
    else:
        raise SceneError(f"no layout satisfies the relations {request.relations}")
    return Scene(items, request.texture or str(rng.choice(TEXTURES)), int(rng.integers(2**31)))


def describe(scene: Scene, rng: np.random.Generator) -> SceneRequest:
    """Draw a request that `scene` satisfies; informative requests are likelier than vague requests."""
    texture = scene.texture if rng.random() < 0.3 else None
    kinds = sorted({(i.shape, i.color) for i in scene.items})
    colored = rng.random() < 0.75
    if len(kinds) == 1:
        clause = Clause(kinds[0][0], kinds[0][1] if colored else None, len(scene.items))
        return SceneRequest((clause,), (), texture)
    items = [scene.items[i] for i in rng.permutation(len(scene.items))]
    colored |= len({i.shape for i in items}) < len(items)
    clauses = tuple(Clause(i.shape, i.color if colored else None) for i in items)
    relations = []
    if rng.random() < 0.6:
        for j in range(1, len(items)):
            if names := [n for n in RELATIONS if _clearly(n, items[0], items[j])]:
                relations.append((str(rng.choice(names)), 0, j))
        if len(relations) < len(items) - 1:
            relations = []
    return SceneRequest(clauses, tuple(relations), texture)


def _clearly(name: str, a: Item, b: Item) -> bool:
    along, across = (abs(a.x - b.x), abs(a.y - b.y)) if name in ("left", "right") else (abs(a.y - b.y), abs(a.x - b.x))
    return holds(name, a.x, a.y, b.x, b.y) and along >= across


def _related(name: str, a: Item, b: Item, count: int) -> bool:
    """Return whether `a` is in a relation to `b`, in a scene of `count` objects."""
    return holds(name, a.x, a.y, b.x, b.y) if count > 2 else _clearly(name, a, b)


def _place(count: int, rng: np.random.Generator) -> list[tuple[int, int, int]] | None:
    places: list[tuple[int, int, int]] = []
    for radius in rng.choice(RADII[count], size=count):
        half = int(radius) + RIM
        x, y = (int(v) * LATTICE + half for v in rng.integers((SIZE - 2 * half) // LATTICE + 1, size=2))
        if any(max(abs(x - px), abs(y - py)) < half + pr + RIM + GAP for px, py, pr in places):
            return None
        places.append((x, y, int(radius)))
    return places


def _clause(rng: np.random.Generator, count: int = 1) -> Clause:
    return Clause(str(rng.choice(SHAPES)), str(rng.choice(COLORS)), count)


def realize_in_order(request: SceneRequest, rng: np.random.Generator) -> Scene:
    """Draw a scene in reading order that satisfies `request`. Without relations, objects are ordered like clauses."""
    for _ in range(1000):
        drawn = realize(request, rng)
        if (ordered := in_reading_order(drawn)) and request.relations:
            return ordered
        if ordered:
            kinds = zip(drawn.items, ordered.items, strict=True)
            items = tuple(replace(place, shape=kind.shape, color=kind.color) for kind, place in kinds)
            return replace(ordered, items=items)
    raise SceneError(f"no layout in reading order satisfies the relations {request.relations}")


def in_reading_order(scene: Scene) -> Scene | None:
    """Sort the objects of `scene` in reading order; return None if an object is left of an earlier object."""
    items = sorted(scene.items, key=lambda item: (item.card[1], item.card[0]))
    if any(_clearly("left", later, items[i]) for j, later in enumerate(items) for i in range(j)):
        return None
    return replace(scene, items=tuple(items))


def worded_in_reading_order(request: SceneRequest, scene: Scene) -> SceneRequest:
    """Order the clauses of `request`, which `scene` satisfies, like the scene's objects; subjects stay first."""
    fixed = 1 if request.relations else 0
    rest = sorted(range(fixed, len(request.clauses)), key=lambda i: _first(request.clauses[i], scene))
    order = [*range(fixed), *rest]
    clauses = tuple(request.clauses[i] for i in order)
    relations = sorted((name, order.index(i), order.index(j)) for name, i, j in request.relations)
    return replace(request, clauses=clauses, relations=tuple(sorted(relations, key=lambda relation: relation[2])))


def _first(clause: Clause, scene: Scene) -> int:
    """Return the index of the first object that `clause` may mean."""
    kinds = [(item.shape, item.color if clause.color else None) for item in scene.items]
    return kinds.index((clause.shape, clause.color))
