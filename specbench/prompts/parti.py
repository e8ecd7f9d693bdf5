"""PartiPrompts: a tab-separated file; quotes are part of the prompts."""

from __future__ import annotations

import csv
from pathlib import Path

from specbench.prompts.prompt_set import Prompt, text_id


def read(folder: Path) -> list[Prompt]:
    """Read the prompts in file order, as published; challenge and note become metadata."""
    with (folder / "PartiPrompts.tsv").open(encoding="utf-8", newline="") as file:
        rows = list(csv.DictReader(file, delimiter="\t", quoting=csv.QUOTE_NONE))
    return [
        Prompt(
            text_id(row["Prompt"]),
            row["Prompt"],
            row["Category"],
            {"challenge": row["Challenge"]} | ({"note": row["Note"]} if row["Note"] else {}),
        )
        for row in rows
    ]
