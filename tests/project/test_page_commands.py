"""Every command of README and docs does what its page says: see `page_blocks` for the marks of the blocks. So does the
guide that is a notebook, in a fresh kernel."""

import json
import os
import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import typer
from forked import forked_command
from page_blocks import Block, blocks, missing_lines

from specbench.cli import build_app, main
from specbench.models.catalog import models
from specbench.specs.components import CHOICES
from specbench.specs.presets import PRESETS

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT / ".ci"))
import refresh_docs  # noqa: E402

PAGES = [page for page in refresh_docs.pages() if blocks(page)]
FIRST = "specbench run --decoder ar,sjd --window 16 --limit 8 --threads 1"
"""The first command of several pages, which is decoded once."""
OTHER_PROGRAMS = ("echo ", "cat ", "cp ", "ls ", "mkdir ")
LONG_PAGES = ("first-run.md", "my-decoder.md", "workers.md", "concepts.md", "decoders.md", "latex.md")
"""Pages whose blocks take more than a few seconds together."""
RUN = [pytest.param(page, ("run",), marks=[pytest.mark.slow] * (page.name in LONG_PAGES)) for page in PAGES]
RUN += [
    pytest.param(page, ("run", "run slow"), marks=pytest.mark.slow)
    for page in PAGES
    if any(block.mark == "run slow" for block in blocks(page))
]
"""Pages, and the marks of the blocks to run."""
by_page = pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)


def test_measured_statements_may_differ_and_tables_may_not():
    shown = ["- sjd ran 1.2 times as fast over", "  8 images; AR is not compiled.", "| ar | 8 |"]
    assert missing_lines(shown, "- AR was the fastest, on a busy machine.\n| ar | 9 |", "") == []
    assert missing_lines(shown, "- AR was the fastest.\n| sjd | 8 |", "") == shown[2:]


@by_page
def test_every_block_has_a_mark(page):
    assert [f"line {block.line}" for block in blocks(page) if block.mark is None] == []


@pytest.fixture(scope="module")
def decoded(tmp_path_factory, request) -> tuple[Path, tuple[int, str, str]]:
    """The results of `FIRST`, and what it printed."""
    folder = tmp_path_factory.mktemp("first")
    done = forked_command(FIRST.split()[1:], cwd=folder)
    return folder, (done.returncode, done.stdout, done.stderr)


@pytest.fixture
def typist(tmp_path, monkeypatch, capsys, decoded):
    """Types lines in a folder that has the examples of the guides."""
    shutil.copytree(ROOT / "docs" / "examples", tmp_path / "docs" / "examples")
    shutil.copy(ROOT / "docs" / "examples" / "power.py", tmp_path)
    for name in ("HF_HUB_OFFLINE", "SPECBENCH_OFFLINE"):
        monkeypatch.setenv(name, "1")
    monkeypatch.setenv("COLUMNS", "100")
    monkeypatch.setattr(sys, "path", [*sys.path])
    tables = {id(table): (table, dict(table)) for table in (PRESETS, models(), *CHOICES.values())}

    def type_line(line: str) -> tuple[int, str, str]:
        if line.startswith(OTHER_PROGRAMS):
            done = subprocess.run(["sh", "-c", line], capture_output=True, text=True, timeout=60)
            return done.returncode, done.stdout, done.stderr
        words = shlex.split(os.path.expandvars(line), comments=True)
        if words[0] == "cd":
            monkeypatch.chdir(words[1])
            return 0, "", ""
        if words[0] == "export":
            monkeypatch.setenv(*words[1].split("=", 1))
            return 0, "", ""
        assert words[0] == "specbench", f"a line that this test cannot type: {line}"
        if shlex.join(words) == FIRST and not Path("results").exists():
            shutil.copytree(decoded[0] / "results", "results")
            return decoded[1]
        with pytest.raises(SystemExit) as stopped:
            main(words[1:])
        return stopped.value.code or 0, *capsys.readouterr()

    monkeypatch.chdir(tmp_path)
    yield type_line
    for table, before in tables.values():  # without the decoders of the examples
        table.clear()
        table.update(before)
    for name in [name for name in sys.modules if name.partition(".")[0] in ("power", "toy_plugin")]:
        del sys.modules[name]


def run_block(block: Block, type_line) -> None:
    """Type a block; a line may name the exit code that it ends with."""
    folder = Path.cwd()
    if block.language == "python":
        exec(compile(block.text, f"line {block.line}", "exec"), {})
        return
    for line, shown in block.commands():
        code, out, err = type_line(line)
        assert code in {0, *map(int, re.findall(r"exit code (\d)", line))}, f"{line}\n{out}{err}"
        assert missing_lines(shown, out, err) == [], f"{line}\n{out}{err}"
    os.chdir(folder)


@pytest.mark.parametrize(("page", "marks"), RUN, ids=lambda value: getattr(value, "name", None))
def test_what_a_page_runs_works_and_prints_what_it_shows(page, marks, typist):
    for block in blocks(page):
        if block.mark in marks:
            run_block(block, typist)


@by_page
def test_what_cannot_run_here_parses_and_would_run(page, typist, monkeypatch):
    """Where there is a GPU, a network or a cluster: settings, names and values are right."""
    monkeypatch.setenv("SLURM_ARRAY_TASK_ID", "2")
    monkeypatch.setenv("SLURM_ARRAY_TASK_COUNT", "16")
    for block in blocks(page):
        for line, _ in block.commands() if block.language in ("sh", "bash", "console") else ():
            if block.mark in ("run", None) or not line.startswith("specbench ") or line == "specbench --version":
                continue
            names = parsed(line)
            if block.mark == "dry-run" and names[0] in ("run", "bench"):
                code, _, err = typist(re.sub(r" --dry-run\b|( #.*)$", "", line) + " --dry-run")
                assert code in (0, 5), f"{line}\n{err}"


def parsed(line: str) -> list[str]:
    """Names of a command line's (sub)command, after its arguments were parsed as they would be when typed."""
    command = typer.main.get_command(build_app())
    words, names, context = shlex.split(os.path.expandvars(line), comments=True)[1:], [], None
    while hasattr(command, "commands"):
        context = command.make_context("specbench", words[:0], parent=context, resilient_parsing=True)
        name, command, words = command.resolve_command(context, words)
        names.append(name)
    if command is not None:
        command.make_context(names[-1], words, parent=context)
    return names


NOTEBOOK = ROOT / "docs" / "notebook.ipynb"


def test_the_stored_notebook_has_an_output_wherever_a_cell_shows_something():
    cells = json.loads(NOTEBOOK.read_text())["cells"]
    code = [cell for cell in cells if cell["cell_type"] == "code"]
    assert [cell["execution_count"] for cell in code] == list(range(1, len(code) + 1))
    kinds = [output.get("output_type") for cell in code for output in cell["outputs"]]
    assert len(kinds) >= 6 and "error" not in kinds and "stream" not in kinds and NOTEBOOK.stat().st_size < 400_000


@pytest.mark.slow
def test_every_cell_runs_in_a_fresh_kernel(tmp_path):
    reason = "nbclient or ipykernel is missing: make test installs them"
    nbformat, nbclient = pytest.importorskip("nbformat", reason=reason), pytest.importorskip("nbclient", reason=reason)
    pytest.importorskip("ipykernel", reason=reason)
    notebook = nbformat.read(NOTEBOOK, as_version=4)
    nbclient.NotebookClient(notebook, timeout=600, resources={"metadata": {"path": str(tmp_path)}}).execute()
    shown = json.dumps([cell.get("outputs") for cell in notebook.cells], ensure_ascii=False).replace("\xa0", " ")
    assert "speed-up ↑" in shown and "no deviation seen" in shown and "image/png" in shown
