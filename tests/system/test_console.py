"""Fitted tables: identifiers stay whole at any width, wide tables continue in panels that repeat the first column."""

import pytest
from rich.console import Console

from specbench.system.console import fitted, fitted_distinct, used_columns

HEADINGS = ("name", "hub id", "licence", "value")
ROWS = [
    ("lumina-1024", "Alpha-VLLM/Lumina-mGPT-7B-1024", "Chameleon research licence, non-commercial", "1.5"),
    ("emu3", "BAAI/Emu3-Gen-hf", "Apache-2.0", "22.25"),
]


@pytest.mark.parametrize("width", [45, 80, 120, 200])
def test_identifiers_stay_whole(width):
    console = Console(width=width, highlight=False)
    with console.capture() as text:
        console.print(fitted(HEADINGS, ROWS, width, right=[3]))
    lines = text.get().splitlines()
    assert max(map(len, lines)) <= width
    for row in ROWS:
        assert all(any(word in line for line in lines) for cell in row for word in cell.split())
    panels = sum(line.startswith("name") for line in lines)
    assert panels == sum(line.startswith("lumina-1024") for line in lines) and (panels == 1) == (width >= 80)


def test_a_further_panel_has_no_empty_rows():
    console = Console(width=30, highlight=False)
    with console.capture() as text:
        console.print(fitted(("name", "value", "fix"), [("a", "1", "-"), ("b", "2", "a-long-command-to-type")], 30))
    assert text.get().split() == ["name", "value", "a", "1", "b", "2", "name", "fix", "b", "a-long-command-to-type"]


def test_empty_and_constant_columns_say_nothing():
    rows = [("a", "-", "4", "1"), ("b", "-", "4", "2")]
    assert used_columns(rows, kept=[0]) == [0, 3]
    assert used_columns(rows, kept=[0, 2]) == [0, 2, 3]
    assert used_columns(rows[:1], kept=[]) == [0, 2, 3], "of one row nothing is constant"
    console = Console(width=60, highlight=False)
    with console.capture() as text:
        console.print(fitted_distinct(("name", "note", "images", "value"), rows, 60, kept=[0], right=[3]))
    shown = text.get()
    assert "In every row: images 4" in shown and "note" not in shown and shown.split()[:2] == ["name", "value"]


def test_the_first_column_does_not_wrap_where_all_columns_fit():
    name = "peak of cpu, bfloat16, 1 thread on this machine"
    console = Console(width=80, highlight=False)
    with console.capture() as text:
        console.print(fitted(("name", "status"), [(name, "ok"), ("python", "missing")], 80))
    assert name in text.get()
