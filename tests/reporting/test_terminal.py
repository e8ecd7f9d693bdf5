"""The report on terminals of several widths: nothing wider than the terminal, no identifier broken."""

from dataclasses import replace

import pytest
import synthetic
from rich.console import Console
from synthetic import AR, SJD, folder

from specbench.reporting import report_rows
from specbench.reporting.row import ShownScore
from specbench.reporting.terminal import report_view
from specbench.store.run_folders import find_runs


def shown(rows, width: int, **options) -> str:
    console = Console(width=width, highlight=False)
    with console.capture() as text:
        console.print(report_view(rows, width, **options))
    return text.get()


@pytest.fixture
def rows(tmp_path) -> list[dict]:
    folder(tmp_path, AR, synthetic.ar(4))
    folder(tmp_path, SJD, [*synthetic.sjd(3), synthetic.generation(2, 8000.0)])
    return report_rows(find_runs(tmp_path))


@pytest.mark.parametrize("width", [40, 80, 200])
def test_it_fits_and_breaks_no_word(rows, width):
    text = shown(rows, width)
    assert max(map(len, text.splitlines())) <= width
    assert "lossless" in text and "x [too few]" in text and "| ---" not in text
    text = " ".join(text.split())
    assert "Too few: below 8 prompts, no interval" in text and "images 4" in text.split("In every row:")[1]
    assert "1 of 4 images stalled: the slowest took 8.00 s" in text and "median" in text
    assert "NFE:" not in text and "NFE: target forwards" in shown(rows, 120, explain=True)


def test_chosen_columns_bring_the_notes_of_their_own_scores(rows):
    stored = {"fingerprint": "f", "value": 0.5, "low": 0.4, "high": 0.6, "n": 8}
    names = ("mine", "mine:cups", "mine2")
    scores = [ShownScore.of({**stored, "metric": name, "note": f"of {name}"}) for name in names]
    scored = [replace(row, scores=scores) for row in rows]
    for column, score in zip(("mine", "cups", "mine2"), scores, strict=True):
        text = shown(scored, 200, columns=(column,))
        assert [other.note for other in scores if f"{other.note}." in text] == [score.note]


def test_chosen_columns_also_fit_and_appear_once(rows):
    text = shown(rows, 60, columns=("nfe", "speed-up", "steps", "nfe", "tokens per step"))
    assert max(map(len, text.splitlines())) <= 60 and "| ---" not in text
    assert text.count("NFE") == 1 and "latency s" not in text


def test_report_show_and_compare_say_which_prompts_were_drawn(tmp_path, monkeypatch, cli):
    drawn = "3 of 318: random sample of 3 (seed 0)"
    monkeypatch.setitem(synthetic.INVOCATION, "drawn", drawn)
    runs = [folder(tmp_path, AR, synthetic.ar()), folder(tmp_path, SJD, synthetic.sjd())]
    for command in (("report", "--out", tmp_path), ("show", runs[0]), ("compare", *runs)):
        assert drawn in cli(*command).out, command[0]
