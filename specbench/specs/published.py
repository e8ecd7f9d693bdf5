"""Values that papers and their authors' code state for a decoder on a model: `published.toml`, each with its source."""

from __future__ import annotations

import functools
import tomllib
from pathlib import Path
from typing import Any, NamedTuple


class Published(NamedTuple):
    """A value and the paper or code that states it."""

    value: Any
    source: str


@functools.cache
def _entries() -> list[dict[str, Any]]:
    return tomllib.loads(Path(__file__).with_suffix(".toml").read_text(encoding="utf-8"))["entry"]


def published(decoder: str, model: str, kind: str = "options") -> dict[str, Published]:
    """Published values of a decoder on a model, by the name of the setting.

    Args:
        kind: "options", which a run takes by default (components among them), or "shared", which it does not.
    """
    here = [entry for entry in _entries() if decoder in entry["decoders"] and model in entry["models"]]
    return {name: Published(value, entry["source"]) for entry in here for name, value in entry.get(kind, {}).items()}
