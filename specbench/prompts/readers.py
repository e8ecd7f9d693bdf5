"""Readers of prompt files: text, JSON, JSONL, CSV, TSV, parquet.

Text files have one prompt per line. The other formats need a column `text`, `prompt` or `caption`; `id` (or
`prompt_id`) and `category` are optional, and every other column becomes metadata. A JSON file holds one list, of
objects with such keys or of texts.
"""

from __future__ import annotations

import csv
import json
import os
import sys
import tempfile
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from functools import cache, lru_cache
from itertools import islice
from pathlib import Path
from typing import NamedTuple

from specbench.errors import SpecbenchError
from specbench.prompts.prompt_set import Prompt, second_stage_id, text_id
from specbench.system.files import blaming, check_regular, read_regular
from specbench.system.json_values import parse_json

MAX_LINE_BYTES = 1_000_000
MAX_PROMPTS = 1_000_000
MAX_FILE_BYTES = 2**28
TEXT_KEYS = ("text", "prompt", "caption")
ID_KEYS = ("id", "prompt_id")
TEXT_SUFFIXES = ("", ".txt", ".text", ".md", ".prompts")
_KNOWN = (*TEXT_KEYS, *ID_KEYS, "category", "meta")
"""Columns that the header of a CSV or TSV file may name in any case."""


def read_file(path: Path) -> list[Prompt]:
    """Read the prompts of one file, in order.

    Raises:
        SpecbenchError: names the file and the line, if any.
    """
    suffix = path.suffix.lower()
    reader = _read_text if suffix in TEXT_SUFFIXES else _READERS.get(suffix)
    if (path / "samples").is_dir():
        reader = _read_run
    elif path.is_dir():
        raise SpecbenchError(f"prompt file '{path}' is a folder, of no run")
    if reader is None:
        raise SpecbenchError(f"prompt file '{path}' has the unknown suffix {suffix}", _FORMATS)
    try:
        if reader is not _read_run:
            check_regular(path)  # a pipe may be waited for, and cannot be read again to resume a run
        found = list(islice(reader(path), MAX_PROMPTS + 1))
    except OSError as error:
        raise SpecbenchError(f"prompt file '{path}' cannot be read: {error.strerror or error}") from None
    if len(found) > MAX_PROMPTS:
        raise _too_many(path)
    _refuse_repeated(path, found)
    return [prompt for _, prompt in found]


def read_stdin() -> list[Prompt]:
    """Read the prompts of stdin, once a process: one per line, or JSONL where the first line is a JSON object."""
    text = _stdin()
    if len(text) > MAX_FILE_BYTES:
        raise SpecbenchError(f"stdin has more than {MAX_FILE_BYTES:,} bytes", "name a file")
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


def _refuse_repeated(path: Path, found: Iterable[tuple[str, Prompt]]) -> None:
    seen: dict[str, tuple[str, str]] = {}
    for where, prompt in found:
        if prompt.id in seen:
            first, text = seen[prompt.id]
            if text == prompt.text:
                what, fix = f"are both '{text:.60}'", "remove one; for several images of a prompt: --samples"
            else:
                what, fix = f"both have the id '{prompt.id:.60}'", "ids must be unique"
            kind, _, number = first.partition(" ")
            raise SpecbenchError(f"prompt file '{path}': {kind}s {number} and {where.partition(' ')[2]} {what}", fix)
        seen[prompt.id] = where, prompt.text


def _too_many(path: Path) -> SpecbenchError:
    return SpecbenchError(f"prompt file '{path}' has more than {MAX_PROMPTS:,} prompts", "split it")


def _lines(path: Path) -> Iterator[tuple[int, str]]:
    """Iterate over numbered lines with their line ends, LF, CRLF or CR; an over-long line is rejected before it is
    read fully."""
    with path.open(encoding="latin-1", newline="") as file:  # a character a byte, and every kind of line end
        number = size = 0
        while line := file.readline(MAX_LINE_BYTES + 1):
            raw = line.encode("latin-1")
            number, size = number + 1, size + len(raw)
            if size > MAX_FILE_BYTES:
                raise SpecbenchError(f"prompt file '{path}' is larger than {MAX_FILE_BYTES:,} bytes", "split it")
            if b"\0" in raw:
                raise SpecbenchError(f"prompt file '{path}' is binary (NUL byte in line {number})", _FORMATS)
            if len(raw) > MAX_LINE_BYTES:
                raise SpecbenchError(
                    f"prompt file '{path}': line {number} is longer than {MAX_LINE_BYTES:,} bytes", _FORMATS
                )
            try:
                yield number, raw.decode("utf-8-sig" if number == 1 else "utf-8")
            except UnicodeDecodeError:
                raise SpecbenchError(f"prompt file '{path}': line {number} is not UTF-8 text", _FORMATS) from None


def _read_run(folder: Path) -> Iterator[tuple[str, Prompt]]:
    """The images of a run of a first stage as prompts of the second: their tokens as codes ("<I5>")."""
    import pyarrow.parquet as pq  # not for other files

    names = ["prompt_id", "sample", "status", "category", "meta", "tokens", "facts"]
    with blaming(folder / "samples", "holds no images of a run: {}"):
        rows = pq.read_table(folder / "samples", columns=names).to_pylist()
        if not any("stage2_nfe" in parse_json(row["facts"] or "{}") for row in rows):
            raise SpecbenchError(
                f"'{folder}' is no run of a model with a second stage", "name one of tar-1.5b or tar-7b"
            )
        latest = {second_stage_id(row["prompt_id"], row["sample"]): row for row in rows if row["status"] == "ok"}
        for name, row in latest.items():
            text = "".join(f"<I{token}>" for token in row["tokens"])
            meta = parse_json(row["meta"] or "{}") | {"codes": len(row["tokens"])}
            yield f"image {name}", Prompt(name, text, row["category"], meta)


_FORMATS = "formats: .txt (one prompt per line), .json, .jsonl, .csv, .tsv, .parquet"


def _read_text(path: Path) -> Iterator[tuple[str, Prompt]]:
    for number, line in _lines(path):
        if text := line.strip():
            yield f"line {number}", Prompt(text_id(text), text)


def _read_jsonl(path: Path) -> Iterator[tuple[str, Prompt]]:
    for number, line in _lines(path):
        if not line.strip():
            continue
        try:
            row = parse_json(line)
        except ValueError as error:
            raise SpecbenchError(f"prompt file '{path}': line {number} is not JSON ({error})") from None
        if not isinstance(row, dict):
            raise SpecbenchError(f"prompt file '{path}': line {number} is not a JSON object")
        yield f"line {number}", _prompt(path, f"line {number}", row)


def _read_json(path: Path) -> Iterator[tuple[str, Prompt]]:
    try:
        rows = parse_json(read_regular(path, MAX_FILE_BYTES).decode("utf-8-sig"))
    except ValueError as error:
        raise SpecbenchError(f"prompt file '{path}' is not JSON ({error})") from None
    if not isinstance(rows, list) or not all(isinstance(row, str | dict) for row in rows):
        raise SpecbenchError(f"prompt file '{path}' is not a list of objects or texts", _FORMATS)
    for number, row in enumerate(rows, 1):
        yield f"entry {number}", _prompt(path, f"entry {number}", {"text": row} if isinstance(row, str) else row)


def _read_csv(path: Path) -> Iterator[tuple[str, Prompt]]:
    """Quotes enclose fields of CSV files. In TSV files, where no field needs them, they are part of the text if they
    enclose only a part of a field."""
    if (delimiter := _delimiter(path)) != "\t":
        yield from _rows(path, delimiter, csv.QUOTE_MINIMAL)
        return
    try:
        yield from list(_rows(path, "\t", csv.QUOTE_MINIMAL))
    except SpecbenchError as error:
        if not isinstance(error.__cause__, csv.Error):
            raise
        yield from _rows(path, "\t", csv.QUOTE_NONE)


def _delimiter(path: Path) -> str:
    """What separates the headings: that of the file's ending, unless only another one separates one of a text."""
    usual = "\t" if path.suffix.lower() == ".tsv" else ","
    _, header = next(_lines(path), (0, ""))

    def separates(delimiter: str) -> bool:
        return any(_known(name.strip().strip('"')) in TEXT_KEYS for name in header.split(delimiter))

    return next(filter(separates, (usual, ";", "\t", ",")), usual)


def _rows(path: Path, delimiter: str, quoting: int) -> Iterator[tuple[str, Prompt]]:
    lines = (line for _, line in _lines(path))
    rows = csv.DictReader(lines, delimiter=delimiter, quoting=quoting, strict=True)
    try:
        rows.fieldnames = [_known(name) for name in rows.fieldnames or ()]
        _check_columns(path, rows.fieldnames)
        for row in rows:
            extra = row.pop(None, None)
            if extra is not None:
                raise SpecbenchError(f"prompt file '{path}': line {rows.line_num} has more fields than the header")
            yield f"line {rows.line_num}", _prompt(path, f"line {rows.line_num}", row)
    except csv.Error as error:
        raise SpecbenchError(f"prompt file '{path}': line {rows.line_num}: {error}") from error


def _known(heading: str) -> str:
    """The name of a column of ours in lower case, whatever its case."""
    name = heading.strip().lower()
    return name if name in _KNOWN else heading


def _read_parquet(path: Path) -> Iterator[tuple[str, Prompt]]:
    import pyarrow  # only for parquet files
    import pyarrow.parquet

    with (
        blaming(path, "is not a parquet file: {}"),
        pyarrow.parquet.ParquetFile(pyarrow.OSFile(os.fsencode(path))) as file,
    ):
        if file.metadata.num_rows > MAX_PROMPTS:
            raise _too_many(path)
        _check_columns(path, file.schema_arrow.names)
        batches = file.iter_batches(_BATCH, use_threads=False)
        rows: Iterable[dict] = (row for batch in batches for row in batch.to_pylist())
        for number, row in enumerate(rows, 1):
            yield f"row {number}", _prompt(path, f"row {number}", row)


def _check_columns(path: Path, names: Sequence[str]) -> None:
    """Refuse a column that is there twice: which one counts would be a guess."""
    counts = Counter(str(name).strip() for name in names)
    if repeated := next((name for name, count in counts.items() if count > 1), None):
        raise SpecbenchError(f"prompt file '{path}' has two columns '{repeated}'", "remove or rename one")


_BATCH = 1024
_READERS = {
    ".json": _read_json,
    ".jsonl": _read_jsonl,
    ".ndjson": _read_jsonl,
    ".csv": _read_csv,
    ".tsv": _read_csv,
    ".parquet": _read_parquet,
}


_ID_TYPES = (str, int, type(None))


class _Columns(NamedTuple):
    """Which keys of a row hold what; `others` are metadata, by their names without surrounding white space."""

    text: tuple[str, ...]
    id: tuple[str, ...]
    category: str | None
    meta: str | None
    others: dict[str, str]


@lru_cache(maxsize=64)
def _columns(keys: tuple[str, ...]) -> _Columns:
    """The columns of rows with these keys: most rows of a file have the same, and a file may have a million."""
    named = {str(key).strip(): key for key in keys}
    text = tuple(named.pop(key) for key in TEXT_KEYS if key in named)
    ids = tuple(named.pop(key) for key in ID_KEYS if key in named)
    return _Columns(text, ids, named.pop("category", None), named.pop("meta", None), named)


def _prompt(path: Path, where: str, row: dict) -> Prompt:
    columns = _columns(tuple(row))
    text = _single(path, where, row, columns.text)
    if not isinstance(text, str) or not text.strip():
        raise SpecbenchError(
            f"prompt file '{path}': {where} has no text", f"name the column one of: {', '.join(TEXT_KEYS)}"
        )
    text = text.strip()
    if not text.isascii() and any("\ud800" <= character <= "\udfff" for character in text):
        raise SpecbenchError(f"prompt file '{path}': {where} contains an invalid character (lone surrogate)")
    name = _single(path, where, row, columns.id)
    if name.__class__ not in _ID_TYPES:
        raise SpecbenchError(f"prompt file '{path}': {where}: the id must be text or a whole number, not {name!r:.40}")
    category = row[columns.category] if columns.category else None
    meta = _metadata(path, where, row, columns) if columns.others or columns.meta else {}
    name = text_id(text) if name is None or name == "" else str(name).strip()
    return Prompt(name, text, category and str(category), meta)


def _metadata(path: Path, where: str, row: dict, columns: _Columns) -> dict:
    meta = {name: row[key] for name, key in columns.others.items() if row[key] is not None and row[key] != ""}
    if columns.meta and isinstance(row[columns.meta], dict):
        meta |= row[columns.meta]
    try:
        return meta and json.loads(json.dumps(meta, default=str, allow_nan=False))  # parquet has types unknown to JSON
    except ValueError:
        raise SpecbenchError(f"prompt file '{path}': {where}: NaN and infinity are no metadata", "write null") from None


def _single(path: Path, where: str, row: dict, keys: tuple[str, ...]) -> object:
    """The value of the first of these columns of one meaning, None if there is none; a row in which they differ is
    refused: which one counts would be a guess."""
    if len(keys) > 1:
        given = [key for key in keys if row[key] not in (None, "")]
        if any(row[key] != row[given[0]] for key in given):
            both = f"both '{given[0].strip()}' and '{given[1].strip()}', and they differ"
            raise SpecbenchError(f"prompt file '{path}': {where} has {both}", "remove or rename one")
    return row[keys[0]] if keys else None
