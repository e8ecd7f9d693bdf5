"""Every command of README and docs does what its page says: see `page_blocks` for the marks of the blocks."""

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
SLOW_PAGES = [page for page in PAGES if any(block.mark == "run slow" for block in blocks(page))]
LONG_PAGES = ("first-run.md", "my-decoder.md", "workers.md", "concepts.md", "decoders.md", "latex.md")
"""Pages whose blocks take more than a few seconds together."""
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


@pytest.mark.parametrize(
    "page",
    [pytest.param(page, marks=pytest.mark.slow) if page.name in LONG_PAGES else page for page in PAGES],
    ids=lambda page: page.name,
)
def test_what_a_page_runs_works_and_prints_what_it_shows(page, typist):
    for block in blocks(page):
        if block.mark == "run":
            run_block(block, typist)


@pytest.mark.slow
@pytest.mark.parametrize("page", SLOW_PAGES, ids=lambda page: page.name)
def test_what_takes_minutes_works_too(page, typist):
    for block in blocks(page):
        if block.mark.startswith("run"):
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
