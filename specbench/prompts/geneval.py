"""GenEval prompts with the objects, counts, colours and positions required in their images."""

from __future__ import annotations

import json
from pathlib import Path

from specbench.prompts.prompt_set import Prompt, text_id

_FILE = "evaluation_metadata.jsonl"


def read(folder: Path) -> list[Prompt]:
    """Read the prompts in file order. `meta` has the official `include` and `exclude` clauses, and `line`, the number
    by which the official evaluator identifies the prompt."""
    lines = (folder / _FILE).read_text(encoding="utf-8").splitlines()
    return [_prompt(number, json.loads(line)) for number, line in enumerate(lines) if line.strip()]


def _prompt(line: int, row: dict) -> Prompt:
    clauses = {name: row[name] for name in ("include", "exclude") if name in row}
    return Prompt(f"{row['tag']}-{text_id(row['prompt'])}", row["prompt"], row["tag"], {"line": line} | clauses)


def official_row(category: str, text: str, meta: dict) -> dict:
    """Rebuild a prompt's line of the official metadata file, which the official evaluator reads beside the images."""
    clauses = {name: meta[name] for name in ("include", "exclude") if name in meta}
    return {"tag": category, **clauses, "prompt": text}
