"""Markdown of the generated blocks: cells, tables, links."""

import os
from collections.abc import Iterable, Sequence
from pathlib import Path

ROOT = Path(__file__).parent.parent


def escape(text: str) -> str:
    return " ".join(text.split()).replace("|", "\\|")


def link(page: Path, target: Path) -> str:
    return Path(os.path.relpath(target, page.parent)).as_posix()


def as_table(header: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    return "\n".join(f"| {' | '.join(cells)} |" for cells in (header, ["---"] * len(header), *rows))
