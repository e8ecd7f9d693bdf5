"""Print dry runs: a table of settings and costs, then what brings missing weights and what stands in the way."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from itertools import count
from string import ascii_lowercase

from rich.text import Text

from specbench.cli.options import print_table
from specbench.runs.dry_run import ON_DISK
from specbench.system import console

_COLUMNS = (
    *("model", "decoder", "options", "guidance", "temperature", "top_k", "top_p", "prompts", "samples", "seed"),
    *("batch", "dtype", "device", "images", "done", "seconds", "megabytes", "memory_gib", "weights", "head"),
    "run_id",
)


def print_dry_run(rows: Sequence[Mapping], first: Sequence[str] = (), notes: Sequence[str] = ()) -> None:
    """Print rows of `specbench.runs.dry_run`.

    Args:
        first: columns before those of every dry run.
        notes: keys with lists of texts, printed below the table and as numbers in it; obstacles always are.
    """
    notes = (*notes, "obstacles")
    texts = {name: list(dict.fromkeys(text for row in rows for text in row[name])) for name in notes}
    marks = {name: dict(zip(found, _marks(name), strict=False)) for name, found in texts.items()}
    shown = [
        {
            **row,
            **{name: _short(row[name]) for name in ("seconds", "megabytes")},
            **{name: _place(row[name]) for name in ("weights", "head")},
            **{
                name: " ".join(marks[name][text] for text in texts[name] if text in row[name]) or None for name in notes
            },
        }
        for row in rows
    ]
    print_table(shown, (*first, *_COLUMNS, *notes))
    for found in marks.values():
        _print_lines([f"{mark}. {text}" for text, mark in found.items()])
    missing = dict.fromkeys((row["model"], row["weights"]) for row in rows if row["weights"] not in (None, ON_DISK))
    _print_lines([f"Weights of {model}: {brings}" for model, brings in missing])


def _print_lines(lines: Sequence[str]) -> None:
    """Print lines below an empty one, wrapped between words on a terminal."""
    if not lines:
        return
    print()
    for line in lines:
        if console.is_terminal():
            console.stdout().print(Text(console.one_line(line)))
        else:
            print(console.one_line(line))


def _marks(name: str) -> Iterable[str]:
    return ascii_lowercase if name == "obstacles" else map(str, count(1))


def _place(where: str | None) -> str | None:
    return where and ("yes" if where == ON_DISK else "no")


def _short(value: float | None) -> float | None:
    return None if value is None else round(value) if value >= 10 else float(f"{value:.2g}")
