"""Readers of prompt files: text, JSONL, CSV, TSV, parquet.

Text files have one prompt per line. The other formats need a column `text`, `prompt` or `caption`; `id` (or
`prompt_id`) and `category` are optional, and every other column becomes metadata.
"""

from __future__ import annotations

import csv
import json
from collections.abc import Iterable, Iterator
from pathlib import Path

from specbench.errors import SpecbenchError
from specbench.prompts.prompt_set import Prompt, text_id

MAX_LINE_BYTES = 1_000_000
TEXT_KEYS = ("text", "prompt", "caption")
ID_KEYS = ("id", "prompt_id")


def read_file(path: Path) -> list[Prompt]:
    """Read the prompts of one file, in order.

    Raises:
        SpecbenchError: names the file and the line, if any.
    """
    if path.is_dir():
        raise SpecbenchError(f"prompt file '{path}' is a folder")
    try:
        return list(_READERS.get(path.suffix.lower(), _read_text)(path))
    except OSError as error:
        raise SpecbenchError(f"prompt file '{path}' cannot be read: {error.strerror or error}") from None


def _lines(path: Path) -> Iterator[tuple[int, str]]:
    """Iterate over numbered lines with their line ends; an over-long line is rejected before it is read fully."""
    with path.open("rb") as file:
        number = 0
        while raw := file.readline(MAX_LINE_BYTES + 1):
            number += 1
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


_FORMATS = "formats: .txt (one prompt per line), .jsonl, .csv, .tsv, .parquet"


def _read_text(path: Path) -> Iterator[Prompt]:
    for _, line in _lines(path):
        if text := line.strip():
            yield Prompt(text_id(text), text)


def _read_jsonl(path: Path) -> Iterator[Prompt]:
    for number, line in _lines(path):
        if not line.strip():
            continue
        try:
            row = json.loads(line)
        except (ValueError, RecursionError):
            raise SpecbenchError(f"prompt file '{path}': line {number} is not JSON") from None
        if not isinstance(row, dict):
            raise SpecbenchError(f"prompt file '{path}': line {number} is not a JSON object")
        yield _prompt(path, f"line {number}", row)


def _read_csv(path: Path) -> Iterator[Prompt]:
    delimiter = "\t" if path.suffix.lower() == ".tsv" else ","
    rows = csv.DictReader((line for _, line in _lines(path)), delimiter=delimiter, strict=True)
    try:
        for row in rows:
            extra = row.pop(None, None)
            if extra is not None:
                raise SpecbenchError(f"prompt file '{path}': line {rows.line_num} has more fields than the header")
            yield _prompt(path, f"line {rows.line_num}", row)
    except csv.Error as error:
        raise SpecbenchError(f"prompt file '{path}': line {rows.line_num}: {error}") from None


def _read_parquet(path: Path) -> Iterator[Prompt]:
    import pyarrow
    import pyarrow.parquet

    try:
        rows: Iterable[dict] = pyarrow.parquet.read_table(path).to_pylist()
    except (pyarrow.ArrowException, OSError, ValueError, OverflowError) as error:
        reason = str(error).splitlines()[0] if str(error) else type(error).__name__
        raise SpecbenchError(f"prompt file '{path}' is not a parquet file: {reason}") from None
    for number, row in enumerate(rows, 1):
        yield _prompt(path, f"row {number}", row)


_READERS = {
    ".jsonl": _read_jsonl,
    ".ndjson": _read_jsonl,
    ".csv": _read_csv,
    ".tsv": _read_csv,
    ".parquet": _read_parquet,
}


def _prompt(path: Path, where: str, row: dict) -> Prompt:
    row = {str(key).strip(): value for key, value in row.items()}
    text = _take(row, TEXT_KEYS)
    if not isinstance(text, str) or not text.strip():
        raise SpecbenchError(
            f"prompt file '{path}': {where} has no text", f"name the column one of: {', '.join(TEXT_KEYS)}"
        )
    text = text.strip()
    if not text.isascii() and any("\ud800" <= character <= "\udfff" for character in text):
        raise SpecbenchError(f"prompt file '{path}': {where} contains an invalid character (lone surrogate)")
    name = _take(row, ID_KEYS)
    if isinstance(name, bool) or not isinstance(name, str | int | None):
        raise SpecbenchError(f"prompt file '{path}': {where}: the id must be text or a whole number, not {name!r:.40}")
    category = _take(row, ("category",))
    extra = row.pop("meta", None)
    meta = {key: value for key, value in row.items() if value is not None and value != ""}
    if isinstance(extra, dict):
        meta |= extra
    meta = json.loads(json.dumps(meta, default=str))  # parquet has types without a JSON equivalent
    return Prompt(text_id(text) if name in (None, "") else str(name).strip(), text, category and str(category), meta)


def _take(row: dict, keys: tuple[str, ...]) -> object:
    found = [row.pop(key) for key in keys if key in row]
    return found[0] if found else None
