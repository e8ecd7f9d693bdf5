"""T2I-CompBench++: 8 categories with 300 validation prompts each, one file per category."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path

from specbench.prompts.prompt_set import Prompt, text_id

COMPBENCH_CATEGORIES = ("color", "shape", "texture", "spatial", "3d_spatial", "numeracy", "non_spatial", "complex")
_NUMBERS = {"a": 1, "an": 1} | {
    word: number
    for number, word in enumerate(("one", "two", "three", "four", "five", "six", "seven", "eight", "nine", "ten"), 1)
}
_KINDS = ("spatial", "action", "spatialaction")


def read(folder: Path) -> list[Prompt]:
    """Read all categories in the order of `COMPBENCH_CATEGORIES`.

    `meta` has `line`, the prompt's number in its file; for complex prompts `kind`, one of `_KINDS`, which selects the
    parts of their score; for numeracy prompts `counts`, the requested number of each object.
    """
    return [prompt for category in COMPBENCH_CATEGORIES for prompt in _category(folder, category)]


def _category(folder: Path, category: str) -> list[Prompt]:
    kinds = _kinds(folder) if category == "complex" else {}
    names = _names(folder) if category == "numeracy" else {}
    return [
        Prompt(
            f"{category}-{text_id(text)}",
            text,
            category,
            {"line": line}
            | ({"kind": kinds[text]} if text in kinds else {})
            | ({"counts": counts(text, names)} if names else {}),
        )
        for line, text in enumerate(_lines(folder / f"{category}_val.txt"))
    ]


def _kinds(folder: Path) -> dict[str, str]:
    return {text: kind for kind in _KINDS for text in _lines(folder / f"complex_val_{kind}.txt")}


def counts(text: str, names: Mapping[str, str]) -> dict[str, int]:
    """Count the objects requested by a prompt; `names` maps each singular and plural noun to its singular."""
    words = "|".join(map(re.escape, sorted(names, key=len, reverse=True)))
    found: dict[str, int] = {}
    for number, word in re.findall(rf"\b({'|'.join(_NUMBERS)}) ({words})\b", text.lower()):
        found[names[word]] = found.get(names[word], 0) + _NUMBERS[number]
    return found


def _names(folder: Path) -> dict[str, str]:
    pairs = [line.split(" - ") for line in _lines(folder / "new_objects.txt")]
    return {word: singular for singular, plural in pairs for word in (singular, plural)}


def _lines(path: Path) -> list[str]:
    """Read the non-empty lines of a file, stripped (files have LF or CRLF line ends)."""
    lines = (line.strip() for line in path.read_text(encoding="utf-8").splitlines())
    return [line for line in lines if line]
