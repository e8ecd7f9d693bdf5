"""Values as strict JSON, which has no NaN and no infinity."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping


def nonfinite_as_null(value: object) -> object:
    """Replace NaN and infinity in nested `value` by None, for output whose readers treat both as missing."""
    return _replace(value, lambda number: None)


def nonfinite_as_text(value: object) -> object:
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
