"""Tables of texts: a mark is bold in every format; terminals keep identifiers whole, further panels repeat names; every
format has its writers and names. It concerns several modules: text_tables and table_formats."""

import pytest
from refusals import refused
from rich.console import Console

from specbench.errors import enumerated
from specbench.system.table_formats import FORMATS, format_name, formats_with, writer
from specbench.system.text_tables import (
    TextCell,
    distinct_columns,
    latex_table,
    markdown_table,
    plain_table,
    terminal_table,
)

HEADINGS = ("name", "hub id", "licence", "value")
ROWS = [
    ("lumina-1024", "Alpha-VLLM/Lumina-mGPT-7B-1024", "Chameleon research licence, non-commercial", "1.5"),
    ("emu3", "BAAI/Emu3-Gen-hf", "Apache-2.0", "22.25"),
]


def shown(table, width, left=(), **terminal) -> str:
    console = Console(width=width, highlight=False, **terminal)
    with console.capture() as text:
        console.print(terminal_table(table, width, left=left))
    return text.get()


@pytest.mark.parametrize("width", [45, 80, 120, 200])
def test_identifiers_stay_whole(width):
    lines = shown(plain_table(HEADINGS, ROWS), width, left=HEADINGS[:3]).splitlines()
    assert max(map(len, lines)) <= width
    for row in ROWS:
        assert all(any(word in line for line in lines) for cell in row for word in cell.split())
    panels = sum(line.startswith("name") for line in lines)
    assert panels == sum(line.startswith("lumina-1024") for line in lines) and (panels == 1) == (width >= 80)


def test_a_further_panel_has_no_empty_rows_and_the_first_column_does_not_wrap_if_all_fit():
    table = plain_table(("name", "value", "fix"), [("a", "1", "-"), ("b", "2", "a-long-command-to-type")])
    expected = ["name", "value", "a", "1", "b", "2", "name", "fix", "b", "a-long-command-to-type"]
    assert shown(table, 30).split() == expected
    name = "peak of cpu, bfloat16, 1 thread on this machine"
    assert name in shown(plain_table(("name", "status"), [(name, "ok"), ("python", "missing")]), 80)


def test_empty_and_constant_columns_say_nothing():
    headings, rows = ("name", "note", "images", "value"), [("a", "-", "4", "1"), ("b", "-", "4", "2")]
    table = plain_table(headings, rows)
    assert distinct_columns(table, kept=["name", "images"]).headings == ["name", "images", "value"]
    alone = distinct_columns(plain_table(headings, rows[:1]), kept=[])
    assert alone.headings == ["name", "images", "value"], "in a single row nothing is constant"
    assert not distinct_columns(plain_table(headings, []), kept=[]).rows
    text = shown(distinct_columns(table, kept=["name"]), 60)
    assert "In every row: images 4" in text and "note" not in text and text.split()[:2] == ["name", "value"]


def test_a_mark_of_a_cell_is_bold_in_every_format():
    table = plain_table(("run", "score"), [("a|b", TextCell("0.9", bold=True)), ("c", "0.8")], "Scores")
    assert table.marked and markdown_table(table).splitlines()[2:] == ["| a\\|b | **0.9** |", "| c | 0.8 |"]
    assert markdown_table(table, aligned=True).splitlines()[1:] == [
        "|------|---------|", "| a\\|b | **0.9** |", "| c    | 0.8     |",
    ]  # fmt: skip
    assert r"a\textbar{}b & \textbf{0.9} \\" in latex_table(table, "tab:x")
    text = shown(table, 40, force_terminal=True, color_system="standard")
    assert "\x1b[1m  0.9\x1b[0m" in text and text.startswith("Scores:")


@pytest.mark.parametrize("output", ["report", "tables", "comparison", "over"])
def test_each_named_writer_is_there(output):
    assert all(callable(writer(output, name)) for name in formats_with(output))


def test_a_format_is_one_of_those_that_the_output_has_and_no_two_share_an_ending():
    assert format_name("report", "csv") == "csv" and format_name("comparison", "TeX") == "latex"
    refused("unknown format 'csv' \\(valid: json, latex, markdown\\)", format_name, "comparison", "csv")
    assert enumerated(formats_with("over")) == "markdown, latex and json"
    assert enumerated(formats_with("columns"), "or") == "markdown or latex"
    endings = [ending for known in FORMATS.values() for ending in known.endings]
    assert len(set(endings)) == len(endings)
