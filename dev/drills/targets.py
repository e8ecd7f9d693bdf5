"""Targets of the fuzzer: how a case of `cases.py` is written to a folder, and how specbench reads it."""

from __future__ import annotations

import contextlib
import io
import json
import shutil
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from unittest import mock

import cases
from examples import example_checkpoint, example_head, example_info, example_run
from hypothesis import strategies as st
from kills import specs

from specbench import api
from specbench.cli import main
from specbench.errors import SpecbenchError
from specbench.models.catalog import check_model, find_model, load_model
from specbench.models.draft_head import load_head
from specbench.models.draft_head_files import head_in
from specbench.papers import render as papers_render
from specbench.papers.join import join
from specbench.papers.listing import run_rows
from specbench.papers.reproduce import plan_table
from specbench.papers.table_files import read_table
from specbench.prompts import load_prompts
from specbench.reporting import FORMATS, render
from specbench.reporting.html import write_page
from specbench.reporting.run_card import card
from specbench.store.merge_shards import merge
from specbench.store.run_folders import find_runs
from specbench.store.run_store import RunStore
from specbench.store.schema import image_name


@dataclass(frozen=True)
class Target:
    """A kind of input: strategy of its cases, writer, reader, and its share of all cases."""

    name: str
    share: float
    cases: st.SearchStrategy
    prepare: Callable[[Path, object], None]
    call: Callable[[Path, object], object]


def _with_run(box: Path) -> Path:
    shutil.copytree(example_run(), box / "results")
    (folder,) = (box / "results").iterdir()
    return folder


NOTHING_HEAVY = {
    "specbench.checks.losslessness.audit_each": [],
    "specbench.checks.decoder_contract.check": [],
    "specbench.api.score": [],
    "specbench.api.score_folder": [],
}
"""Commands whose valid lines would run for minutes."""
ALWAYS = {
    **dict.fromkeys(("run", "bench"), ("--dry-run",)),
    "prompts fetch": ("--offline",),
    **dict.fromkeys(("demo", "train-head", "check-head"), ("--nope",)),
}
"""Flags that keep a valid line from decoding or using the network; an unknown flag where none exists."""


def _lay_out_line(box: Path, case) -> None:
    _with_run(box)
    (box / "prompts.txt").write_text("a red circle\n")
    (box / "settings.toml").write_text("seed = 3\n")


def _type_line(box: Path, case) -> None:
    command, arguments = case
    line = [*command.split(), *ALWAYS.get(command, ()), *arguments]
    out, err = io.StringIO(), io.StringIO()
    with contextlib.ExitStack() as stack:
        stack.enter_context(contextlib.chdir(box))
        for name, value in NOTHING_HEAVY.items():
            stack.enter_context(mock.patch(name, return_value=value))
        stack.enter_context(contextlib.redirect_stdout(out))
        stack.enter_context(contextlib.redirect_stderr(err))
        code = _exit_code(line)
    said = err.getvalue().splitlines()
    if code:
        errors = [text for text in said if text.startswith("error: ")]
        shown = "--nope" in line or "--help" in line or "-h" in line
        assert len(errors) == 1 or (shown and not errors) or not arguments, err.getvalue()
        assert "Traceback" not in err.getvalue()
        raise SpecbenchError(errors[0] if errors else "usage", exit_code=code)


def _exit_code(line: Sequence[str]) -> int:
    try:
        main(line)
    except SystemExit as stopped:
        return stopped.code or 0
    raise AssertionError("the command line did not exit")


def _write_prompts(box: Path, case) -> None:
    (box / f"prompts{case[0]}").write_bytes(case[1])


def _read_prompts(box: Path, case) -> None:
    found = load_prompts(box / f"prompts{case[0]}")
    assert len({prompt.id for prompt in found.prompts}) == len(found.prompts) > 0
    for prompt in found.prompts:
        assert (box / image_name(prompt.id, 0)).parent == box
        json.dumps(prompt.meta, allow_nan=True).encode()


def _write_table(box: Path, case: bytes) -> None:
    name = next((line for line in case.decode(errors="replace").splitlines() if line.startswith("name")), "")
    stem = "".join(filter(lambda c: c.isascii() and (c.isalnum() or c in "+-"), name.partition("=")[2])) or "x"
    (box / f"{stem[:100]}.toml").write_bytes(case)


def _read_table(box: Path, case) -> None:
    (path,) = box.iterdir()
    table = read_table(path)
    joined = join(table, {})
    for fmt in papers_render.FORMATS:
        papers_render.render([joined], fmt)
    plan_table(table, {"model": "shapes", "prompts": "shapes", "out": str(box / "results"), "limit": "1"}, env={})


def _write_part(box: Path, case) -> None:
    samples = _with_run(box) / "samples"
    for path in samples.iterdir():
        path.unlink()
    (samples / case[0]).write_bytes(case[1])


def _write_info(box: Path, case: bytes) -> None:
    (_with_run(box) / "run.json").write_bytes(case)


def _read_results(box: Path, case) -> None:
    """Read a results folder with every reader; write an HTML page only if all of them accept it."""
    out = box / "results"
    problems = [
        problem
        for read in (
            lambda folder: [render(api.report([str(folder)], str(out)), fmt) for fmt in FORMATS],
            lambda folder: RunStore(folder).completed(),
            lambda folder: RunStore(folder).check(specs()[1]),
            lambda folder: json.dumps(card(folder), default=str),
            lambda folder: merge([out], box / "merged"),
        )
        if (problem := _refusal(lambda read=read: read(find_runs(out)[0])))
    ]
    with contextlib.redirect_stderr(io.StringIO()):
        run_rows(out, lambda text: None)
    if problems:
        raise problems[0]
    write_page(find_runs(out), box / "page.html")


def _refusal(call: Callable) -> SpecbenchError | None:
    try:
        call()
    except SpecbenchError as error:
        return error
    return None


def _write_folder(example: Callable[[], Path]) -> Callable:
    def prepare(box: Path, case) -> None:
        shutil.copytree(example(), box / "files")
        (box / "files" / case[0]).write_bytes(case[1])

    return prepare


def _load_head(box: Path, case) -> None:
    load_head(head_in(box / "files"))


def _load_checkpoint(box: Path, case) -> None:
    info = find_model("simplear").configured(weights=str(box / "files"), tiny=True)
    check_model(info)
    load_model(info, "cpu", "float32")


def _folders(example: Callable[[], Path]) -> tuple[st.SearchStrategy, Callable]:
    return cases.damaged_folders(example), _write_folder(example)


TARGETS = (
    Target("command lines", 0.15, cases.command_lines(), _lay_out_line, _type_line),
    Target("prompt files", 0.35, cases.prompt_files(), _write_prompts, _read_prompts),
    Target("table files", 0.1, cases.tables(), _write_table, _read_table),
    Target("parquet parts", 0.05, cases.parts(), _write_part, _read_results),
    Target("run.json", 0.1, st.deferred(lambda: cases.json_bytes(example_info())), _write_info, _read_results),
    Target("draft heads", 0.15, *_folders(example_head), _load_head),
    Target("checkpoints", 0.1, *_folders(example_checkpoint), _load_checkpoint),
)
