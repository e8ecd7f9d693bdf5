"""Reading order: scenes and captions in which the next object to draw follows from the caption.

Objects are numbered by the upper left corner of their card, row by row. Of two objects beside each other the left one
does not begin below the right one, and a caption without a relation names the objects in this order (of one with
relations, see `captions.in_normal_form`). A network that draws token by token then knows at the corner of a card which
object begins there; in scenes without an order it has to choose, and pairs the color of one object with the shape of
the other when it chooses anew. These are the scenes and captions that the shipped weights were trained on.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from specbench.models.shapes.scene import Clause, Item, Scene, SceneError, SceneRequest, holds, realize

TRIES = 1000


def realize_in_order(request: SceneRequest, rng: np.random.Generator) -> Scene:
    """Draw a scene that satisfies `request` and is in reading order; without a relation the objects stand in the order
    of the clauses."""
    for _ in range(TRIES):
        drawn = realize(request, rng)
        ordered = in_reading_order(drawn)
        if ordered and request.relations:
            return ordered
        if ordered:
            kinds = zip(drawn.items, ordered.items, strict=True)
            items = tuple(replace(place, shape=kind.shape, color=kind.color) for kind, place in kinds)
            return replace(ordered, items=items)
    raise SceneError(f"no layout in reading order satisfies the relations {request.relations}")


def in_reading_order(scene: Scene) -> Scene | None:
    """`scene` with its objects in reading order; None if one of them stands left of an earlier one."""
    items = sorted(scene.items, key=_corner)
    if any(_left_of(later, items[i]) for j, later in enumerate(items) for i in range(j)):
        return None
    return replace(scene, items=tuple(items))


def worded_in_reading_order(request: SceneRequest, scene: Scene) -> SceneRequest:
    """`request`, which `scene` satisfies, with clauses in the order of the scene's objects; the subject of a relation
    stays first."""
    fixed = 1 if request.relations else 0
    order = [*range(fixed), *range(fixed, len(request.clauses))]
    order[fixed:] = sorted(order[fixed:], key=lambda i: _first(request.clauses[i], scene))
    clauses = tuple(request.clauses[i] for i in order)
    relations = sorted((name, order.index(i), order.index(j)) for name, i, j in request.relations)
    return replace(request, clauses=clauses, relations=tuple(sorted(relations, key=lambda relation: relation[2])))


def _corner(item: Item) -> tuple[int, int]:
    left, top, *_ = item.card
    return top, left


def _left_of(a: Item, b: Item) -> bool:
    """Whether a stands left of b rather than above or below it."""
    return holds("left", a.x, a.y, b.x, b.y) and abs(a.x - b.x) >= abs(a.y - b.y)


def _first(clause: Clause, scene: Scene) -> int:
    """Index of the first object that `clause` may mean."""
    kinds = [(item.shape, item.color if clause.color else None) for item in scene.items]
    return kinds.index((clause.shape, clause.color))
