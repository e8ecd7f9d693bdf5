"""Progress: a bar on a terminal, plain lines elsewhere; NO_COLOR is respected; control characters are removed."""

import re

import pytest
from hostile import TEXTS

from specbench.errors import SpecbenchError
from specbench.runs import progress_bar
from specbench.runs.progress_bar import ProgressReporter
from specbench.system import console


def test_off_a_terminal_progress_is_plain_lines(capsys, monkeypatch):
    monkeypatch.setattr(console, "LINE_EVERY_S", -1)
    reporter = ProgressReporter()
    reporter.start(total=3, done=1)
    reporter.row("shapes-ar-00000000", {"status": "ok"})
    reporter.row("shapes-ar-00000000", {"status": "failed"})
    reporter.finish()
    first, *lines, last = capsys.readouterr().err.splitlines()
    assert first == "1 of 3 images already done"
    assert lines[0].startswith("2/3 images, ") and lines[1].startswith("3/3 images, 1 failed, ")
    assert last.startswith("2 images in ")


def test_within_an_image_the_progress_moves_in_units_for_people(capsys, monkeypatch):
    now = [0.0]
    monkeypatch.setattr(progress_bar.time, "monotonic", lambda: now[0])
    reporter = ProgressReporter()
    reporter.part("warm-up steps of sjd (1 of 2)", 1, 32)
    now[0] = 40
    reporter.part("warm-up steps of sjd (1 of 2)", 5, 32)
    reporter.start(total=5000, done=0)
    now[0] += 180
    reporter.row("emu3-sjd-00000000", {"status": "ok"})
    for tokens in (900, 1800):
        now[0] += 20
        reporter.part("tokens", tokens, 8100, 1)
    reporter.stopping(None)
    reporter.stopping(20)
    *lines, at_once, in_time = capsys.readouterr().err.splitlines()
    assert "1800/8100 tokens" in at_once and "Ctrl-C again" in at_once and "longer than 20 s" in in_time
    assert lines == [
        "5/32 warm-up steps of sjd (1 of 2), 10 s each, 4 min left",
        "1/5000 images, 3 min each, 10 days left",
        "1/5000 images, 3 min each, 10 days left; 900/8100 tokens",
        "1/5000 images, 3 min each, 10 days left; 1800/8100 tokens, 45 a second, 2 min left",
    ]


def test_one_image_is_one_image_and_quick_work_is_not_mentioned_at_its_end(capsys):
    for quick_s in (0.0, 60.0):
        reporter = ProgressReporter(quick_s=quick_s)
        reporter.start(total=1, done=0)
        reporter.row("shapes-ar-00000000", {"status": "ok"})
        reporter.finish()
        assert ("1 image in " in capsys.readouterr().err) == (not quick_s)


@pytest.mark.parametrize("terminal", [True, False])
def test_messages_break_between_words_on_a_terminal_and_addresses_stay_whole(capsys, monkeypatch, terminal):
    monkeypatch.setenv("COLUMNS", "40")
    monkeypatch.setenv("TTY_COMPATIBLE", "1" if terminal else "0")
    monkeypatch.setenv("NO_COLOR", "1")
    address = "https://example.org/" + "a" * 60
    text = f"weights.pth is not on this disk (download {address} to the folder of weights)"
    console.warn(text)
    lines = capsys.readouterr().err.splitlines()
    assert " ".join(lines) == f"warning: {text}" and (len(lines) > 1) == terminal
    assert all(len(line) <= 40 for line in lines if address not in line) or not terminal


@pytest.mark.parametrize(
    ("variables", "coloured"), [({"FORCE_COLOR": "1"}, True), ({"NO_COLOR": "1"}, False), ({}, False)]
)
def test_colour_follows_the_usual_variables(capsys, monkeypatch, variables, coloured):
    for name in ("FORCE_COLOR", "NO_COLOR", "TTY_COMPATIBLE"):
        monkeypatch.delenv(name, raising=False)
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    console.show_error(SpecbenchError("wrong", "try this"))
    assert ("\x1b[" in capsys.readouterr().err) == coloured


@pytest.mark.parametrize("text", ["a\nb", "\x1b[31mred", "[red]not markup[/red]", "x" * 10_000, *TEXTS])
def test_an_error_is_one_harmless_line(capsys, text):
    console.show_error(SpecbenchError(text))
    err = capsys.readouterr().err
    assert len(err.splitlines()) == 1 and len(err) < 9000 and not re.search(r"[\x00-\x08\x0b-\x1f\x7f-\x9f\u202e]", err)
    if text.startswith("[red]"):
        assert "[red]not markup[/red]" in err
