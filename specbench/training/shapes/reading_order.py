"""Reading order: scenes and captions in which the next object to draw follows from the caption.

Objects are numbered by the upper left corner of their card, row by row. Of two objects beside each other the left one
does not begin below the right one, and a caption without a relation names the objects in this order. A network that
draws token by token then knows at the corner of a card which object begins there; in scenes without an order it has to
choose, and pairs the color of one object with the shape of the other when it chooses anew.
"""

from __future__ import annotations

from dataclasses import replace

from specbench.models.shapes.scene import Clause, Item, Scene, SceneRequest, holds


def in_reading_order(scene: Scene) -> Scene | None:
    """`scene` with its objects in reading order; None if one of them stands left of an earlier one."""
    items = sorted(scene.items, key=_corner)
    if any(_left_of(later, items[i]) for j, later in enumerate(items) for i in range(j)):
        return None
    return replace(scene, items=tuple(items))


def worded_in_reading_order(request: SceneRequest, scene: Scene) -> SceneRequest:
    """`request`, which `scene` satisfies, with clauses in the order of the scene's objects if it has no relation."""
    if request.relations:
        return request
    return replace(request, clauses=tuple(sorted(request.clauses, key=lambda clause: _first(clause, scene))))


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
