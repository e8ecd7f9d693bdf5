"""Captions that are true of a scene, and false captions that differ from a true caption in one attribute."""

from dataclasses import replace

import numpy as np

from specbench.models.shapes.detector import Detection, judge
from specbench.models.shapes.scene import COLORS, MAX_COUNT, OPPOSITE, SHAPES, TEXTURES, Clause, Scene, SceneRequest

_TRIES = 20


def seen(scene: Scene) -> list[Detection]:
    """Detections of a perfect detector in a picture of a scene."""
    return [
        Detection(i.shape, i.color, i.x, i.y, (i.x - i.radius, i.y - i.radius, i.x + i.radius, i.y + i.radius), 1.0)
        for i in scene.items
    ]


def is_true(request: SceneRequest, scene: Scene, objects: list[Detection] | None = None) -> bool:
    """Whether a picture of `scene` satisfies `request`; `objects` is `seen(scene)` if it is already known."""
    if request.texture not in (None, scene.texture):
        return False
    return judge(request, seen(scene) if objects is None else objects).correct


def near_misses(request: SceneRequest, scene: Scene, count: int, rng: np.random.Generator) -> list[SceneRequest]:
    """Up to `count` different requests that are false of the scene and differ from a true request in one attribute; no
    request has a held-out meaning."""
    misses, objects = [], seen(scene)
    for _ in range(_TRIES):
        if len(misses) == count:
            break
        other = altered(request, rng)
        if other not in misses and not other.held_out() and not is_true(other, scene, objects):
            misses.append(other)
    return misses


def altered(request: SceneRequest, rng: np.random.Generator) -> SceneRequest:
    """A request with another color, shape, count, relation or texture, or with the colors of two objects exchanged."""
    clauses, single = request.clauses, len(request.clauses) == 1
    changes = [_reshape]
    if any(clause.color for clause in clauses):
        changes.append(_recolor)
    if single:
        changes.append(_recount)
    if len({clause.color for clause in clauses}) > 1:
        changes.append(_swap)
    if request.relations:
        changes += [_turn, _turn]
    if request.texture:
        changes.append(_retexture)
    return changes[rng.integers(len(changes))](request, rng)


def _other(names, current, rng: np.random.Generator):
    rest = [name for name in names if name != current]
    return rest[rng.integers(len(rest))]


def _with(request: SceneRequest, index: int, clause: Clause) -> SceneRequest:
    return replace(request, clauses=(*request.clauses[:index], clause, *request.clauses[index + 1 :]))


def _reshape(request: SceneRequest, rng: np.random.Generator) -> SceneRequest:
    index = int(rng.integers(len(request.clauses)))
    clause = request.clauses[index]
    return _with(request, index, replace(clause, shape=_other(SHAPES, clause.shape, rng)))


def _recolor(request: SceneRequest, rng: np.random.Generator) -> SceneRequest:
    index = _other([i for i, clause in enumerate(request.clauses) if clause.color], None, rng)
    clause = request.clauses[index]
    return _with(request, index, replace(clause, color=_other(COLORS, clause.color, rng)))


def _recount(request: SceneRequest, rng: np.random.Generator) -> SceneRequest:
    clause = request.clauses[0]
    return _with(request, 0, replace(clause, count=_other(range(1, MAX_COUNT + 1), clause.count, rng)))


def _swap(request: SceneRequest, rng: np.random.Generator) -> SceneRequest:
    first, second = rng.permutation(len(request.clauses))[:2]
    a, b = request.clauses[first], request.clauses[second]
    return _with(_with(request, first, replace(a, color=b.color)), second, replace(b, color=a.color))


def _turn(request: SceneRequest, rng: np.random.Generator) -> SceneRequest:
    index = int(rng.integers(len(request.relations)))
    name, i, j = request.relations[index]
    relations = list(request.relations)
    relations[index] = (OPPOSITE[name], i, j)
    return replace(request, relations=tuple(relations))


def _retexture(request: SceneRequest, rng: np.random.Generator) -> SceneRequest:
    return replace(request, texture=_other(TEXTURES, request.texture, rng))
