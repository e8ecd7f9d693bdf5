"""Hypothesis strategies for `fuzz.py`: command lines, prompt files, tables, parquet parts, run.json, files of draft
heads and checkpoints, results folders from others, prompts to export, results to import, and refusals of the operating
system."""

import copy
import errno
import functools
import hashlib
import io
import json
import os
import re
import warnings
import zipfile
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import typer
from examples import TABLES, example_run, judged
from hostile import TEXTS
from hypothesis import strategies as st
from PIL import Image

from specbench.cli import build_app

texts = st.sampled_from(TEXTS) | st.text(max_size=20)
numbers = st.sampled_from([0, 1, -1, 3, 10**6, 2**31, 2**63, 10**400]) | st.integers()
numbers |= st.sampled_from([0.0, -1.5, 1e-300, 1e308, float("inf"), float("nan")]) | st.floats()
leaves = st.none() | st.booleans() | numbers | texts
junk = st.recursive(
    leaves, lambda inner: st.lists(inner, max_size=3) | st.dictionaries(texts, inner, max_size=3), max_leaves=5
)


def damaged_bytes(whole: bytes, draw: Callable) -> bytes:
    """Corrupt bytes: flip some, remove or repeat a segment, or truncate."""
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
    """Corrupt JSON content: replace, remove or add one to three values."""
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
    """Corrupt a JSON document like `whole` in content or syntax."""
    if draw(st.integers(0, 3)):
        return json.dumps(damaged_tree(whole, draw)).encode("utf-8", "surrogatepass")
    return damaged_bytes(json.dumps(whole).encode(), draw)


@functools.cache
def options() -> dict[str, list[str]]:
    """List the options of every command; the keys are the words of the command."""
    by_command = {}

    def walk(command, path: str) -> None:
        inner = getattr(command, "commands", {})
        for name in inner:
            walk(inner[name], f"{path} {name}".strip())
        if not inner:
            by_command[path] = [name for parameter in command.params for name in parameter.opts if name.startswith("-")]

    walk(typer.main.get_command(build_app()), "")
    return by_command


words = st.sampled_from(
    ["0", "1", "-1", "nan", "inf", "1e999", "9" * 400, "auto", "ar", "gsd:G=3", "sjd,ar", "shapes", ":=,", "1/2", "9/2",
     "prompts.txt", "settings.toml", "results", "enumerable", "json", "csv", "html", "gsd-1", "geneval", "models",
     "kills:KINDS", "os:path", "--", "-q", "--json"]
)  # fmt: skip
_safe = texts.filter(lambda text: "\0" not in text and "/" not in text and text not in ("..", "."))


@st.composite
def command_lines(draw) -> tuple[str, list[str]]:
    """Draw an existing or unknown command with arguments."""
    command = draw(st.sampled_from([*options(), "nope"]))
    flags = st.sampled_from(options().get(command) or ["--out"])
    pieces = draw(st.lists(st.tuples(flags, words) | st.tuples(flags | words | _safe), max_size=4))
    return command, [word for piece in pieces for word in piece]


SUFFIXES = (".txt", ".json", ".jsonl", ".csv", ".tsv", ".parquet", ".md", ".yaml", "")


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
                columns[name] = [json.dumps(row.get(name)) for row in rows]
        clean = {name.encode(errors="replace").decode(): values for name, values in columns.items()}
        pq.write_table(pa.table(clean), sink := io.BytesIO())
        return sink.getvalue()
    if suffix in (".csv", ".tsv"):
        names = list(dict.fromkeys(name for row in rows for name in row))
        lines = [names, *([str(row.get(name, "")) for name in names] for row in rows)]
        separator = "," if suffix == ".csv" else "\t"
        return "\n".join(separator.join(line) for line in lines).encode("utf-8", "surrogatepass")
    if suffix == ".json":
        return json.dumps(rows).encode("utf-8", "surrogatepass")
    return "\n".join(json.dumps(row) for row in rows).encode("utf-8", "surrogatepass")


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


HOSTILE_VALUES = {
    pa.string(): texts.map(lambda text: text.encode("utf-8", "replace").decode()) | st.none(),
    pa.int64(): st.none() | st.integers(-(2**63), 2**63 - 1),
    pa.int16(): st.none() | st.integers(-(2**15), 2**15 - 1),
    pa.float64(): st.none() | st.floats(),
}


@st.composite
def parts(draw) -> tuple[str, bytes]:
    """Draw name and content of the only parquet part: another table, or the original with changed bytes."""
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


@st.composite
def damaged_folders(draw, example: Callable[[], Path]) -> tuple[str, bytes]:
    """Draw a file of a folder and its new content."""
    files = sorted(path for path in example().rglob("*") if path.is_file() and path.stat().st_size < 10**6)
    path = draw(st.sampled_from(files + [path for path in files if path.name == "config.json"] * 3))
    name = str(path.relative_to(example()))
    if path.suffix == ".json":
        return name, draw(json_bytes(json.loads(path.read_text())))
    return name, damaged_bytes(path.read_bytes(), draw)


Mutation = Callable[[Path], None]
SECRET = b"the secret of specbench's drills"
"""Content of a file outside the folder, which nothing may copy or change."""


def nested(levels: int) -> bytes:
    return b"[" * levels + b"]" * levels


PLACES = (
    *("images/*", "samples/*", "scores/*.parquet", "scores/*/*", "run.json", "audit.json"),
    *(".lock", ".run.json.tmp", "images/.x.png.tmp", "scores/.lock"),
)
CHANGES = (*("swap", "pipe", "link out", "link in", "folder", "damage", "format", "delete", "table", "json", "nested"),)


@st.composite
def strangers(draw) -> list[tuple[str, str, object]]:
    """Draw one to three changes of a results folder, each with a glob pattern of the file, a kind, and its data."""
    changes = []
    for _ in range(draw(st.integers(1, 3))):
        pattern, kind = draw(st.sampled_from(PLACES)), draw(st.sampled_from(CHANGES))
        match kind:
            case "damage":
                more = draw(st.binary(max_size=64)), draw(st.integers(0, 4096))
            case "format":
                more = draw(st.sampled_from(sorted(PICTURES)))
            case "table":
                more = draw(st.sampled_from(["drop", "rename", "retype", "lists", "nulls", "repeat", "empty"]))
                more = more, draw(st.integers(0, 60))
            case "json":
                more = draw(junk)
            case "nested":
                more = nested(draw(st.sampled_from([65, 1000, 10**5])))
            case _:
                more = None
        changes.append((pattern, kind, more))
    return changes


METRIC_METHODS = ("accepts", "preprocess", "features", "statistics", "scores", "identity", "prepare", "downloads",
                  "missing_packages", "__init__", "name", "batch", "columns")  # fmt: skip
"""Parts of a metric that a foreign package may define."""
VALUES = (
    *(None, 0, -1, 2.5, "x", b"x", "\ud800", [], [5], ["x"], {}, {"value": "x"}, (), [{"value": [1.0, 2.0]}]),
    *([{"value": 1e999}], [{"prompt_id": "x"}], "../../../evil", "shapes-detector", "a/b", "a\nb", object()),
)
ERRORS = (SystemExit, BrokenPipeError, GeneratorExit, MemoryError, StopIteration, OSError, ValueError, BaseException)
plugins = st.dictionaries(st.sampled_from(METRIC_METHODS), st.sampled_from((*VALUES, *ERRORS)), min_size=1, max_size=2)
"""Values that parts of a metric return, or errors that they raise."""


def _picture(kind: str, size: tuple[int, int] = (8, 8)) -> bytes:
    Image.new("RGB", size).save(sink := io.BytesIO(), format=kind)
    return sink.getvalue()


PICTURES = {
    **{kind: _picture(kind) for kind in ("png", "jpeg", "webp", "bmp", "gif", "tiff", "ppm", "ico", "eps")},
    "wide": _picture("png", (1, 3000)),
    "bomb": b"\x89PNG\r\n\x1a\n\0\0\0\rIHDR" + b"\0\0\x32\xc8" * 2 + b"\x01\0\0\0\0" + b"\0" * 64,
    "text": b"not a picture",
    "nothing": b"",
}


def change(folder: Path, pattern: str, kind: str, more: object, secret: Path) -> None:
    """Apply one change of `strangers`; a change that does not fit the file is ignored."""
    paths = sorted(folder.glob(pattern)) or [folder / pattern]
    path, other = paths[0], paths[-1]
    if not path.parent.is_dir():
        return
    match kind:
        case "swap" if path != other and path.is_file() and other.is_file():
            path.rename(folder / "swapped")
            other.rename(path)
            (folder / "swapped").rename(other)
            return
        case "table" if path.suffix == ".parquet" and path.is_file():
            try:
                table = pq.read_table(path)
            except (pa.ArrowException, OSError):  # an earlier change damaged it
                return
            data = _changed_table(table, *more)
            path.unlink()
            digest = hashlib.sha256(data).hexdigest()[:16]
            named = path.name.count("-") == 2 and path.parent.name != "scores"
            path.with_name(f"00000000-00000063-{digest}.parquet" if named else path.name).write_bytes(data)
            return
        case "swap" | "table":
            return
    content = {"damage": b"", "nested": more, "format": PICTURES.get(more) if kind == "format" else b""}.get(kind)
    if kind == "damage" and path.is_file() and not path.is_symlink():
        piece, place = more
        content = (data := path.read_bytes())[:place] + piece + data[place + len(piece) :]
    if kind == "json":
        content = json.dumps(more).encode("utf-8", "surrogatepass")
    if path.is_dir() and not path.is_symlink():
        return
    path.unlink(missing_ok=True)
    match kind:
        case "pipe":
            os.mkfifo(path)
        case "link out":
            path.symlink_to(secret)
        case "link in":
            path.symlink_to(folder / "run.json")
        case "folder":
            path.mkdir()
        case "delete":
            pass
        case _:
            path.write_bytes(content)


def _changed_table(table: pa.Table, kind: str, number: int) -> bytes:
    field = table.schema.field(number % table.num_columns)
    place = table.schema.get_field_index(field.name)
    rows = table[field.name].to_pylist()
    match kind:
        case "drop":
            table = table.remove_column(place)
        case "rename":
            table = table.rename_columns([name if name != field.name else "x" for name in table.column_names])
        case "retype":
            table = table.set_column(place, field.name, pa.array([str(row) for row in rows]))
        case "lists" if pa.types.is_list(field.type):
            longer = [row and row * (1 + index) for index, row in enumerate(rows)]
            table = table.set_column(place, field, pa.array(longer, field.type))
        case "nulls":
            table = table.set_column(place, field, pa.nulls(len(rows), field.type))
        case "repeat":
            table = pa.concat_tables([table, table])
        case "empty":
            table = table.slice(0, 0)
    pq.write_table(table, sink := io.BytesIO())
    return sink.getvalue()


IDS = ("A", "a", "\u00e9", "e\u0301", "E\u0301", "\u00df", "ss", "SS", "\u212a", "k", "a/b", "a b", "..", "a\u200d")
"""Prompt ids, some of which differ only by case or by Unicode form."""
exports = st.lists(
    st.fixed_dictionaries(
        {
            "id": st.sampled_from(IDS),
            "text": texts,
            "line": numbers | leaves | st.integers(0, 3),
            "category": st.sampled_from(["color", "complex", "x"]),
        }
    ),
    min_size=1,
    max_size=4,
    unique_by=lambda row: row["id"],
)
"""Prompts of a run that is exported."""

OUTPUTS = (
    "new",
    "link",
    "dangling",
    "circle",
    "device",
    "folder",
    "missing/new",
    "\udcff",
    "-",
)
"""Where output goes: see `targets._lay_out_doors`."""
DOORS = tuple(
    """status; show RUN; list runs; report; report ZIP; report --html TO; figure time-per-step --to TO
    pack --to TO; pack RUN --without-pictures --to TO; verify ZIP; verify RUN; export dataset RUN --to TO; merge OUT
    audit --run RUN; compare RUN RUN; score RUN --metric shapes-detector; forecast --on A100 --model shapes
    bench table.toml --dry-run; bench table.toml --to TO; bench table.toml --format latex; fetch coco --from mine.txt
    fetch coco; run --model emu3 --size 64x64 --dry-run; run --dtype float16 --size RUN --dry-run""".replace(
        "\n", ";"
    ).split(";")
)
"""Command lines on damaged results."""
flips = st.lists(st.tuples(st.integers(0, 63), st.integers(0, 10**6), st.integers(0, 7)), max_size=3)
"""Bits to flip: number of the file, position in it, bit."""
doors = st.tuples(st.sampled_from(DOORS), flips, st.sampled_from(OUTPUTS), st.sampled_from(("results", "r\udcff")))
"""Command line, damage, destination of its output, and name of the results folder."""

MEMBERS = ("../x", "/x", "run/../../x", "a/run.json", "a/images/..", "a/images/x\\y.png", "pack.json", "a" * 300)


@st.composite
def packs(draw, whole: bytes) -> bytes:
    """Draw a packed file with changed headers or bytes, another manifest, or further members."""
    with zipfile.ZipFile(io.BytesIO(whole)) as archive:
        members = {name: archive.read(name) for name in archive.namelist()}
    kind = draw(st.sampled_from(["headers", "headers", "bytes", "manifest", "members"]))
    if kind == "bytes":
        return damaged_bytes(whole, draw)
    if kind == "headers":
        starts = [match.start() for match in re.finditer(rb"PK(\x01\x02|\x03\x04|\x05\x06)", whole)]
        data = bytearray(whole)
        for _ in range(draw(st.integers(1, 2))):
            place = draw(st.sampled_from(starts)) + draw(st.integers(0, 45))
            data[min(place, len(data) - 1)] ^= 1 << draw(st.integers(0, 7))
        return bytes(data)
    about = json.loads(members.pop("pack.json"))
    more = draw(st.lists(st.tuples(st.sampled_from(MEMBERS), st.binary(max_size=9)), max_size=2 * (kind == "members")))
    about["files"] |= {name: hashlib.sha256(data).hexdigest() for name, data in more if draw(st.booleans())}
    about = damaged_tree(about, draw) if kind == "manifest" else about
    deflated = draw(st.sampled_from([zipfile.ZIP_STORED, zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED]))
    with zipfile.ZipFile(sink := io.BytesIO(), "w", deflated) as archive, warnings.catch_warnings():
        warnings.simplefilter("ignore")  # two members with the same name
        for name, data in [*members.items(), *more, ("pack.json", json.dumps(about).encode("utf-8", "surrogatepass"))]:
            archive.writestr(name, data)
    return sink.getvalue()


RESULTS = (
    {"filename": "x/00000/samples/0000.png", "prompt": "drawn", "correct": True, "reason": "", "details": "{}"},
    [{"question_id": 0, "answer": "0.5"}],
)


@st.composite
def statistics(draw) -> bytes:
    """Draw a .npz file of mu and sigma with other content of an array, or with damaged bytes."""
    arrays = {"mu": np.zeros(4), "sigma": np.eye(4), "arr_0": np.zeros((2, 3, 3, 3), np.uint8)}
    kinds = st.sampled_from(["f8", "f4", "f2", "i8", "u1", "?", "c16", "O", "U3", "M8[s]", "V5", "f8,i4"])
    for name in draw(st.sets(st.sampled_from(["mu", "sigma"]))):
        shape = draw(st.lists(st.sampled_from([0, 1, 3, 4]), max_size=3))
        with np.errstate(invalid="ignore"):
            arrays[name] = np.full(shape, draw(st.sampled_from([0, 1, -1, np.nan, np.inf])), "f8").astype(draw(kinds))
    (np.savez_compressed if draw(st.booleans()) else np.savez)(sink := io.BytesIO(), **arrays)
    return damaged_bytes(sink.getvalue(), draw) if draw(st.booleans()) else sink.getvalue()


@st.composite
def imports(draw) -> tuple[str, bytes]:
    """Draw a benchmark and a file that claims to come from its official program."""
    if draw(st.booleans()):
        lines = (judged() / "detail.txt").read_text().splitlines()
        place = draw(st.integers(0, len(lines) - 1))
        lines[place : place + draw(st.integers(0, 2))] = draw(st.lists(st.sampled_from(lines) | texts, max_size=2))
        whole = "\n".join(lines).encode("utf-8", "surrogatepass")
        return "dpg-bench", draw(st.just(whole) | st.builds(lambda: damaged_bytes(whole, draw)))
    benchmark, whole = draw(st.sampled_from([*zip(("geneval", "t2i-compbench"), RESULTS, strict=True)]))
    return benchmark, draw(json_bytes(whole) | st.sampled_from([nested(65), nested(1000), b"", b"\xff"]))


refusals = st.tuples(
    st.sampled_from([errno.EACCES, errno.EIO, errno.EMFILE, errno.ENOMEM, errno.ESTALE]), st.integers(0, 30)
)
"""Error number of the operating system, and the number of the opened file at which it occurs."""
