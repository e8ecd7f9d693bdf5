"""Readers of prompt files: text, JSON, JSONL, CSV, TSV, parquet, all of them also as .gz.

Text files have one prompt per line. The other formats need a column `text`, `prompt` or `caption` (if there is no exact
match, also in the plural and in any case), or the column given by the caller. `id` (or `prompt_id`) and `category` are
optional, and every other column becomes metadata. A JSON file contains a list of texts or of objects with such keys, an
object that maps ids to texts or objects, or COCO's captions. `public_files` reads public sets.
"""

from __future__ import annotations

import csv
import gzip
import json
import os
import re
import sys
import tempfile
import zlib
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from functools import cache, lru_cache
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

from specbench.errors import SpecbenchError
from specbench.names import fitting
from specbench.prompts.prompt_set import Prompt, second_stage_id, text_id
from specbench.prompts.public_files import DPG_COLUMNS, dpg_prompts, longest_captions
from specbench.system import console
from specbench.system.files import blaming, check_regular, is_lfs_pointer, read_regular, text_of
from specbench.system.json_values import parse_json

if TYPE_CHECKING:
    import pyarrow

MAX_LINE_BYTES = 1_000_000
MAX_PROMPTS = 1_000_000
MAX_FILE_BYTES = 2**28
_FORMATS = "formats: .txt (one prompt per line), .json, .jsonl, .csv, .tsv, .parquet"
_QUOTING: dict[bool, Literal[0, 3]] = {True: csv.QUOTE_MINIMAL, False: csv.QUOTE_NONE}
csv.field_size_limit(MAX_FILE_BYTES)  # Python's default is too short
_STATED = re.compile(r'"?sep=([^\w\s"]|\t)"?\1*\s*', re.IGNORECASE)
_LINE = re.compile(rb"[^\r\n]+(?:\r\n|[\r\n])?|\r\n|[\r\n]")


def read_file(path: Path, column: str | None = None) -> list[Prompt]:
    """Read the prompts of a file, in order, and print notes on ambiguous columns. `column`: the column of the texts."""
    source = TableFile(path, column, {})
    prompts = _once_an_item(source, _entries(source))
    _refuse_repeated(path, prompts)
    for sentence in source.notes:
        console.say(f"{path.name}: {sentence}")
    return [prompt for _, prompt in prompts]


def read_entries(path: Path, column: str | None = None) -> list[Prompt]:
    """Like `read_file`, but repeated entries of the file give repeated prompts."""
    return [prompt for _, prompt in _entries(TableFile(path, column, {}))]


def _entries(source: TableFile) -> list[tuple[str, Prompt]]:
    path, column = source.path, source.column
    suffix = _suffix(path)
    reader = _read_text if suffix in ("", ".txt", ".text", ".md", ".prompts") else _READERS.get(suffix)
    if (path / "samples").is_dir():
        reader = _read_run
    elif path.is_dir():
        raise SpecbenchError(f"prompt file '{path}' is a folder, but not a run folder")
    if reader is None:
        raise SpecbenchError(f"prompt file '{path}' has the unknown suffix {suffix}", _FORMATS)
    if column and reader in (_read_run, _read_text):
        raise SpecbenchError(f"--prompt-column {column}: '{path}' has no columns", "omit --prompt-column")
    try:
        if reader is not _read_run:
            check_regular(path)  # not a pipe, which may block and cannot be read again on resume
            if is_lfs_pointer(path):
                what = f"prompt file '{path}' is a Git LFS pointer, not the file itself"
                raise SpecbenchError(what, "run git lfs pull, or download the file from its page")
        prompts = list(islice(reader(source), MAX_PROMPTS + 1))
    except (OSError, EOFError, zlib.error) as error:
        reason = getattr(error, "strerror", 0) or error
        raise SpecbenchError(f"prompt file '{path}' cannot be read: {reason}") from None
    if len(prompts) > MAX_PROMPTS:
        raise _refused(path, f"more than {MAX_PROMPTS:,} prompts", "split it")
    return prompts


def _suffix(path: Path) -> str:
    """Return the suffix of a file name; for a compressed file, the suffix before ".gz"."""
    return (Path(path.stem) if path.suffix.lower() == ".gz" else path).suffix.lower()


def _once_an_item(source: TableFile, rows: list[tuple[str, Prompt]]) -> list[tuple[str, Prompt]]:
    """Remove rows that repeat the id and text of another row, as in files with a row per question."""
    first = {(item.id, item.text): where for where, item in reversed(rows) if item.id != text_id(item.text)}
    kept = [(where, item) for where, item in rows if first.get((item.id, item.text), where) == where]
    if len(kept) < len(rows):
        source.notes[f"{len(rows):,} rows have the ids and texts of {console.counted(len(kept), 'prompt')}"] = None
    return kept


def read_stdin() -> list[Prompt]:
    """Read the prompts of stdin, once per process: one per line, or JSONL if the first line is a JSON object."""
    text = _stdin()
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, f"stdin{'.jsonl' if text.lstrip().startswith(b'{') else ''}")
        path.write_bytes(text)
        try:
            return read_file(path)
        except SpecbenchError as error:
            raise SpecbenchError(error.what.replace(str(path), "-"), error.try_this, error.exit_code) from None


@cache
def _stdin() -> bytes:
    return sys.stdin.buffer.read(MAX_FILE_BYTES + 1)


def _refuse_repeated(path: Path, entries: Iterable[tuple[str, Prompt]]) -> None:
    seen: dict[str, tuple[str, str]] = {}
    for where, prompt in entries:
        if prompt.id in seen:
            first, text = seen[prompt.id]
            if text == prompt.text:
                what, fix = f"are both '{text:.60}'", "remove one; for several images of a prompt: --samples"
            else:
                what, fix = f"both have the id '{prompt.id:.60}'", "ids must be unique"
            kind, _, number = first.partition(" ")
            both = f"{'entries' if kind == 'entry' else f'{kind}s'} {number} and {where.partition(' ')[2]}"
            raise SpecbenchError(f"prompt file '{path}': {both} {what}", fix)
        seen[prompt.id] = where, prompt.text


def _refused(path: Path, why: str, fix: str = "") -> SpecbenchError:
    return SpecbenchError(f"prompt file '{path}': {why}", fix or _FORMATS)


def _lines(path: Path) -> Iterator[tuple[int, str]]:
    """Iterate over numbered lines with their line ends (LF, CRLF or CR). Byte order marks of joined files and the end
    mark of DOS files are removed."""
    for number, match in enumerate(_LINE.finditer(_content(path)), 1):
        try:
            if len(match[0]) > MAX_LINE_BYTES:
                raise _refused(path, f"line {number} is longer than {MAX_LINE_BYTES:,} bytes")
            if b"\0" in match[0]:
                raise _refused(path, f"it is binary (NUL byte in line {number})")
            if match[0].strip() != b"\x1a":
                yield number, match[0].decode("utf-8-sig")
        except UnicodeDecodeError:
            raise _refused(path, f"line {number} is not UTF-8 text") from None


def _content(path: Path) -> bytes:
    """Content of a file, converted to UTF-8 if its first bytes indicate another encoding."""
    if path.suffix.lower() == ".gz":
        with gzip.open(path) as file:
            content = file.read(MAX_FILE_BYTES + 1)
        if len(content) > MAX_FILE_BYTES:
            raise _refused(path, f"larger than {MAX_FILE_BYTES:,} bytes", "split it")
    else:
        content = read_regular(path, MAX_FILE_BYTES)
    with suppress(UnicodeDecodeError):  # readers report the invalid line later
        return text_of(content).encode()
    return content


def _read_run(source: TableFile) -> Iterator[tuple[str, Prompt]]:
    """Read the images of a first stage's run as prompts of the second stage: each token becomes a code ("<I5>")."""
    import pyarrow.parquet as pq  # needed for runs only

    folder = source.path
    names = ["prompt_id", "sample", "status", "category", "meta", "tokens", "facts"]
    with blaming(folder / "samples", "contains no images of a run: {}"):
        rows = pq.read_table(folder / "samples", columns=names).to_pylist()
        facts: list[Any] = [parse_json(row["facts"] or "{}") for row in rows]
        if not any("stage2_nfe" in of_image for of_image in facts):
            what = f"'{folder}' is not a run of a model with a second stage"
            raise SpecbenchError(what, "give a run of tar-1.5b or tar-7b")
        latest = {second_stage_id(row["prompt_id"], row["sample"]): row for row in rows if row["status"] == "ok"}
        for name, row in latest.items():
            text = "".join(f"<I{token}>" for token in row["tokens"])
            meta: Any = parse_json(row["meta"] or "{}")
            yield f"image {name}", Prompt(name, text, row["category"], meta | {"codes": len(row["tokens"])})


def _read_text(source: TableFile) -> Iterator[tuple[str, Prompt]]:
    for number, line in _lines(source.path):
        if text := line.strip():
            yield f"line {number}", Prompt(text_id(text), text)


def _read_jsonl(source: TableFile) -> Iterator[tuple[str, Prompt]]:
    path = source.path
    for number, line in _lines(path):
        if not line.strip():
            continue
        try:
            row = parse_json(line)
        except ValueError as error:
            raise _refused(path, f"line {number} is not JSON ({error})") from None
        if not isinstance(row, dict):
            raise _refused(path, f"line {number} is not a JSON object")
        yield f"line {number}", prompt_of(source, f"line {number}", row)


def _read_json(source: TableFile) -> Iterator[tuple[str, Prompt]]:
    path = source.path
    try:
        rows: Any = parse_json(_content(path).decode("utf-8-sig"))
    except ValueError as error:
        raise SpecbenchError(f"prompt file '{path}' is not JSON ({error})") from None
    captions, of_coco = rows.get("annotations") if isinstance(rows, dict) else None, {"image_id", "id", "caption"}
    if isinstance(captions, list) and all(isinstance(row, dict) and of_coco <= row.keys() for row in captions):
        source.notes["the longest caption of each image is used, as in coco"] = None
        yield from ((f"image {prompt.id}", prompt) for prompt in longest_captions(rows))
        return
    if isinstance(rows, dict):
        rows = _listed(rows, source)
    if not isinstance(rows, list) or not all(isinstance(row, str | dict) for row in rows):
        what = f"prompt file '{path}' must be a list of objects or texts, or an object that maps ids to them"
        raise SpecbenchError(what, _FORMATS)
    for number, row in enumerate(rows, 1):
        where = f"entry {number}"
        yield where, prompt_of(source, where, {"text": row} if isinstance(row, str) else row)


def _listed(content: dict[str, Any], source: TableFile) -> object:
    """Return the rows of a JSON object that contains either a single list, or a row or text per id."""
    lists = [name for name, value in content.items() if isinstance(value, list)]
    if len(lists) == 1:
        source.notes[f"prompts are read from the list '{lists[0]}'"] = None
        return content[lists[0]]
    if any(singular(key, ()) in TEXT_KEYS for key in content):
        return [content]
    rows = [{"text": row} if isinstance(row, str) else row for row in content.values()]
    if not all(isinstance(row, dict) for row in rows):
        return content
    return [row if row.keys() & set(ID_KEYS) else {"id": name} | row for name, row in zip(content, rows, strict=True)]


def _read_csv(source: TableFile) -> Iterator[tuple[str, Prompt]]:
    """Read CSV, in which quotes enclose fields, or TSV, in which quotes around a part of a field are text."""
    delimiter, above = _delimiter(source)
    try:
        rows = _rows(source, delimiter, True, above)
        yield from list(rows) if delimiter == "\t" else rows
    except SpecbenchError as error:
        if delimiter != "\t" or not isinstance(error.__cause__, csv.Error):
            raise
        yield from _rows(source, delimiter, False, above)


def _delimiter(source: TableFile) -> tuple[str, int]:
    """Return the delimiter and the number of lines above the headings. Excel's line "sep=;" states the delimiter.
    Otherwise the file's suffix implies it, unless only another delimiter yields a heading of a column of texts."""
    usual = "\t" if _suffix(source.path) == ".tsv" else ","
    filled = ((number, line) for number, line in _lines(source.path) if line.strip())
    first, header = next(filled, (1, ""))
    if stated := _STATED.fullmatch(header):
        return stated[1], next(filled, (first + 1, ""))[0] - 1

    def separates(delimiter: str) -> bool:
        names = [name.strip().strip('"') for name in header.split(delimiter)]
        return source.column in names or any(singular(name, ()) in TEXT_KEYS for name in names)

    return next(filter(separates, (usual, ";", "\t", ",")), usual), first - 1


def _rows(source: TableFile, delimiter: str, quotes: bool, above: int) -> Iterator[tuple[str, Prompt]]:
    path, quoting = source.path, _QUOTING[quotes]
    lines = (line for number, line in _lines(path) if number > above)
    rows = csv.DictReader(lines, delimiter=delimiter, quoting=quoting, strict=True)
    try:
        named = [(name, name.strip().lower()) for name in rows.fieldnames or ()]
        rows.fieldnames = [ours if ours in OUR_COLUMNS else name for name, ours in named]
        _check_columns(path, rows.fieldnames)
        if {*rows.fieldnames} >= DPG_COLUMNS:
            source.notes["one row per question, as in dpg-bench"] = None
            yield from ((f"item {prompt.id}", prompt) for prompt in dpg_prompts(rows))
            return
        for row in rows:
            if None in row:
                raise _refused(path, f"line {rows.line_num + above} has more fields than the header")
            yield (where := f"line {rows.line_num + above}"), prompt_of(source, where, row)
    except csv.Error as error:
        raise _refused(path, f"line {rows.line_num + above}: {error}") from error


def _read_parquet(source: TableFile) -> Iterator[tuple[str, Prompt]]:
    import pyarrow  # only for parquet files
    import pyarrow.parquet

    path, damaged = source.path, "is not a parquet file: {}"
    with blaming(path, damaged), pyarrow.parquet.ParquetFile(pyarrow.OSFile(os.fsencode(path))) as file:
        if file.metadata.num_rows > MAX_PROMPTS:
            raise _refused(path, f"more than {MAX_PROMPTS:,} prompts", "split it")
        _check_columns(path, file.schema_arrow.names)
        binary = [field.name for field in file.schema_arrow if _is_binary(field.type)]
        if source.column in binary:
            raise _refused(path, f"column '{source.column}' is binary", "use --prompt-column with a column of texts")
        if binary:
            source.notes[f"binary columns are not read: {', '.join(binary):.200}"] = None
        names = [name for name in file.schema_arrow.names if name not in binary]
        batches = file.iter_batches(1024, columns=names, use_threads=False)
        rows = (row for batch in batches for row in batch.to_pylist())
        for number, row in enumerate(rows, 1):
            yield f"row {number}", prompt_of(source, f"row {number}", row)


def _is_binary(kind: pyarrow.DataType) -> bool:
    """Return whether values of a type contain bytes, such as images and sounds ("image": {"bytes", "path"})."""
    for inside in ("storage_type", "value_type"):  # inner types of extensions, dictionaries and lists
        kind = getattr(kind, inside, kind)
    parts = [kind.field(number).type for number in range(kind.num_fields)]
    return "binary" in str(kind).partition("<")[0].partition("[")[0] or any(map(_is_binary, parts))


def _check_columns(path: Path, names: Sequence[str]) -> None:
    """Reject a repeated column name, which would be ambiguous."""
    counts = Counter(str(name).strip() for name in names)
    if repeated := next((name for name, count in counts.items() if count > 1), None):
        raise SpecbenchError(f"prompt file '{path}' has two columns '{repeated}'", "remove or rename one column")


_READERS = {
    ".json": _read_json, ".jsonl": _read_jsonl, ".ndjson": _read_jsonl,
    ".csv": _read_csv, ".tsv": _read_csv, ".parquet": _read_parquet,
}  # fmt: skip
TEXT_KEYS = ("text", "prompt", "caption")
ID_KEYS = ("id", "prompt_id")
OUR_COLUMNS = (*TEXT_KEYS, *ID_KEYS, "category", "meta")
"""Columns that are recognised in any case in the header of a CSV or TSV file."""


class TableFile(NamedTuple):
    """A file with columns. `column`: the column of texts, if the caller gives it. `notes`: collected notes to print."""

    path: Path
    column: str | None
    notes: dict[str, None]


class _Columns(NamedTuple):
    """The keys of a row for each role. `others`: metadata; `rivals`: further text keys, in another case or plural."""

    text: tuple[str, ...]
    rivals: tuple[str, ...]
    id: tuple[str, ...]
    category: str | None
    meta: str | None
    others: dict[str, str]


@lru_cache(maxsize=64)
def _columns(keys: tuple[str, ...], column: str | None = None) -> _Columns:
    """Assign the keys of a row to their roles; cached, because a million rows of a file may have the same keys."""
    named = {str(key).strip(): key for key in keys}
    if column is not None:
        text = tuple(named.pop(name) for name in fitting(column, list(named))[:1])
    elif not named.keys() & set(TEXT_KEYS):
        for name in list(named):
            named[singular(name, named)] = named.pop(name)
    if column is None:
        text = tuple(named.pop(key) for key in TEXT_KEYS if key in named)
    rivals = tuple(key for name, key in named.items() if column is None and singular(name, ()) in TEXT_KEYS)
    ids = tuple(named.pop(key) for key in ID_KEYS if key in named)
    return _Columns(text, rivals, ids, named.pop("category", None), named.pop("meta", None), named)


def singular(name: str, taken: Iterable[str]) -> str:
    """Return our column name for a heading in another case or in the plural; return other headings unchanged."""
    ours = {"categories": "category", **{f"{key}s": key for key in (*TEXT_KEYS, *ID_KEYS)}}
    ours_by_case = ours.get(name.lower(), name.lower())
    return ours_by_case if ours_by_case in OUR_COLUMNS and ours_by_case not in taken else name


def prompt_of(source: TableFile, where: str, row: dict[str, Any]) -> Prompt:
    path, columns = source.path, _columns(tuple(row), source.column)
    text = _text(source, row, columns)
    if not isinstance(text, str) or not text.strip():
        there = [f"columns: {', '.join(map(str, row))}"] if 0 < len(row) < 40 else []
        which = f"--prompt-column NAME selects a column, or rename it to {', '.join(TEXT_KEYS)}"
        hint = "; ".join([*there, *source.notes, which])
        lacking = "text" if columns.text or source.column is None else f"column '{source.column}'"
        raise SpecbenchError(f"prompt file '{path}': {where} has no {lacking}", hint)
    text = text.strip()
    if not text.isascii() and any("\ud800" <= character <= "\udfff" for character in text):
        raise SpecbenchError(f"prompt file '{path}': {where} contains an invalid character (lone surrogate)")
    name = _single(path, where, row, columns.id)
    if name.__class__ not in (str, int, type(None)):
        raise SpecbenchError(f"prompt file '{path}': {where}: the id must be text or a whole number, not {name!r:.40}")
    category = row[columns.category] if columns.category else None
    meta = _metadata(path, where, row, columns) if columns.others or columns.meta else {}
    if len(columns.text) > 1:  # LongText-Bench: a prompt, and a list of texts to write
        meta = {key: row[key] for key in columns.text if isinstance(row[key], list) and row[key][:1] != [text]} | meta
    name = text_id(text) if name is None or name == "" else str(name).strip()
    category = "" if category is None else str(category).strip()
    return Prompt(name, text, category or None, meta)


def _text(source: TableFile, row: dict[str, Any], columns: _Columns) -> object:
    """Return a row's text: the first of `prompt`, `text` and `caption` if they differ; of a list, the first text."""
    filled, rivals = ([key for key in keys if row[key] not in (None, "")] for keys in (columns.text, columns.rivals))
    if filled and len({str(row[key]) for key in (*filled, *rivals)}) > 1:
        # `prompt` and `text` are for generation; `caption` may be a description.
        filled.sort(key=lambda key: ("prompt", "text", "caption").index(singular(str(key).strip(), ())))
        other = next(key for key in (*filled, *rivals) if str(row[key]) != str(row[filled[0]]))
        source.notes[f"texts are read from '{filled[0]}', not from '{other}'; to choose: --prompt-column"] = None
    text = row[filled[0]] if filled else None
    if isinstance(text, list) and text:
        source.notes[f"'{filled[0]}' has lists; their first text is used"] = None
        return text[0]
    return text


def _metadata(path: Path, where: str, row: dict[str, Any], columns: _Columns) -> dict[str, Any]:
    meta = {name: row[key] for name, key in columns.others.items() if row[key] is not None and row[key] != ""}
    if columns.meta and isinstance(row[columns.meta], dict):
        meta |= row[columns.meta]
    try:
        return meta and json.loads(json.dumps(meta, default=str, allow_nan=False))  # no types that JSON lacks
    except ValueError:
        raise SpecbenchError(f"prompt file '{path}': {where}: metadata has NaN or infinity", "write null") from None


def _single(path: Path, where: str, row: dict[str, Any], keys: tuple[str, ...]) -> object:
    """Return the value that equivalent columns share, or None if there are none. Reject a row with unequal values."""
    if len(keys) > 1:
        filled = [key for key in keys if row[key] not in (None, "")]
        if any(row[key] != row[filled[0]] for key in filled):
            both = f"both '{filled[0].strip()}' and '{filled[1].strip()}', and they differ"
            raise SpecbenchError(f"prompt file '{path}': {where} has {both}", "remove or rename a column")
    return row[keys[0]] if keys else None
