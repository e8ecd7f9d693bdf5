"""Values as strict JSON: without NaN, infinity and repeated keys, and with limited nesting."""

import json
import math
from collections.abc import Callable, Iterable, Mapping
from enum import StrEnum
from typing import Any

MAX_DEPTH = 64  # Levels of nesting; many JSON writers, also Python's, fail at a thousand


class Word(StrEnum):
    """A word of a fixed list that prints as plain text, also within rows of the Python API."""

    __repr__ = str.__repr__


def parse_json(text: str | bytes) -> Any:
    """Parse untrusted JSON. Raise a ValueError for invalid JSON, repeated keys, or nesting above `MAX_DEPTH`."""
    try:
        text = text if isinstance(text, str) else text.decode(json.detect_encoding(text), "surrogatepass")
        value = _DECODER.decode(text)
    except RecursionError:
        raise ValueError(f"nested more than {MAX_DEPTH} deep") from None
    level = [value] if isinstance(value, dict | list) else []
    for _ in range(MAX_DEPTH):
        parts = (item.values() if item.__class__ is dict else item for item in level)
        level = [item for inner in parts for item in inner if item.__class__ in (dict, list)]  # JSON's containers
        if not level:
            return value
    raise ValueError(f"nested more than {MAX_DEPTH} deep")


def json_text(rows: Iterable[Mapping[str, object]]) -> str:
    """Format rows as one JSON array. Missing and non-finite numbers become null, values of other types become text."""
    return json.dumps(nonfinite_as_null(list(rows)), indent=2, ensure_ascii=False, allow_nan=False, default=str) + "\n"


def _without_repeats(pairs: list[tuple[str, object]]) -> dict[str, object]:
    if len(content := dict(pairs)) < len(pairs):
        names = [name for name, _ in pairs]
        raise ValueError(f"key '{next(name for name in names if names.count(name) > 1)[:40]}' is repeated")
    return content


_DECODER = json.JSONDecoder(object_pairs_hook=_without_repeats)
"""Shared decoder, because `json.loads` makes a decoder per text, which takes longer than parsing a short text."""


def nonfinite_as_null(value: object) -> object:
    """Replace NaN and infinity in nested `value` by None, for output whose readers treat both as missing."""
    return _replace(value, lambda number: None)


def nonfinite_as_text(value: object) -> Any:
    """Replace NaN and infinity in nested `value` by "nan" and "inf", for settings that must be read back exactly."""
    return _replace(value, str)


def _replace(value: object, nonfinite: Callable[[float], object]) -> object:
    if isinstance(value, Mapping):
        return {key: _replace(item, nonfinite) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_replace(item, nonfinite) for item in value]
    if isinstance(value, float) and not math.isfinite(value):
        return nonfinite(value)
    return value
