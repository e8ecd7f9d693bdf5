"""T2I-CompBench++: 300 validation prompts in each of eight categories, one file a category."""

from __future__ import annotations

from pathlib import Path

from specbench.prompts import Prompt, text_id

CATEGORIES = ("color", "shape", "texture", "spatial", "3d_spatial", "numeracy", "non_spatial", "complex")
KINDS = ("spatial", "action", "spatialaction")


def read(folder: Path) -> list[Prompt]:
    """All categories in the order of `CATEGORIES`. `meta` has `line`, the prompt's number in its file, and for
    complex prompts `kind`, one of `KINDS`, which decides what their score is made of."""
    return [prompt for category in CATEGORIES for prompt in _category(folder, category)]


def _category(folder: Path, category: str) -> list[Prompt]:
    kinds = _kinds(folder) if category == "complex" else {}
    return [
        Prompt(
            f"{category}-{text_id(text)}",
            text,
            category,
            {"line": line} | ({"kind": kinds[text]} if text in kinds else {}),
        )
        for line, text in enumerate(_lines(folder / f"{category}_val.txt"))
    ]


def _kinds(folder: Path) -> dict[str, str]:
    return {text: kind for kind in KINDS for text in _lines(folder / f"complex_val_{kind}.txt")}


def _lines(path: Path) -> list[str]:
    """Lines without their ends, of which the files have both kinds, and without white space around them."""
    lines = (line.strip() for line in path.read_text(encoding="utf-8").splitlines())
    return [line for line in lines if line]
