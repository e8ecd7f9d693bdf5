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
def _read() -> dict[str, list[dict[str, Any]]]:
    return tomllib.loads(Path(__file__).with_suffix(".toml").read_text(encoding="utf-8"))


def published(decoder: str, model: str, kind: str = "options") -> dict[str, Published]:
    """Published values of a decoder on a model, by the name of the setting.

    Args:
        kind: "options", which a run takes by default (components among them), or "shared", which it does not.
    """
    here = [entry for entry in _read()["entry"] if decoder in entry["decoders"] and model in entry["models"]]
    return {name: Published(value, entry["source"]) for entry in here for name, value in entry.get(kind, {}).items()}


def printed_acceptances(head: str) -> list[tuple[float, str, str]]:
    """Tokens per step, model and source of what papers print for exact decoders with a kind of draft head ("eagle", or
    "vertical" for heads in two dimensions)."""
    found = [entry for entry in _read()["acceptance"] if entry["head"] == head]
    return [(entry["tokens_per_step"], entry["model"], entry["source"]) for entry in found]
