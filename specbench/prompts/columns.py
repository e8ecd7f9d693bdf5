"""Rows of prompt files as prompts: which column of a row holds what."""

from __future__ import annotations

import json
from collections.abc import Iterable
from functools import lru_cache
from pathlib import Path
from typing import NamedTuple

from specbench.errors import SpecbenchError
from specbench.names import fitting
from specbench.prompts.prompt_set import Prompt, text_id

TEXT_KEYS = ("text", "prompt", "caption")
_BY_MEANING = ("prompt", "text", "caption")
"""Text columns from the one that is meant for generation to the one that describes."""
ID_KEYS = ("id", "prompt_id")
OUR_COLUMNS = (*TEXT_KEYS, *ID_KEYS, "category", "meta")
"""Columns that the header of a CSV or TSV file may name in any case."""
_ID_TYPES = (str, int, type(None))


class TableFile(NamedTuple):
    """A file with columns; `column` is the one that was named, `said` what had to be decided."""

    path: Path
    column: str | None
    said: dict[str, None]


class _Columns(NamedTuple):
    """Which keys of a row hold what; `others` are metadata, by their names without surrounding white space."""

    text: tuple[str, ...]
    id: tuple[str, ...]
    category: str | None
    meta: str | None
    others: dict[str, str]


@lru_cache(maxsize=64)
def _columns(keys: tuple[str, ...], column: str | None = None) -> _Columns:
    """The columns of rows with these keys: most rows of a file have the same, and a file may have a million."""
    named = {str(key).strip(): key for key in keys}
    if column is not None:
        text = tuple(named.pop(name) for name in fitting(column, list(named))[:1])
    elif not named.keys() & set(TEXT_KEYS):
        named = {singular(name, named): key for name, key in named.items()}
    if column is None:
        text = tuple(named.pop(key) for key in TEXT_KEYS if key in named)
    ids = tuple(named.pop(key) for key in ID_KEYS if key in named)
    return _Columns(text, ids, named.pop("category", None), named.pop("meta", None), named)


def singular(name: str, taken: Iterable[str]) -> str:
    """The column of ours that a heading in another case or in the plural names; of none, the heading."""
    ours = {"categories": "category", **{f"{known}s": known for known in (*TEXT_KEYS, *ID_KEYS)}}
    found = ours.get(name.lower(), name.lower())
    return found if found in OUR_COLUMNS and found not in taken else name


def prompt_of(source: TableFile, where: str, row: dict) -> Prompt:
    path, columns = source.path, _columns(tuple(row), source.column)
    text = _text(source, row, columns.text)
    if not isinstance(text, str) or not text.strip():
        there = f"columns: {', '.join(map(str, row))}; " if len(row) < 40 else ""
        hint = f"{there}--prompt-column NAME says which one, or call it {', '.join(TEXT_KEYS)}"
        lacking = "text" if columns.text or source.column is None else f"column '{source.column}'"
        raise SpecbenchError(f"prompt file '{path}': {where} has no {lacking}", hint)
    text = text.strip()
    if not text.isascii() and any("\ud800" <= character <= "\udfff" for character in text):
        raise SpecbenchError(f"prompt file '{path}': {where} contains an invalid character (lone surrogate)")
    name = _single(path, where, row, columns.id)
    if name.__class__ not in _ID_TYPES:
        raise SpecbenchError(f"prompt file '{path}': {where}: the id must be text or a whole number, not {name!r:.40}")
    category = row[columns.category] if columns.category else None
    meta = _metadata(path, where, row, columns) if columns.others or columns.meta else {}
    name = text_id(text) if name is None or name == "" else str(name).strip()
    return Prompt(name, text, category and str(category).strip(), meta)


def _text(source: TableFile, row: dict, keys: tuple[str, ...]) -> object:
    """The text of a row: of `prompt`, `text` and `caption` that differ, the first of these; of a list, its first."""
    given = [key for key in keys if row[key] not in (None, "")]
    if len(given) > 1 and len({str(row[key]) for key in given}) > 1:
        given.sort(key=lambda key: _BY_MEANING.index(singular(str(key).strip(), ())))
        source.said[f"texts are those of '{given[0]}', not of '{given[1]}'; --prompt-column says which"] = None
    text = row[given[0]] if given else None
    if isinstance(text, list) and text:
        source.said[f"'{given[0]}' has lists, of which the first text is taken"] = None
        return text[0]
    return text


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
