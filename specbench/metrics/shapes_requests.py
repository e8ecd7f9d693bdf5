"""What a prompt of the embedded model asks for, from its `scene`: part of prompt files and results of anybody."""

from __future__ import annotations

from collections.abc import Mapping

from specbench.models.shapes.scene import COLORS, MAX_COUNT, RELATIONS, SHAPES, TEXTURES, SceneRequest


def read_request(meta: Mapping[str, object]) -> SceneRequest | None:
    """Parse the request under the key `scene` of a prompt's metadata; None where it is absent or malformed."""
    try:
        found = SceneRequest.from_json(meta["scene"])
        sound = _is_sound(found)
    except (LookupError, TypeError, ValueError, AttributeError, OverflowError):
        return None
    return found if sound else None


def _is_sound(request: SceneRequest) -> bool:
    clauses = request.clauses
    counts = [clause.count for clause in clauses]
    return (
        bool(clauses)
        and all(isinstance(count, int) and count >= 1 for count in counts)
        and sum(counts) <= MAX_COUNT
        and all(clause.shape in SHAPES and clause.color in (None, *COLORS) for clause in clauses)
        and all(name in RELATIONS and {i, j} <= set(range(len(clauses))) for name, i, j in request.relations)
        and request.texture in (None, *TEXTURES)
    )
