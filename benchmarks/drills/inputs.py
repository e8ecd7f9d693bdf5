"""What `fuzz.py` feeds: command lines, prompt files, tables, parquet parts, run.json, draft heads, checkpoints."""

from __future__ import annotations

import contextlib
import copy
import functools
import hashlib
import io
import json
import shutil
import sys
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from unittest import mock

import pyarrow as pa
import pyarrow.parquet as pq
from hypothesis import strategies as st
from kills import UNITS, make_model, specs

from specbench.errors import SpecbenchError
from specbench.executors.work import InProcess
from specbench.reporting.html import write_page
from specbench.runner import run

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT / "tests"))
from checkpoints import write  # noqa: E402
from hostile import TEXTS  # noqa: E402


@dataclass(frozen=True)
class Target:
    """A kind of input: its cases, how one is laid out in a folder, what reads it there, and its part of all cases."""

    name: str
    share: float
    cases: st.SearchStrategy
    prepare: Callable[[Path, object], None]
    call: Callable[[Path, object], object]


texts = st.sampled_from(TEXTS) | st.text(max_size=20)
numbers = st.sampled_from([0, 1, -1, 3, 10**6, 2**31, 2**63, 10**400]) | st.integers()
numbers |= st.sampled_from([0.0, -1.5, 1e-300, 1e308, float("inf"), float("nan")]) | st.floats()
leaves = st.none() | st.booleans() | numbers | texts
junk = st.recursive(
    leaves, lambda inner: st.lists(inner, max_size=3) | st.dictionaries(texts, inner, max_size=3), max_leaves=5
)


def damaged_bytes(whole: bytes, draw: Callable) -> bytes:
    """The bytes with some flipped, a stretch cut out or repeated, or the end missing."""
    data = bytearray(whole)
    for _ in range(draw(st.integers(1, 4))):
        place = draw(st.integers(0, max(len(data) - 1, 0)))
        length = draw(st.sampled_from([1, 4, 64, len(data)]))
        match draw(st.sampled_from(["flip", "cut", "repeat", "insert"])):
            case "flip" if data:
                data[place] ^= draw(st.integers(1, 255))
            case "cut":
                del data[place : place + length]
            case "repeat":
                data[place:place] = data[place : place + length]
            case _:
                data[place:place] = draw(st.binary(max_size=16))
    return bytes(data)


def damaged_tree(whole, draw: Callable):
    """JSON content with one to three values replaced, taken out, or added."""
    tree = copy.deepcopy(whole)
    for _ in range(draw(st.integers(1, 3))):
        parents = [node for node in _nodes(tree) if node]
        if not parents:
            break
        node = parents[draw(st.integers(0, len(parents) - 1))]
        key = draw(st.sampled_from(list(node) if isinstance(node, dict) else list(range(len(node)))))
        match draw(st.sampled_from(["replace", "replace", "delete", "add"])):
            case "replace":
                node[key] = draw(junk)
            case "delete":
                del node[key]
            case _ if isinstance(node, dict):
                node[draw(texts)] = draw(junk)
            case _:
                node.append(draw(junk))
    return tree


def _nodes(tree):
    if isinstance(tree, dict | list):
        yield tree
        for value in tree.values() if isinstance(tree, dict) else tree:
            yield from _nodes(value)


@st.composite
def json_bytes(draw, whole) -> bytes:
    """A JSON document like `whole`, wrong in its content or in its form."""
    if draw(st.integers(0, 3)):
        return json.dumps(damaged_tree(whole, draw)).encode("utf-8", "surrogatepass")
    return damaged_bytes(json.dumps(whole).encode(), draw)


@functools.cache
def example_run() -> Path:
    """A results folder with one small run, made once."""
    out = Path(tempfile.mkdtemp(prefix="specbench-fuzz-")) / "results"
    run(InProcess(make_model()), specs()[1:], UNITS[:3], out)
    return out


def _with_run(box: Path) -> Path:
    shutil.copytree(example_run(), box / "results")
    (folder,) = (box / "results").iterdir()
    return folder


# -- command lines

COMMANDS: dict[str, tuple[str, ...]] = {
    "run": ("--dry-run",),
    "bench": ("--dry-run",),
    "prompts fetch": ("--offline",),
    **dict.fromkeys(("list", "report", "show", "compare", "merge", "export", "import", "score", "doctor"), ()),
    **dict.fromkeys(("audit", "check", "check-head", "train-head", "demo", "prompts show", "shapes render"), ()),
    "nope": (),
}
NOTHING_HEAVY = {
    "specbench.audit.audit": [],
    "specbench.conformance.check": [],
    "specbench.api.score": [],
    "specbench.api.score_folder": [],
}
"""What a correct line would compute for minutes."""
HEAVY = ("demo", "train-head", "check-head")
"""Commands that decode as soon as nothing is wrong: always given a flag that does not exist."""


@functools.cache
def _options() -> dict[str, list[str]]:
    """The options of every command."""
    import typer

    from specbench.cli import build_app

    found = {}

    def walk(command, path: str) -> None:
        found[path] = [name for parameter in command.params for name in parameter.opts if name.startswith("-")]
        for name, inner in getattr(command, "commands", {}).items():
            walk(inner, f"{path} {name}".strip())

    walk(typer.main.get_command(build_app()), "")
    return found


words = st.sampled_from(
    ["0", "1", "-1", "nan", "inf", "1e999", "9" * 400, "auto", "ar", "gsd:G=3", "sjd,ar", "shapes", ":=,", "1/2", "9/2",
     "prompts.txt", "settings.toml", "results", "enumerable", "json", "csv", "html", "gsd-1", "geneval", "models",
     "kills:KINDS", "os:path", "--", "-q", "--json"]
)  # fmt: skip
_safe = texts.filter(lambda text: "\0" not in text and "/" not in text and text not in ("..", "."))


@st.composite
def command_lines(draw) -> tuple[str, list[str]]:
    command = draw(st.sampled_from(list(COMMANDS)))
    flags = st.sampled_from(_options().get(command) or ["--out"])
    pieces = draw(st.lists(st.tuples(flags, words) | st.tuples(flags | words | _safe), max_size=4))
    return command, [word for piece in pieces for word in piece]


def _lay_out_line(box: Path, case) -> None:
    _with_run(box)
    (box / "prompts.txt").write_text("a red circle\n")
    (box / "settings.toml").write_text("seed = 3\n")


def _type_line(box: Path, case) -> None:
    from specbench.cli import main

    command, arguments = case
    line = [*command.split(), *COMMANDS[command], *(["--nope"] if command in HEAVY else []), *arguments]
    out, err = io.StringIO(), io.StringIO()
    with contextlib.ExitStack() as stack:
        stack.enter_context(contextlib.chdir(box))
        for name, value in NOTHING_HEAVY.items():
            stack.enter_context(mock.patch(name, return_value=value))
        stack.enter_context(contextlib.redirect_stdout(out))
        stack.enter_context(contextlib.redirect_stderr(err))
        code = _exit_code(main, line)
    said = err.getvalue().splitlines()
    if code:
        errors = [text for text in said if text.startswith("error: ")]
        shown = command in HEAVY or "--help" in line or "-h" in line
        assert len(errors) == 1 or (shown and not errors) or not arguments, err.getvalue()
        assert "Traceback" not in err.getvalue()
        raise SpecbenchError(errors[0] if errors else "usage", exit_code=code)


def _exit_code(main: Callable, line: Sequence[str]) -> int:
    try:
        main(line)
    except SystemExit as stopped:
        return stopped.code or 0
    raise AssertionError("the command line did not exit")


# -- prompt files

SUFFIXES = (".txt", ".jsonl", ".csv", ".tsv", ".parquet", ".md", "")


@st.composite
def prompt_files(draw) -> tuple[str, bytes]:
    suffix = draw(st.sampled_from(SUFFIXES))
    rows = draw(st.lists(st.dictionaries(st.sampled_from(["text", "prompt", "id", "category", "meta", "x"]) | texts,
                                         junk, max_size=4), max_size=4))  # fmt: skip
    match draw(st.sampled_from(["binary", "lines", "rows", "rows", "damaged"])):
        case "binary":
            return suffix, draw(st.binary(max_size=200))
        case "lines":
            return suffix, "\n".join(draw(st.lists(texts, max_size=5))).encode("utf-8", "surrogatepass")
        case "rows":
            return suffix, _rows_as(suffix, rows)
        case _:
            good = [{"id": f"p{n}", "text": f"prompt {n}", "category": "pets"} for n in range(3)]
            return suffix, damaged_bytes(_rows_as(suffix, good), draw)


def _rows_as(suffix: str, rows: list[dict]) -> bytes:
    if suffix == ".parquet":
        columns: dict[str, list[str]] = {}
        for row in rows:
            for name in row:
                columns[name] = [json.dumps(one.get(name)) for one in rows]
        clean = {name.encode(errors="replace").decode(): values for name, values in columns.items()}
        pq.write_table(pa.table(clean), sink := io.BytesIO())
        return sink.getvalue()
    if suffix in (".csv", ".tsv"):
        names = list(dict.fromkeys(name for row in rows for name in row))
        lines = [names, *([str(row.get(name, "")) for name in names] for row in rows)]
        separator = "," if suffix == ".csv" else "\t"
        return "\n".join(separator.join(line) for line in lines).encode("utf-8", "surrogatepass")
    return "\n".join(json.dumps(row) for row in rows).encode("utf-8", "surrogatepass")


def _write_prompts(box: Path, case) -> None:
    (box / f"prompts{case[0]}").write_bytes(case[1])


def _read_prompts(box: Path, case) -> None:
    from specbench.prompts import load_prompts
    from specbench.records import image_name

    found = load_prompts(box / f"prompts{case[0]}")
    assert len({prompt.id for prompt in found.prompts}) == len(found.prompts) > 0
    for prompt in found.prompts:
        assert (box / image_name(prompt.id, 0)).parent == box
        json.dumps(prompt.meta, allow_nan=True).encode()


# -- tables

TABLES = tuple(path.read_text() for path in sorted((ROOT / "benchmarks").glob("*-[1-4].toml")))
LITERALS = (
    '""',
    "-1",
    "nan",
    "inf",
    "1e400",
    "[]",
    "{}",
    '["x"]',
    "true",
    "2020-01-01",
    '"../x"',
    "9999999999999999999",
)


@st.composite
def tables(draw) -> bytes:
    lines = draw(st.sampled_from(TABLES)).splitlines()
    for _ in range(draw(st.integers(1, 3))):
        place = draw(st.integers(0, len(lines) - 1))
        key, equals, _ = lines[place].partition("=")
        match draw(st.sampled_from(["value", "value", "text", "delete", "repeat", "swap", "bytes"])):
            case "value" if equals:
                lines[place] = f"{key}= {draw(st.sampled_from(LITERALS))}"
            case "text" if equals:
                lines[place] = f"{key}= {json.dumps(draw(texts))}"
            case "delete" if len(lines) > 1:
                del lines[place]
            case "repeat":
                lines.insert(place, lines[draw(st.integers(0, len(lines) - 1))])
            case "swap":
                other = draw(st.integers(0, len(lines) - 1))
                lines[place], lines[other] = lines[other], lines[place]
            case _:
                return damaged_bytes("\n".join(lines).encode(), draw)
    return "\n".join(lines).encode("utf-8", "surrogatepass")


def _write_table(box: Path, case: bytes) -> None:
    name = next((line for line in case.decode(errors="replace").splitlines() if line.startswith("name")), "")
    stem = "".join(filter(lambda c: c.isascii() and (c.isalnum() or c in "+-"), name.partition("=")[2])) or "x"
    (box / f"{stem[:100]}.toml").write_bytes(case)


def _read_table(box: Path, case) -> None:
    from specbench.bench import plan_table
    from specbench.paper_files import read_table
    from specbench.reporting.paper_formats import FORMATS, render
    from specbench.reporting.paper_table import join

    (path,) = box.iterdir()
    table = read_table(path)
    joined = join(table, {})
    for fmt in FORMATS:
        render([joined], fmt)
    plan_table(table, {"model": "shapes", "prompts": "shapes", "out": str(box / "results"), "limit": "1"}, env={})


# -- results folders: parquet parts and run.json

HOSTILE_VALUES = {
    pa.string(): texts.map(lambda text: text.encode("utf-8", "replace").decode()) | st.none(),
    pa.int64(): st.none() | st.integers(-(2**63), 2**63 - 1),
    pa.int16(): st.none() | st.integers(-(2**15), 2**15 - 1),
    pa.float64(): st.none() | st.floats(),
}


@st.composite
def parts(draw) -> tuple[str, bytes]:
    """Name and content of the only part: another table, or the true one with bytes changed, under a right name."""
    (path,) = example_run().glob("*/samples/*.parquet")
    match draw(st.sampled_from(["bytes", "column", "column", "schema", "name"])):
        case "bytes":
            data = damaged_bytes(path.read_bytes(), draw)
        case "column":
            data = _hostile_column(pq.read_table(path), draw)
        case "schema":
            two = st.lists(st.integers(-9, 9), min_size=2, max_size=2)
            columns = draw(st.dictionaries(st.sampled_from(["prompt_id", "sample", "status", "x"]), two, max_size=4))
            metadata = {"specbench.schema": draw(st.sampled_from(["2", "1", "0", "99", "x", "-1", "²"]))}
            pq.write_table(pa.table(columns).replace_schema_metadata(metadata), sink := io.BytesIO())
            data = sink.getvalue()
        case _:
            names = ["99999999-00000000.parquet", "00000000-99999999999999999999.parquet", "00000000-00000000.parquet"]
            return draw(st.sampled_from(names)), path.read_bytes()
    digest = hashlib.sha256(data).hexdigest()[:16]
    return draw(st.sampled_from([f"00000000-00000000-{digest}.parquet", "00000000-00000000.parquet", path.name])), data


def _hostile_column(table: pa.Table, draw: Callable) -> bytes:
    for _ in range(draw(st.integers(1, 3))):
        field = draw(st.sampled_from([field for field in table.schema if field.type in HOSTILE_VALUES]))
        values = [draw(HOSTILE_VALUES[field.type]) for _ in range(table.num_rows)]
        column = pa.array(values, field.type)
        table = table.set_column(table.schema.get_field_index(field.name), field, column)
    pq.write_table(table, sink := io.BytesIO())
    return sink.getvalue()


def _write_part(box: Path, case) -> None:
    samples = _with_run(box) / "samples"
    for path in samples.iterdir():
        path.unlink()
    (samples / case[0]).write_bytes(case[1])


def _write_info(box: Path, case: bytes) -> None:
    (_with_run(box) / "run.json").write_bytes(case)


def _read_results(box: Path, case) -> None:
    """Everything that reads a results folder; refused if anything refuses it, and only else made a page of."""
    from specbench import api
    from specbench.cli.listing import runs
    from specbench.folders import find_runs
    from specbench.merging import merge
    from specbench.reporting import FORMATS, render
    from specbench.reporting.card import card
    from specbench.store import RunStore

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
        runs(out)
    if problems:
        raise problems[0]
    write_page(find_runs(out), box / "page.html")


def _refusal(call: Callable) -> SpecbenchError | None:
    try:
        call()
    except SpecbenchError as error:
        return error
    return None


def _example_info() -> dict:
    (path,) = example_run().glob("*/run.json")
    return json.loads(path.read_text())


# -- draft heads and checkpoints


@functools.cache
def example_head() -> Path:
    import torch
    from transformers import LlamaConfig

    from specbench.models.eagle import new_head, save_head

    folder = Path(tempfile.mkdtemp(prefix="specbench-fuzz-"))
    config = LlamaConfig(vocab_size=11, hidden_size=8, intermediate_size=12, num_hidden_layers=1, num_attention_heads=2)
    save_head(new_head(config, torch.zeros(11, 8), 0), folder, {})
    return folder


@functools.cache
def example_checkpoint() -> Path:
    folder = Path(tempfile.mkdtemp(prefix="specbench-fuzz-"))
    write("simplear", folder)
    return folder


@st.composite
def damaged_folders(draw, example: Callable[[], Path]) -> tuple[str, bytes]:
    """A file of a folder and its new content."""
    files = sorted(path for path in example().rglob("*") if path.is_file() and path.stat().st_size < 10**6)
    path = draw(st.sampled_from(files + [path for path in files if path.name == "config.json"] * 3))
    name = str(path.relative_to(example()))
    if path.suffix == ".json":
        return name, draw(json_bytes(json.loads(path.read_text())))
    return name, damaged_bytes(path.read_bytes(), draw)


def _write_folder(example: Callable[[], Path]) -> Callable:
    def prepare(box: Path, case) -> None:
        shutil.copytree(example(), box / "files")
        (box / "files" / case[0]).write_bytes(case[1])

    return prepare


def _load_head(box: Path, case) -> None:
    from specbench.models.eagle import load_head
    from specbench.models.heads import head_in

    load_head(head_in(box / "files"))


def _load_checkpoint(box: Path, case) -> None:
    from specbench.models.catalog import find_model

    info = find_model("simplear").configured(weights=str(box / "files"), tiny=True)
    info.check()
    info.load("cpu", "float32")


TARGETS = (
    Target("command lines", 0.15, command_lines(), _lay_out_line, _type_line),
    Target("prompt files", 0.35, prompt_files(), _write_prompts, _read_prompts),
    Target("table files", 0.1, tables(), _write_table, _read_table),
    Target("parquet parts", 0.05, parts(), _write_part, _read_results),
    Target("run.json", 0.1, st.deferred(lambda: json_bytes(_example_info())), _write_info, _read_results),
    Target("draft heads", 0.15, damaged_folders(example_head), _write_folder(example_head), _load_head),
    Target(
        "checkpoints", 0.1, damaged_folders(example_checkpoint), _write_folder(example_checkpoint), _load_checkpoint
    ),
)
