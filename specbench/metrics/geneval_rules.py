"""GenEval's rules (Ghosh et al. 2023) on detected objects: pure functions. An image is correct if every `include`
clause and no `exclude` clause holds. Counts are exact, because an `exclude` clause forbids an additional object."""

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

TAGS = ("single_object", "two_object", "counting", "colors", "position", "color_attr")
"""The six tags of the benchmark; its overall score is the mean over these tags."""
GENEVAL_COLORS = ("red", "orange", "yellow", "green", "blue", "purple", "pink", "brown", "black", "white")
THRESHOLD, COUNTING_THRESHOLD = 0.3, 0.9
MOST_OBJECTS = 16
_NEAR = 0.1


@dataclass(frozen=True)
class Found:
    """Detected object."""

    box: tuple[float, float, float, float]  # x1, y1, x2, y2 in pixels
    score: float  # confidence, 0 to 1
    color: Callable[[], str] = lambda: ""  # function that returns the colour's name


Objects = Mapping[str, Sequence[Found]]  # {class name: detected objects}


@dataclass(frozen=True)
class ImageVerdict:
    """Verdict on an image, with the reason if the image fails."""

    correct: bool
    reasons: tuple[str, ...]


def confident(objects: Objects, tag: str) -> dict[str, list[Found]]:
    """Keep at most 16 objects per class above a tag's threshold, best first."""
    threshold = COUNTING_THRESHOLD if tag == "counting" else THRESHOLD
    kept = {
        name: sorted((hit for hit in hits if hit.score > threshold), key=lambda hit: -hit.score)[:MOST_OBJECTS]
        for name, hits in objects.items()
    }
    return {name: hits for name, hits in kept.items() if hits}


def details(objects: Objects) -> str:
    """Format boxes and rounded scores as a JSON object, keyed by class name."""
    return json.dumps({name: [[*hit.box, round(hit.score, 4)] for hit in hits] for name, hits in objects.items()})


def relations(a: Found, b: Found) -> set[str]:
    """Return the position of `a` relative to `b`: some of "left of", "right of", "above", "below"; empty if close."""
    corners = np.array([a.box, b.box], dtype=np.float64).reshape(2, 2, 2)
    centres, sizes = corners.mean(axis=1), np.abs(corners[:, 1] - corners[:, 0])
    offset = centres[0] - centres[1]
    beyond = np.maximum(np.abs(offset) - _NEAR * sizes.sum(axis=0), 0) * np.sign(offset)
    if np.all(np.abs(beyond) < 1e-3):
        return set()
    across, down = beyond / np.linalg.norm(offset)
    names = {"left of": across < -0.5, "right of": across > 0.5, "above": down < -0.5, "below": down > 0.5}
    return {name for name, holds in names.items() if holds}


def judge_image(meta: Mapping[str, Any], objects: Objects) -> ImageVerdict:
    """Apply a prompt's clauses to the confident objects of an image."""
    reasons: list[str] = []
    matched: list[Sequence[Found] | None] = []
    for clause in meta.get("include", ()):
        hits = objects.get(clause["class"], ())
        reason = _include(clause, hits, matched)
        if reason:
            reasons.append(reason)
        matched.append(None if reason else hits[: clause["count"]])
    for clause in meta.get("exclude", ()):
        hits = objects.get(clause["class"], ())
        if len(hits) >= clause["count"]:
            reasons.append(f"expected {clause['class']}<{clause['count']}, found {len(hits)}")
    return ImageVerdict(not reasons, tuple(reasons))


def _include(clause: Mapping[str, Any], hits: Sequence[Found], matched: Sequence[Sequence[Found] | None]) -> str | None:
    """Return the reason why an `include` clause fails, or None. `matched`: objects of the previous clauses."""
    name, count = clause["class"], clause["count"]
    if len(hits) < count:
        return f"expected {name}>={count}, found {len(hits)}"
    used = hits[:count]
    if "color" in clause:
        colors = [hit.color() for hit in used]
        if colors.count(clause["color"]) < count:
            return f"expected {clause['color']} {name}>={count}, found {', '.join(colors)}"
    if "position" in clause:
        relation, index = clause["position"]
        others = matched[index]
        if others is None:
            return f"no target for {name} to be {relation}"
        if not all(relation in relations(hit, other) for hit in used for other in others):
            return f"expected {name} {relation} target"
    return None
