"""Prompts of a large file of plain rows, kept as columns: a Python object is made of those that are used alone.

A file of a million lines takes nine seconds to read line by line and two by columns. Columns are only made where they
say the same as reading by lines: ASCII text without escapes, quotes inside a field or metadata, an id for every row,
nothing repeated or missing. Everything else, and everything that is refused, is left to `specbench.prompts.readers`.
"""

from __future__ import annotations

import csv
import hashlib
import json
from collections.abc import Iterable, Iterator, Sequence
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, overload

from specbench.prompts.prompt import MAX_ID_CHARS, MAX_PROMPT_CHARS, Prompt

if TYPE_CHECKING:
    import pyarrow as pa

LARGE_BYTES = 4_000_000
"""Smaller files are read sooner than pyarrow is imported."""
_PLAIN = bytes(set(range(0x20, 0x7F)) - {ord("\\")} | {ord("\n")})
_DIGESTED_AT_ONCE = 100_000


class PromptColumns(Sequence[Prompt]):
    """Prompts in file order, made when they are asked for.

    Args:
        ids, texts, categories: columns of strings without nulls; categories may be None, or have nulls.
    """

    def __init__(self, ids: pa.Array, texts: pa.Array, categories: pa.Array | None):
        self._ids, self._texts, self._categories = ids, texts, categories

    def __len__(self) -> int:
        return len(self._ids)

    @overload
    def __getitem__(self, place: int) -> Prompt: ...

    @overload
    def __getitem__(self, place: slice) -> Sequence[Prompt]: ...

    def __getitem__(self, place: int | slice) -> Prompt | Sequence[Prompt]:
        if isinstance(place, slice):
            categories = None if self._categories is None else self._categories[place]
            return PromptColumns(self._ids[place], self._texts[place], categories)
        if not -len(self) <= place < len(self):
            raise IndexError(place)
        category = None if self._categories is None else self._categories[place].as_py()
        return Prompt(self._ids[place].as_py(), self._texts[place].as_py(), category)

    def __iter__(self) -> Iterator[Prompt]:
        ids, texts = self._ids.to_pylist(), self._texts.to_pylist()
        if self._categories is None:
            return map(Prompt, ids, texts)
        return map(Prompt, ids, texts, self._categories.to_pylist())

    def having(self, ids: Iterable[str]) -> PromptColumns:
        """The prompts with these ids, in file order."""
        import pyarrow as pa  # there are no columns without it
        import pyarrow.compute as pc

        chosen = pc.is_in(self._ids, value_set=pa.array(list(ids), pa.string()))
        categories = None if self._categories is None else self._categories.filter(chosen)
        return PromptColumns(self._ids.filter(chosen), self._texts.filter(chosen), categories)

    @cached_property
    def _by_id(self) -> pa.Array:
        """Places of the prompts, sorted by id."""
        import pyarrow.compute as pc  # there are no columns without it

        return pc.sort_indices(self._ids)

    def repeats_an_id(self) -> bool:
        import pyarrow.compute as pc  # there are no columns without it

        ids = self._ids.take(self._by_id)
        return bool(pc.any(pc.equal(ids[1:], ids[:-1])).as_py())

    def sha256(self) -> str:
        """As `content_sha256` of these prompts."""
        import pyarrow.compute as pc  # there are no columns without it

        digest = hashlib.sha256()
        for start in range(0, len(self), _DIGESTED_AT_ONCE):
            rows = self._rows(self._by_id[start : start + _DIGESTED_AT_ONCE])
            digest.update(memoryview(rows.buffers()[2])[: pc.sum(pc.binary_length(rows)).as_py()])
        return digest.hexdigest()

    def _rows(self, places: pa.Array) -> pa.Array:
        """Lines of JSON that the digest is taken of."""
        import pyarrow.compute as pc  # there are no columns without it

        category = "null"
        if self._categories is not None:
            quoted = pc.binary_join_element_wise('"', self._categories.take(places), '"', "")
            category = pc.fill_null(quoted, "null")
        ids, texts = self._ids.take(places), self._texts.take(places)
        return pc.binary_join_element_wise('["', ids, '","', texts, '",', category, ",{}]\n", "")


def read_columns(path: Path, text_keys: Sequence[str], id_keys: Sequence[str], limit: int) -> PromptColumns | None:
    """Read a large JSONL or CSV file of plain rows; None for any other, which must be read by lines.

    Args:
        text_keys, id_keys: names of the columns of texts and of ids; each row needs one of each, and may have a
            category.
        limit: bytes above which a file is left to reading by lines.

    Raises:
        OSError: refused by the operating system.
    """
    suffix = path.suffix.lower()
    if suffix not in _TABLES or not LARGE_BYTES <= path.stat().st_size <= limit:
        return None
    content = path.read_bytes()
    first, _, rest = content.partition(b"\n")
    names = _TABLES[suffix][0](first)
    roles = {name: role for role, known in ((0, text_keys), (1, id_keys), (2, ("category",))) for name in known}
    if (
        content.translate(None, _PLAIN)
        or not rest
        or sorted(roles.get(name, -1) for name in names) not in ([0, 1], [0, 1, 2])
    ):
        return None
    table = _TABLES[suffix][1](content, names)
    if table is None:
        return None
    by_role = {roles[name]: table[name].combine_chunks() for name in names}
    found = PromptColumns(by_role[1], by_role[0], by_role.get(2))
    plain = _is_plain(by_role[0], MAX_PROMPT_CHARS) and _is_plain(by_role[1], MAX_ID_CHARS)
    return found if plain and not found.repeats_an_id() else None


def _is_plain(column: pa.Array, longest: int) -> bool:
    """Whether every row has a text of at most `longest` characters without blanks around it."""
    import pyarrow.compute as pc  # there are no columns without it

    if not len(column) or column.null_count:
        return False
    lengths = pc.min_max(pc.binary_length(column)).as_py()
    blank = pc.or_(pc.starts_with(column, " "), pc.ends_with(column, " "))
    return lengths["min"] >= 1 and lengths["max"] <= longest and not pc.any(blank).as_py()


def _json_names(line: bytes) -> list[str]:
    try:
        row = json.loads(line)
    except ValueError:
        return []
    return list(row) if isinstance(row, dict) else []


def _json_table(content: bytes, names: Sequence[str]) -> pa.Table | None:
    """Rows of one object per line whose values are all text (a category may be null)."""
    import pyarrow as pa  # only for large files
    import pyarrow.json

    lines = content.count(b"\n") + (not content.endswith(b"\n"))
    # An object is on one line where every line begins and ends with a brace and there is an object for each: values
    # are text, so none is inside another.
    if content.count(b"\n{") + 1 != lines or content.count(b"}\n") + content.endswith(b"}") != lines:
        return None
    schema = pa.schema([(name, pa.string()) for name in names])
    options = pyarrow.json.ParseOptions(explicit_schema=schema, unexpected_field_behavior="error")
    try:
        table = pyarrow.json.read_json(
            pa.BufferReader(content), pyarrow.json.ReadOptions(use_threads=False), parse_options=options
        )
    except pa.ArrowException:  # reading by lines says what is wrong
        return None
    return table if table.num_rows == lines else None


def _csv_names(line: bytes) -> list[str]:
    return next(csv.reader([line.decode("ascii", "replace")]), [])


def _csv_table(content: bytes, names: Sequence[str]) -> pa.Table | None:
    """Rows without quoted fields."""
    import pyarrow as pa  # only for large files
    import pyarrow.csv

    if b'"' in content or b"\n\n" in content or len(set(names)) < len(names):
        return None
    types = pyarrow.csv.ConvertOptions(column_types=dict.fromkeys(names, pa.string()), strings_can_be_null=False)
    try:
        return pyarrow.csv.read_csv(
            pa.BufferReader(content),
            pyarrow.csv.ReadOptions(use_threads=False),
            pyarrow.csv.ParseOptions(quote_char=False),
            types,
        )
    except pa.ArrowException:  # reading by lines says what is wrong
        return None


_TABLES = {
    ".jsonl": (_json_names, _json_table),
    ".ndjson": (_json_names, _json_table),
    ".csv": (_csv_names, _csv_table),
}
