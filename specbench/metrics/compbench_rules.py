"""T2I-CompBench++'s rules (Huang et al. 2025): the words of prompts by spaCy's small English model, as in the paper's
programs, and scores of detected objects as pure functions, without images and networks.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import cached_property
from importlib.metadata import version
from itertools import pairwise
from types import MappingProxyType

from specbench.metrics.geneval_rules import Found

Box = tuple[float, float, float, float]
SPATIAL_RELATIONS = (
    "on side of",
    "next to",
    "near",
    "on the left of",
    "on the right of",
    "on the bottom of",
    "on the top of",
    "on top of",
)
"""Of 2D prompts, in the order they are looked for. The paper's program has no rule for the last one."""
DEPTH_SIGNS = {"in front of": 1, "behind": -1, "hidden": -1}
"""Of 3D prompts: the sign of how much nearer the first object must be than the second."""
REACH = 150 / 479
"""How far apart things beside each other may be, in short sides of the picture: 150 pixels at the paper's size."""
LITTLE = 0.1
"""Overlap up to which one thing still is left of another, for example."""
SAME = 0.9
"""Overlap or containment above which two boxes are one object."""
PREPOSITIONS = ("on top of", "on bottom of", "on the left", "on the right", "next to", "on side of", "near")
"""Of complex prompts, between whose nouns the 2D rule looks; not the relations above."""
THREE_IN_ONE: Mapping[str, tuple[str, ...]] = {
    "spatial": ("spatial", "blip"),
    "action": ("clip", "blip"),
    "spatialaction": ("spatial", "clip", "blip"),
}
"""What the score of a complex prompt is the mean of, by its kind."""
SPACY_MODEL = "en_core_web_sm"
SPACY_PACKAGES = MappingProxyType(
    {
        "spacy": "pip install spacy",
        SPACY_MODEL: f"python -m spacy download {SPACY_MODEL} (the paper's programs use its version 3.5.0)",
    }
)


class Grammar:
    """spaCy model, loaded on first use."""

    @cached_property
    def _parse(self):
        import spacy  # an extra

        return spacy.load(SPACY_MODEL)

    def noun_phrases(self, text: str) -> list[str]:
        return [chunk.text for chunk in self._parse(text).noun_chunks]

    def nouns(self, text: str) -> list[str]:
        return [token.text for token in self._parse(text) if token.pos_ == "NOUN"]

    def words(self, text: str) -> list[tuple[str, str]]:
        """Tag the words of a text with their parts of speech."""
        return [(token.text, token.pos_) for token in self._parse(text)]

    def without_adjectives(self, text: str) -> str:
        return " ".join(token.text for token in self._parse(text) if token.pos_ != "ADJ")


def spacy_versions() -> Mapping[str, str]:
    """Versions of spaCy and its model, for identities."""
    return {"phrases": f"{SPACY_MODEL} {version(SPACY_MODEL)}", "spacy": version("spacy")}


def relation(prompt: str, relations: Sequence[str] | Mapping[str, int]) -> str | None:
    """Find the first known relation that a prompt names."""
    return next((name for name in relations if name in prompt.lower()), None)


def around_preposition(words: Sequence[tuple[str, str]]) -> tuple[str, str] | None:
    """Find the two objects around the preposition of a complex prompt, given as (word, part of speech) pairs: the last
    noun or name before it and the first noun after it, or without one the last word of the first name that another word
    follows. None unless this finds two in all; the 2D score then is 0."""
    pair: list[str] = []
    for place in range(len(words)):
        phrases = {n: " ".join(word for word, _ in words[place : place + n]) for n in (3, 2, 1)}
        length = next((n for n, phrase in phrases.items() if phrase in PREPOSITIONS), 0)
        if not length:
            continue
        pair += [word for word, kind in reversed(words[:place]) if kind in ("NOUN", "PROPN")][:1]
        after = words[place + length :]
        ends = [word for (word, kind), (_, then) in pairwise(after) if kind == "PROPN" and then != "PROPN"]
        pair += ([word for word, kind in after if kind == "NOUN"] or ends)[:1]
    return (pair[0], pair[1]) if len(pair) == 2 else None


def spatial(first: Found | None, second: Found | None, asked: str | None, side: float) -> float:
    """2D spatial score of two objects, 0 to 1, from the best box of each: a quarter of each detection's score plus
    half the placement; 0 where that is below a half. `side` is the image's short side in pixels."""
    value = _mixed(first, second, lambda a, b: placed(a, b, asked, side))
    return value if value >= 0.5 else 0.0


def placed(a: Box, b: Box, asked: str | None, side: float) -> float:
    """Degree to which box a lies from box b as asked, 0 to 1."""
    (ax, ay), (bx, by) = _centre(a), _centre(b)
    across, down = ax - bx, ay - by
    if asked in ("on side of", "next to", "near"):
        apart = (abs(across), abs(down))
        return 1.0 if min(apart) < REACH * side else REACH * side / max(apart)
    lies = {
        "on the left of": across < 0 and abs(across) > abs(down),
        "on the right of": across > 0 and abs(across) > abs(down),
        "on the top of": down < 0 and abs(down) > abs(across),
        "on the bottom of": down > 0 and abs(down) > abs(across),
    }
    if not lies.get(asked or ""):
        return 0.0
    common = overlap(a, b)
    return 1.0 if common < LITTLE else LITTLE / common


def spatial_3d(first: Found | None, second: Found | None, asked: str | None, depth: Callable[[Box], float]) -> float:
    """3D spatial score, 0 to 1: half for the order in depth and the overlap; `depth` is larger for nearer boxes."""

    def behind_each_other(a: Box, b: Box) -> float:
        if asked is None or DEPTH_SIGNS[asked] * (depth(a) - depth(b)) <= 0:
            return 0.0
        return min(1.0, overlap(a, b) / 0.5)

    return _mixed(first, second, behind_each_other)


def _mixed(first: Found | None, second: Found | None, placed: Callable[[Box, Box], float]) -> float:
    seen = [detected for detected in (first, second) if detected is not None]
    value = 0.25 * sum(detected.score for detected in seen)
    return value + 0.5 * placed(first.box, second.box) if len(seen) == 2 else value


def numeracy(counts: Mapping[str, int], objects: Mapping[str, Sequence[Found]]) -> float:
    """Counting score, 0 to 1: mean over the objects asked for of half for presence and half for the right number."""
    scores = []
    for name, count in counts.items():
        alike = distinct(objects.get(name, ()), lambda a, b: max(overlap(a, b), contained(a, b)), SAME)
        scores.append(0.5 * bool(alike) + 0.5 * (len(alike) == count))
    return sum(scores) / len(scores)


def three_in_one(kind: str, parts: Mapping[str, float]) -> float:
    """Average an image's answers to the parts of a complex prompt."""
    needed = THREE_IN_ONE[kind]
    return sum(parts[part] for part in needed) / len(needed)


def distinct(detected: Sequence[Found], common: Callable[[Box, Box], float], limit: float) -> list[Found]:
    """Remove detections that share more than `limit` with a better one; the best come first."""
    kept: list[Found] = []
    for candidate in sorted(detected, key=lambda candidate: -candidate.score):
        if all(common(candidate.box, better.box) <= limit for better in kept):
            kept.append(candidate)
    return kept


def overlap(a: Box, b: Box) -> float:
    """Intersection over union of two boxes, 0 to 1."""
    common = _common(a, b)
    whole = _area(a) + _area(b) - common
    return common / whole if whole else 0.0


def contained(a: Box, b: Box) -> float:
    """Fraction of the smaller box that lies in the larger, 0 to 1."""
    smaller = min(_area(a), _area(b))
    return _common(a, b) / smaller if smaller else 0.0


def _common(a: Box, b: Box) -> float:
    return max(0.0, min(a[2], b[2]) - max(a[0], b[0])) * max(0.0, min(a[3], b[3]) - max(a[1], b[1]))


def _area(box: Box) -> float:
    return (box[2] - box[0]) * (box[3] - box[1])


def _centre(box: Box) -> tuple[float, float]:
    return (box[0] + box[2]) / 2, (box[1] + box[3]) / 2
