"""`make release-matrix`: a failed step is a row and the exit code, newer rows take the place of older ones."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


@pytest.fixture
def program(monkeypatch):
    monkeypatch.syspath_prepend(ROOT / "dev" / "release")
    import matrix

    return matrix


def test_every_extra_is_tried_by_an_import(program):
    assert program.extras_of(ROOT) == list(program.EXTRAS)
    assert not [path for path in program.SELECTION if not (ROOT / path).exists()]


def test_a_step_that_fails_hangs_or_does_not_exist_is_a_row(program, tmp_path, monkeypatch):
    monkeypatch.setattr(program, "SECONDS", 1)
    monkeypatch.setenv("PYTHONPATH", "/elsewhere")
    found = program.Matrix("3.99.0")
    script = "import os; print('said'); raise SystemExit('PYTHONPATH' in os.environ)"
    assert found.step("works, without the caller's PYTHONPATH", [sys.executable, "-c", script], tmp_path)
    assert not found.step("fails", [sys.executable, "-c", "raise SystemExit('why')"], tmp_path)
    assert not found.step("hangs", [sys.executable, "-c", "import time; time.sleep(60)"], tmp_path)
    assert not found.step("absent", [tmp_path / "no-such-program"], tmp_path)
    assert [row["passed"] for row in found.rows] == [True, False, False, False]
    assert [row["last_line"] for row in found.rows[:2]] == ["said", "why"]


def test_rows_replace_those_of_the_same_python_and_step(program, tmp_path):
    path = tmp_path / "release" / "matrix.json"
    first = [{"python": "3.1", "step": name, "passed": False} for name in ("a", "b")]
    program.keep(path, first, {"git": "old"})
    program.keep(path, [first[1] | {"passed": True}, {**first[0], "python": "3.2"}], {"git": "new"})
    rows = json.loads(path.read_text())["rows"]
    assert [(row["python"], row["step"], row["passed"], row["git"]) for row in rows] == [
        ("3.1", "a", False, "old"),
        ("3.1", "b", True, "new"),
        ("3.2", "a", False, "new"),
    ]


def test_the_exit_code_says_that_a_step_failed(program, tmp_path, monkeypatch, capsys):
    asked = ["matrix.py", "--python", sys.executable, "--out", str(tmp_path / "matrix.json")]
    monkeypatch.setattr(sys, "argv", asked)
    monkeypatch.setattr(program, "try_checkout", lambda matrix, *_: matrix.step("x", ["false"], tmp_path))
    if not (ROOT / ".git").exists():
        pytest.skip("not a checkout")
    assert program.main() == 1
    assert "failed: 3." in capsys.readouterr().out
    assert [row["passed"] for row in json.loads((tmp_path / "matrix.json").read_text())["rows"]] == [False]
    monkeypatch.setattr(program, "try_checkout", lambda matrix, *_: matrix.step("x", ["true"], tmp_path))
    assert program.main() == 0


def test_the_lowest_versions_are_those_of_the_declared_dependencies(program, tmp_path, monkeypatch):
    lowest = program.lowest_of(ROOT)
    assert lowest["transformers"] == "5.0" and lowest["torch"] == "2.8" and len(lowest) > 10
    found = []
    monkeypatch.setattr(program.Matrix, "step", lambda self, name, command, folder: not found.append((name, command)))
    monkeypatch.setattr(program, "fit_torchvision", lambda *_: None)
    program.try_lowest(program.Matrix("3.99.0"), sys.executable, tmp_path, ROOT, "2")
    steps = dict(found)
    assert "transformers==5.0\n" in (tmp_path / "lowest.txt").read_text()
    assert tmp_path / "lowest.txt" in steps["lowest: pip install"] and ROOT in steps["lowest: pip install"]
    assert "tests/models" in steps["lowest: tests of models"]
    assert not [
        path for path in program.LOWEST_TESTS if not (ROOT / path.rpartition("=")[2].partition("::")[0]).exists()
    ]
