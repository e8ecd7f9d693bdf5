"""Captions: conversion of words to a fixed-length row of ids, and to the `SceneRequest` that they mean.

Articles and similar words carry no meaning and take no slot; plurals are read as singulars. So the second object of "a
red circle left of a blue square" and of "a red circle and a blue square" is in the same slots. For a relation and its
opposite the network sees only one wording, which names objects in the picture's raster order.
"""

import re

from specbench.errors import SpecbenchError
from specbench.models.shapes.scene import COLORS, MAX_COUNT, OPPOSITE, RELATIONS, SHAPES, TEXTURES, Clause, SceneRequest

PREFIX = 16
COUNT_WORDS = {"two": 2, "three": 3, "four": 4}
PAD, IMAGE = "<pad>", "<image>"
VOCABULARY = (PAD, IMAGE, *SHAPES, *COLORS, *TEXTURES, *RELATIONS, *COUNT_WORDS, "and", "on")
WORD_ID = {word: index for index, word in enumerate(VOCABULARY)}
FILLERS = frozenset({"a", "an", "the", "of", "to", "is", "one", "background", "image", "picture"})
ALIASES = {"squares": "square", "circles": "circle", "triangles": "triangle", "crosses": "cross", ",": "and",
           "2": "two", "3": "three", "4": "four", "over": "above", "under": "below", "beneath": "below"}  # fmt: skip
RELATED = re.compile(rf"(?:and )?\b({'|'.join(RELATIONS)})\b")
PHRASES = {"left": "left of", "right": "right of", "above": "above", "below": "below"}


class CaptionError(SpecbenchError, ValueError):
    """A caption that contains unknown words, or that no scene can satisfy."""


def words(text: str) -> list[str]:
    """Return the meaningful words of a caption; a `CaptionError` names an unknown word."""
    kept: list[str] = []
    for raw in re.findall(r"[^\s,.;]+|,", text.lower()):
        word = ALIASES.get(raw, raw)
        if word in FILLERS:
            continue
        if word not in WORD_ID:
            vocabulary = ", ".join(w for w in VOCABULARY if not w.startswith("<"))
            raise CaptionError(f"unknown word {raw!r} in caption {text!r}", f"the words of shapes are: {vocabulary}")
        if word == "and" and kept[-1:] == ["and"]:
            continue
        kept.append(word)
    if not kept:
        raise CaptionError(f"caption {text!r} has no meaningful word")
    if len(kept) > PREFIX - 1:
        raise CaptionError(f"caption {text!r} has {len(kept)} meaningful words, at most {PREFIX - 1} fit")
    return kept


def encode(text: str) -> list[int]:
    """Word ids of a caption, padded to `PREFIX`; the last slot is always the start of the image."""
    ids = [WORD_ID[word] for word in in_normal_form(words(text))]
    return ids + [WORD_ID[PAD]] * (PREFIX - 1 - len(ids)) + [WORD_ID[IMAGE]]


def in_normal_form(caption: list[str]) -> list[str]:
    """Reorder a caption's words so that its objects are in reading order: objects left of or above the subject first.
    `b right a` becomes `a left b`, `b right a and above c` becomes `a left b above c`, and `b right a and below c`
    becomes `c above and a left b`, because the object above is read first. Words without relations, or with an
    unrelated object, stay unchanged."""
    end = next((i for i, word in enumerate(caption) if word == "on" or word in TEXTURES), len(caption))
    subject, *rest = (part.split() for part in RELATED.split(" ".join(caption[:end])))
    names, clauses = [name for (name,) in rest[::2]], rest[1::2]
    if any("and" in clause or not clause for clause in (subject, *clauses)):
        return caption
    related = list(zip(names, clauses, strict=True))
    earlier = [(clause, OPPOSITE[name]) for name, clause in related if name in ("right", "below")]
    later = [(name, clause) for name, clause in related if name in ("left", "above")]
    # raster order: objects above the subject, next to it, below it
    before = [[*clause, name] for clause, name in sorted(earlier, key=lambda pair: pair[1] != "above")]
    after = [[name, *clause] for name, clause in sorted(later, key=lambda pair: pair[0] != "left")]
    return [*_joined(before), *subject, *_joined(after), *caption[end:]]


def _joined(phrases: list[list[str]]) -> list[str]:
    return [word for i, phrase in enumerate(phrases) for word in (["and"] if i else []) + phrase]


def null_caption() -> list[int]:
    """Return the empty caption of the unconditional rows."""
    return [WORD_ID[PAD]] * (PREFIX - 1) + [WORD_ID[IMAGE]]


def caption(request: SceneRequest) -> str:
    """Return the canonical English wording of a request, in the order of its clauses."""
    names = [_name(clause) for clause in request.clauses]
    related = {j: PHRASES[name] for name, i, j in request.relations if i == 0}
    text = names[0]
    for j in range(1, len(names)):
        if j in related:
            text += f"{' and' if j > 1 else ''} {related[j]} {names[j]}"
        else:
            text += f"{' and' if j == len(names) - 1 else ','} {names[j]}"
    return text + (f" on a {request.texture} background" if request.texture else "")


def parse(text: str) -> SceneRequest:
    """Parse a caption to its request: objects joined by "and" or by a relation, whose subject comes first."""
    rest, texture = words(text), None
    if rest[-1] in TEXTURES:
        texture = rest.pop()
        if rest and rest[-1] == "on":
            rest.pop()
    clauses: list[Clause] = []
    relations = []
    while rest:
        if clauses:
            joined = rest[0] == "and" and bool(rest.pop(0))
            if rest and rest[0] in RELATIONS:
                relations.append((rest.pop(0), 0, len(clauses)))
            elif not joined:
                hint = "join objects by 'and' or a relation"
                raise CaptionError(f"cannot read {rest[0]!r} in caption {text!r}", hint)
        count = COUNT_WORDS[rest.pop(0)] if rest and rest[0] in COUNT_WORDS else 1
        color = rest.pop(0) if rest and rest[0] in COLORS else None
        if not rest or rest[0] not in SHAPES:
            raise CaptionError(f"cannot read caption {text!r}", f"name a shape: {', '.join(SHAPES)}")
        clauses.append(Clause(rest.pop(0), color, count))
    if not clauses:
        raise CaptionError(f"caption {text!r} names no object")
    if sum(c.count for c in clauses) > MAX_COUNT:
        raise CaptionError(f"caption {text!r} has more than {MAX_COUNT} objects")
    return SceneRequest(tuple(clauses), tuple(relations), texture)


def _name(clause: Clause) -> str:
    color = f"{clause.color} " if clause.color else ""
    if clause.count == 1:
        return f"a {color}{clause.shape}"
    number = next(word for word, value in COUNT_WORDS.items() if value == clause.count)
    return f"{number} {color}{clause.shape}{'es' if clause.shape == 'cross' else 's'}"
