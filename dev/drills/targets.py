"""Targets of the fuzzer: how a case of `cases.py` is written to a folder, and how specbench reads it."""

import contextlib
import io
import json
import os
import shutil
import stat
import sys
import types
import unicodedata
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from unittest import mock

import cases
import matplotlib.pyplot  # noqa: F401 - its first import creates a folder, which is not a finding
import pyarrow as pa
from examples import (
    TABLES,
    example_checkpoint,
    example_head,
    example_info,
    example_pack,
    example_run,
    example_stranger,
    judged,
    small_run,
)
from hub_drill import answers, download_from, hub
from hypothesis import strategies as st
from kills import specs

from specbench.cli import main
from specbench.errors import BAD_INPUT, GATE, PARTIAL, SpecbenchError
from specbench.metrics import scoring
from specbench.metrics.base import PerImageMetric
from specbench.metrics.official_exchange import export_images, import_scores
from specbench.metrics.reference import read_statistics
from specbench.models.catalog import check_model, find_model, load_model
from specbench.models.draft_head import load_head
from specbench.models.draft_head_files import head_in
from specbench.models.facts import ModelChoice
from specbench.papers import render as papers_render
from specbench.papers.join import join
from specbench.papers.listing import run_rows
from specbench.papers.planned_cells import plan_table
from specbench.papers.table_files import read_table
from specbench.prompts import Prompt, load_prompts
from specbench.reporting import render, report_rows
from specbench.reporting.html import write_page
from specbench.reporting.picture_figures import find_grid
from specbench.reporting.status import status, status_line
from specbench.reporting.terminal import card
from specbench.store.merge_shards import merge_runs
from specbench.store.run_folders import find_runs
from specbench.store.run_store import RunStore
from specbench.store.schema import image_name
from specbench.system.table_formats import FORMATS, formats_with


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


def _not_audited(name: str, *_) -> dict[str, object]:
    """A row of `audit` that finds a decoder lossless."""
    columns = ("tv", "tv_low", "tv_high", "samples", "p_value", "detectable_tv", "weakest_tv", "alone_differ", "models")
    row = dict.fromkeys(columns, 0) | {"verdict": "lossless", "declared": "lossless", "refused": {}}
    return row | {"decoder": name}


NOTHING_HEAVY = {
    "os.cpu_count": lambda: 1,  # processes of an audit exchange their own pickles
    "specbench.checks.losslessness.audit_one": _not_audited,
    "specbench.checks.decoder_contract.check_decoder": lambda *_: [],
    "specbench.metrics.scoring.score": lambda *_, **__: scoring.Scoring([], []),
}
"""Commands whose valid lines would run for minutes."""
ALWAYS = {
    **dict.fromkeys(("run", "bench"), ("--dry-run",)),
    **dict.fromkeys(("demo", "train-head", "check-head"), ("--nope",)),
}
"""By command, a flag that prevents decoding and downloads by a valid line; an unknown flag if no such flag exists."""


def _lay_out_line(box: Path, case) -> None:
    _with_run(box)
    (box / "prompts.txt").write_text("a red circle\n")
    (box / "settings.toml").write_text("seed = 3\n")


def _type_line(box: Path, case) -> None:
    command, arguments = case
    line = [*command.split(), *ALWAYS.get(command, ()), *arguments]
    out, err = io.TextIOWrapper(io.BytesIO(), "utf-8", errors="surrogateescape"), io.StringIO()
    with contextlib.ExitStack() as stack:
        stack.enter_context(contextlib.chdir(box))
        for name, value in NOTHING_HEAVY.items():
            stack.enter_context(mock.patch(name, value))
        stack.enter_context(contextlib.redirect_stdout(out))
        stack.enter_context(contextlib.redirect_stderr(err))
        code = _exit_code(line)
    lines = err.getvalue().splitlines()
    if code:
        errors = [text for text in lines if text.startswith("error: ")]
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
    prompts = load_prompts(box / f"prompts{case[0]}")
    assert len({prompt.id for prompt in prompts.prompts}) == len(prompts.prompts) > 0
    for prompt in prompts.prompts:
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
    for fmt in formats_with("tables"):
        papers_render.render_tables([joined], fmt)
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
            lambda folder: [render(report_rows([folder]), fmt) for fmt in FORMATS],
            lambda folder: RunStore(folder).completed(),
            lambda folder: RunStore(folder).check(specs()[1]),
            lambda folder: json.dumps(card(folder), default=str),
            lambda folder: json.dumps([status_line(row) for row in status(out)]),
            lambda folder: merge_runs([out], box / "merged"),
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


def _load_checkpoint(model: str = "simplear", **choice: bool) -> Callable:
    def load(box: Path, case) -> None:
        info = find_model(model).configured(ModelChoice(weights=str(box / "files"), tiny=True, **choice))
        check_model(info)
        load_model(info, "cpu", "float32")

    return load


def _folders(example: Callable[[], Path]) -> tuple[st.SearchStrategy, Callable]:
    return cases.damaged_folders(example), _write_folder(example)


def _lay_out_stranger(box: Path, case) -> None:
    (box.parent / "box" / "results").parent.mkdir(exist_ok=True)
    shutil.copytree(example_stranger(), box / "results")
    (box / "secret").write_bytes(cases.SECRET)
    (folder,) = (box / "results").iterdir()
    for change in case:
        cases.change(folder, *change, box / "secret")


def _use_stranger(box: Path, case) -> None:
    """Read, merge, export and score a stranger's results, and make a page if no image was refused; no output may
    contain the secret."""
    out, (folder,) = box / "results", (box / "results").iterdir()
    problems = [
        problem
        for use in (
            lambda: [render(report_rows([folder]), fmt) for fmt in FORMATS],
            lambda: find_grid({"stranger": folder}, "pictures"),
            lambda: merge_runs([out], box / "merged"),
            lambda: export_images("geneval", folder, box / "official"),
            lambda: scoring.score([folder], ["shapes-detector"]).check(),
            lambda: json.dumps(card(folder), default=str),
        )
        if (problem := _refusal(use))
    ]
    if not problems:
        write_page([folder], box / "page.html")
    assert (box / "secret").read_bytes() == cases.SECRET
    for path in box.rglob("*"):
        if path.is_file() and not path.is_symlink() and path != box / "secret":
            assert cases.SECRET not in path.read_bytes(), path
    for problem in problems:
        assert "\n" not in problem.what
    if problems:
        raise SpecbenchError(problems[0].what, exit_code=BAD_INPUT)


def _score_by_stranger(box: Path, case) -> None:
    """Score with a metric of which some parts come from a stranger; the written scores must stay readable."""

    def part(value):
        def call(*_, **__):
            if isinstance(value, type):
                raise value
            return value

        return call

    body = {name: value if name in ("name", "batch", "columns") else part(value) for name, value in case.items()}
    sound = {"name": "strange", "identity": lambda _: {}, "features": lambda _, all: [{"value": 1.0} for _ in all]}
    module = sys.modules.setdefault("strange", types.ModuleType("strange"))
    module.METRIC = type("Strange", (PerImageMetric,), {"__module__": "strange", **sound, **body})
    (folder,) = (box / "results").iterdir()
    try:
        scoring.score([folder], ["strange:METRIC"]).check()
    except SpecbenchError as error:
        assert "\n" not in error.what
        raise SpecbenchError(error.what, exit_code=BAD_INPUT) from error
    finally:
        report_rows([folder])


def _lay_out_export(box: Path, case) -> None:
    prompts = [Prompt(row["id"], row["text"] or "x", row["category"], {"line": row["line"], "include": []})
               for row in case]  # fmt: skip
    small_run(box / "results", prompts)
    names = {unicodedata.normalize("NFC", path.name).casefold() for path in box.glob("results/*/images/*")}
    assert len(names) == len(case), "pictures of two prompts have the same name on some file systems"


def _export(box: Path, case) -> None:
    (folder,) = (box / "results").iterdir()
    problems = []
    for benchmark in ("geneval", "t2i-compbench"):
        target = box / benchmark
        if problem := _refusal(lambda b=benchmark, t=target: export_images(b, folder, t)):
            problems.append(problem)
            assert not target.exists()
        else:
            assert len(list(target.rglob("*.png"))) == len(case) or benchmark == "t2i-compbench"
        assert not list(box.glob(".*"))
    if problems:
        raise problems[0]


def _lay_out_doors(box: Path, case) -> None:
    _, flips, _, name = case
    shutil.copytree(example_stranger(), box / name)
    shutil.copy(example_pack(), box / "runs.zip")
    (box / "table.toml").write_text(TABLES[0].replace(TABLES[0].splitlines()[0], 'name = "table"', 1))
    files = sorted(path for path in box.rglob("*") if path.is_file() and path.stat().st_size)
    for number, place, bit in flips:
        data = bytearray((path := files[number % len(files)]).read_bytes())
        data[place % len(data)] ^= 1 << bit
        path.write_bytes(data)
    for link, to in {"link": "linked", "dangling": "nowhere", "circle": "circle"}.items():
        (box / link).symlink_to(to)
    (box / "linked").write_text("old")
    (box / "folder").mkdir()
    with contextlib.suppress(PermissionError):  # never links to the machine's own files, which root could replace
        os.mknod(box / "device", 0o666 | stat.S_IFCHR, os.makedev(1, 3))


def _open_door(box: Path, case) -> None:
    """Run a line; links and devices must still exist, and no message may advise to delete undamaged files."""
    line, flips, to, out = case
    run = next((box / out).iterdir()).name
    words = {"TO": to, "RUN": run, "ZIP": "runs.zip", "OUT": out}
    typed = [words.get(word, word) for word in line.split()]
    if typed[0] in (
        "status",
        "show",
        "report",
        "pack",
        "export",
        "list",
        "compare",
        "score",
        "audit",
        "bench",
        "run",
        "merge",
    ):
        typed += ["--out", out]
    try:
        with mock.patch("tempfile.tempdir", str(box)):
            _type_line(box, (typed[0], typed[1:]))
    except SpecbenchError as error:
        assert flips or not any(word in error.what for word in ("damaged", "delete")), error
        if error.exit_code in (PARTIAL, GATE) or "cannot write" in error.what:
            raise SpecbenchError(error.what) from error
        raise
    finally:
        assert all((box / link).is_symlink() for link in ("link", "dangling", "circle"))
        assert not (box / "device").is_file()


def _read_pack(box: Path, case) -> None:
    """Verify and report a packed file; no refusal may mention a bug, and nothing may be unpacked outside the cache."""
    problems = []
    with mock.patch("tempfile.tempdir", str(box)):
        for line in (["verify", "runs.zip"], ["report", "runs.zip"], ["status", "runs.zip"]):
            try:
                _type_line(box, (line[0], line[1:]))
            except SpecbenchError as error:
                assert "a bug" not in error.what, error
                problems.append(error.what)
    if problems:
        raise SpecbenchError(problems[0])


def _lay_out_import(box: Path, case) -> None:
    if case[0] == "dpg-bench":
        shutil.copytree(judged(), box, dirs_exist_ok=True)
        (box / "detail.txt").write_bytes(case[1])
        return
    category = {"geneval": "counting", "t2i-compbench": "color"}[case[0]]
    small_run(box / "results", [Prompt("p", "drawn", category, {"line": 0, "include": []})])
    path = box / "official" / "color" / "annotation_blip" / "vqa_result.json"
    path.parent.mkdir(parents=True)
    path.write_bytes(case[1])


def _import(box: Path, case) -> None:
    (folder,) = (box / "results").iterdir()
    where = box / ("detail.txt" if case[0] == "dpg-bench" else "official")
    import_scores(case[0], folder, next(where.rglob("*.json")) if case[0] == "geneval" else where)


def _lay_out_refusal(box: Path, case) -> None:
    shutil.copytree(example_stranger(), box / "results")


def _be_refused(box: Path, case) -> None:
    """Read an undamaged folder in which one file after another cannot be opened: no line may blame the content."""
    number, place = case
    out, (folder,) = box / "results", (box / "results").iterdir()
    before = {path: path.read_bytes() for path in out.rglob("*") if path.is_file()}
    problems = []
    for use in (
        lambda: report_rows([folder]),
        lambda: write_page([folder], box / "page.html"),
        lambda: merge_runs([out], box / "merged"),
        lambda: export_images("geneval", folder, box / "official"),
    ):
        with _refusing(str(out), number, place):
            try:
                use()
            except SpecbenchError as error:
                problems.append(str(error))
            except OSError as error:  # the command line names the file and the reason
                problems.append(str(error))
    assert before == {path: path.read_bytes() for path in out.rglob("*") if path.is_file()}
    for problem in problems:
        assert os.strerror(number) in problem, problem
        assert not any(word in problem for word in ("damaged", "delete", "move the")), problem
    if problems:
        raise SpecbenchError(problems[0])


@contextlib.contextmanager
def _refusing(inside: str, number: int, place: int):
    """Let the `place`-th and all later openings of files in a folder for reading fail with error `number`."""
    opened = 0

    def wrapped(honest, reads):
        def call(path, *rest, **more):
            nonlocal opened
            if str(path).startswith(inside) and reads(*rest) and not os.path.isdir(path):
                opened += 1
                if opened > place:
                    raise OSError(number, os.strerror(number), str(path))
            return honest(path, *rest, **more)

        return call

    with (
        mock.patch("builtins.open", wrapped(open, lambda mode="r", *_: set(mode) <= set("rbt"))),
        mock.patch("os.open", wrapped(os.open, lambda flags, *_: not flags & (os.O_WRONLY | os.O_RDWR))),
        mock.patch("pyarrow.OSFile", wrapped(pa.OSFile, lambda *_: True)),
    ):
        yield


TWO_GRIDS = partial(example_checkpoint, "glm-image")
TARGETS = (
    Target("strangers' folders", 0.05, cases.strangers(), _lay_out_stranger, _use_stranger),
    Target("plug-ins", 0.04, cases.plugins, lambda box, case: _with_run(box), _score_by_stranger),
    Target("new doors", 0.04, cases.doors, _lay_out_doors, _open_door),
    Target("exports", 0.04, cases.exports, _lay_out_export, _export),
    Target("imports", 0.04, cases.imports(), _lay_out_import, _import),
    Target("refusals of the system", 0.02, cases.refusals, _lay_out_refusal, _be_refused),
    Target("command lines", 0.15, cases.command_lines(), _lay_out_line, _type_line),
    Target("prompt files", 0.35, cases.prompt_files(), _write_prompts, _read_prompts),
    Target("table files", 0.1, cases.tables(), _write_table, _read_table),
    Target("parquet parts", 0.05, cases.parts(), _write_part, _read_results),
    Target("run.json", 0.1, st.deferred(lambda: cases.json_bytes(example_info())), _write_info, _read_results),
    Target("draft heads", 0.15, *_folders(example_head), _load_head),
    Target("checkpoints", 0.1, *_folders(example_checkpoint), _load_checkpoint()),
    Target("checkpoints of two grids", 0.02, *_folders(TWO_GRIDS), _load_checkpoint("glm-image")),
    Target(
        "packs",
        0.04,
        st.deferred(lambda: cases.packs(example_pack().read_bytes())),
        lambda box, case: (box / "runs.zip").write_bytes(case),
        _read_pack,
    ),
    Target(
        "statistics of references",
        0.02,
        cases.statistics(),
        lambda box, case: (box / "reference.npz").write_bytes(case),
        lambda box, case: read_statistics(box / "reference.npz"),
    ),
    Target("hub answers", 0.02, answers(), lambda box, case: hub(), download_from),
    *(
        [Target("checkpoints in eight bits", 0.01, *_folders(example_checkpoint), _load_checkpoint(eight_bits=True))]
        if find_spec("torchao")
        else []
    ),
)
