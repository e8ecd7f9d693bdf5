"""Append-only parquet log: a folder of parquet files ("parts") that stays valid if a writer is killed.

The name of a part consists of its range of appends and its digest (`00000003-00000003-<digest>.parquet`). A part is
written to a temporary file, synced and renamed. A part within another part's range is left over from a merge and
ignored. There is one writer at a time (the caller holds the lock) and any number of readers.
"""

from __future__ import annotations

import hashlib
import os
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from specbench.errors import FAILURE, SpecbenchError
from specbench.store.run_info import FORMER_NAMES, SCHEMA_VERSION, check_version
from specbench.system.files import blaming, check_regular, write_atomically

_VERSION_KEY = b"specbench.schema"
_DERIVED_KEY = b"specbench.derived"
_NAME = re.compile(r"(\d{8,})-(\d{8,})(?:-([0-9a-f]{16}))?\.parquet")  # the first schema version has no digest
_DAMAGED = (
    "is damaged: not a readable parquet part",
    "the file was changed after specbench wrote it; delete it and run again: only its rows are decoded again",
)
_FAN_IN = 64
_LEVELS = (_FAN_IN, _FAN_IN**2)
_REREADS = 20
_CHUNK = 2**20
_FEW = 1000  # Up to this many rows, a set of keys is faster than a data frame
_COMPUTED_AT_ONCE = 4096  # Rows per batch when derived columns are computed, because their source columns are large


@dataclass(frozen=True)
class Derived:
    """Columns computed from other columns of the same row. Every part also stores these columns, so that readers need
    not compute them. They are not in the schema, and are read only if a reader requests them by name.
    """

    # version of `compute`; columns of other versions are computed again
    version: str
    schema: pa.Schema  # schema of the derived columns
    sources: tuple[str, ...]  # the columns that `compute` needs
    compute: Callable[[pa.Table], pa.Table]  # maps a table of the `sources` to a table of the columns


class ParquetLog:
    """Parquet log in `folder`. Rows have the columns of `schema`, and a later row replaces an earlier row with the same
    `key`. Readers can also request the columns of `derived`. `owner` returns the columns that have the same value in
    all rows; parts of older versions lack these columns."""

    def __init__(
        self,
        folder: Path,
        schema: pa.Schema,
        key: Sequence[str],
        derived: Derived | None = None,
        owner: Callable[[], Mapping[str, object]] = dict,
    ):
        self.folder = folder
        self.schema = schema.with_metadata({**(schema.metadata or {}), _VERSION_KEY: str(SCHEMA_VERSION)})
        self.key = tuple(key)
        self.derived = derived
        self.owner = owner

    def append(self, rows: Iterable[Mapping[str, object]]) -> None:
        """Write `rows` to disk atomically as one part."""
        owner = self.owner()
        self.append_table(pa.Table.from_pylist([{**row, **owner} for row in rows], schema=self.schema))

    def append_table(self, rows: pa.Table) -> None:
        """Append a table. Missing columns get the owner's values; columns that the owner lacks are null."""
        live = self._live()
        number = live[-1][1] + 1 if live else 0
        self._write(number, number, completed(rows, self.schema, self.owner))
        for width in _LEVELS:
            self._merge_tail(width, at_least=_FAN_IN)

    def compact(self) -> None:
        """Merge the small parts at the end of the log, and drop replaced rows."""
        self._merge_tail(_LEVELS[-1], at_least=2)
        kept = self.read(columns=[]).num_rows  # raises an error if a part is damaged
        live = self._live()
        if sum(pq.read_metadata(pa.OSFile(os.fsencode(path))).num_rows for _, _, path in live) > kept:
            self._merge(live)

    def upgrade(self) -> None:
        """Rewrite the parts of older schema versions."""
        for first, last, path in self._live():
            with ParquetFile(path, self.owner) as part:
                table = part.read(self.schema) if part.version < SCHEMA_VERSION else None
            if table is not None and self._write(first, last, table) != path:
                path.unlink()

    def clean(self) -> None:
        """Remove leftovers of an interrupted write or merge."""
        live = {path for _, _, path in self._live()}
        for path in self.folder.iterdir() if self.folder.is_dir() else ():
            stray_part = _NAME.fullmatch(path.name) and path not in live
            if stray_part or (path.name.startswith(".") and path.name.endswith(".tmp")):
                path.unlink()

    def read(self, columns: Sequence[str] | None = None) -> pa.Table:
        """Read the log as one table with the last row of each key, in the order of writing."""
        names = self.schema.names if columns is None else columns
        return pa.concat_tables([self.no_rows(names), *self.batches(names)])

    def no_rows(self, columns: Sequence[str]) -> pa.Table:
        """Make an empty table with the columns that `batches` yields."""
        return self._with_key(columns).empty_table()

    def batches(self, columns: Sequence[str], size: int = 65_536) -> Iterator[pa.Table]:
        """Read the log in batches of at most `size` rows; concurrent merges have no effect."""
        schema = self._with_key(columns)
        with ExitStack() as stack:
            parts = self._open_all(stack)
            for part in parts:
                part.check_owner()
            kept = _last_of_each([part.read(self._with_key(())) for part in parts])
            first = 0
            for table in chain.from_iterable(self._batches(part, schema, size) for part in parts):
                mask = kept[first : first + len(table)]
                first += len(table)
                yield table if mask.all() else table.filter(pa.array(mask))

    def _batches(self, part: ParquetFile, schema: pa.Schema, size: int) -> Iterator[pa.Table]:
        """Read one part. Derived columns are computed if the part does not store their current version."""
        derived = self.derived
        missing = [] if derived is None or part.derived == derived.version else derived.schema.names
        missing = [name for name in missing if name in schema.names]
        if derived is None or not missing:
            yield from part.batches(schema, size)
            return
        stored = self._with_key([*(name for name in schema.names if name not in missing), *derived.sources])
        for table in part.batches(stored, min(size, _COMPUTED_AT_ONCE)):
            yield _joined(table, derived.compute(table)).select(schema.names)

    def _with_key(self, columns: Sequence[str]) -> pa.Schema:
        fields = {field.name: field for field in (*self.schema, *(self.derived.schema if self.derived else ()))}
        return pa.schema([fields[name] for name in dict.fromkeys([*self.key, *columns])])

    def _open_all(self, stack: ExitStack) -> list[ParquetFile]:
        """Open the live parts. Open parts stay readable if a writer merges them."""
        for _ in range(_REREADS):
            try:
                return [stack.enter_context(ParquetFile(path, self.owner)) for _, _, path in self._settled()]
            except FileNotFoundError:
                continue  # a writer merged this part between listing and opening
        raise SpecbenchError(f"{self.folder} changes faster than it can be read", "try again", FAILURE)

    def _settled(self) -> list[tuple[int, int, Path]]:
        """Repeat `_live` until two listings agree: a listing may miss files that a concurrent merge renames."""
        live = self._live()
        while (again := self._live()) != live:
            live = again
        return live

    def _live(self) -> list[tuple[int, int, Path]]:
        """List (first, last, path) of the live parts, in order."""
        if not self.folder.is_dir():
            return []
        named = ((_NAME.fullmatch(path.name), path) for path in self.folder.iterdir())
        ranges = sorted(
            ((int(name[1]), int(name[2]), path) for name, path in named if name), key=lambda part: (part[0], -part[1])
        )
        live: list[tuple[int, int, Path]] = []
        for part in ranges:
            if not live or part[0] > live[-1][1]:
                live.append(part)
        return live

    def _merge_tail(self, width: int, at_least: int) -> None:
        live = self._live()
        tail: list[tuple[int, int, Path]] = []
        while live and live[-1][1] - live[-1][0] + 1 < width:
            tail.insert(0, live.pop())
        if len(tail) >= at_least:
            self._merge(tail)

    def _merge(self, parts: list[tuple[int, int, Path]]) -> None:
        tables = []
        for _, _, path in parts:
            with ParquetFile(path, self.owner) as part:
                tables.append(part.read(self.schema))
        kept = _last_of_each([table.select(list(self.key)) for table in tables])
        target = self._write(parts[0][0], parts[-1][1], pa.concat_tables(tables).filter(pa.array(kept)))
        for _, _, path in parts:
            if path != target:
                path.unlink()

    def _write(self, first: int, last: int, table: pa.Table) -> Path:
        sink, metadata = pa.BufferOutputStream(), dict(self.schema.metadata)
        if self.derived is not None:
            table = _joined(table, self.derived.compute(table.select(self.derived.sources)))
            metadata[_DERIVED_KEY] = self.derived.version
        floats = [f"{field.name}.list.element" for field in self.schema if field.type == pa.list_(pa.float32())]
        pq.write_table(
            table.replace_schema_metadata(metadata),
            sink,
            compression="zstd",
            use_dictionary=False,  # a dictionary of probabilities would be larger than the data
            use_byte_stream_split=floats,
        )
        data = sink.getvalue()
        path = self.folder / f"{first:08d}-{last:08d}-{_digest([data])}.parquet"
        write_atomically(path, data.to_pybytes())
        return path


class ParquetFile:
    """One open part; read errors are SpecbenchErrors that name the file."""

    def __init__(self, path: Path, owner: Callable[[], Mapping[str, object]] = dict):
        self._path, self._owner = path, owner
        os.stat(path)  # FileNotFoundError if a writer has merged the part, which is no damage
        with blaming(self._path, *_DAMAGED):
            check_regular(path)
            file = pa.OSFile(os.fsencode(path))  # not mapped: a bad disk raises an error, no signal
            name: Any = _NAME.fullmatch(path.name)
            if name[3] and name[3] != _digest(iter(lambda: file.read(_CHUNK), b"")):
                raise ValueError("its digest differs from the digest in its name")
            self._file = pq.ParquetFile(file)
            metadata = self._file.schema_arrow.metadata or {}
            version = metadata.get(_VERSION_KEY, b"unknown").decode()
            self.derived = metadata.get(_DERIVED_KEY, b"none").decode()
        self.version = int(version) if re.fullmatch(r"[0-9]{1,9}", version) else version[:20]
        check_version(path, self.version)

    def __enter__(self) -> ParquetFile:
        return self

    def __exit__(self, *_: object) -> None:
        self._file.close()

    def check_owner(self) -> None:
        """Raise an error if the rows are of another run: somebody may have moved an intact part between folders."""
        owner = self._owner()
        if owner.get("model") is None or "run_id" not in self._file.schema_arrow.names:  # external images
            return
        run_id = owner["run_id"]
        with blaming(self._path, *_DAMAGED):
            others = set(pc.unique(self._file.read(columns=["run_id"])["run_id"]).to_pylist()) - {run_id}
        if others:
            what = f"{self._path} holds rows of the run {min(map(str, others))}, not of {run_id}"
            raise SpecbenchError(what, "move the file to that run's folder, or delete it and run again")

    def read(self, schema: pa.Schema) -> pa.Table:
        with blaming(self._path, *_DAMAGED):
            return self._current(self._file.read(columns=self._stored(schema)), schema)

    def batches(self, schema: pa.Schema, size: int) -> Iterator[pa.Table]:
        with blaming(self._path, *_DAMAGED):
            for batch in self._file.iter_batches(size, columns=self._stored(schema)):
                yield self._current(pa.Table.from_batches([batch]), schema)

    def _stored(self, schema: pa.Schema) -> list[str]:
        """Return the names that the columns of the schema have in the file."""
        former = FORMER_NAMES if self.version < SCHEMA_VERSION else {}
        return [former.get(name, name) for name in schema.names]

    def _current(self, table: pa.Table, schema: pa.Schema) -> pa.Table:
        """Convert a table to the current schema. Columns that older versions lack get the owner's values, or null."""
        if self.version < SCHEMA_VERSION:
            now = {former: name for name, former in FORMER_NAMES.items()}
            table = table.rename_columns([now.get(name, name) for name in table.column_names])
            table = completed(table, schema, self._owner)
        table = table.select(schema.names).cast(schema)
        for column in table.columns:
            if pa.types.is_string(column.type):  # otherwise invalid UTF-8 is only found on first access
                column.validate(full=True)
        return table


def _digest(pieces: Iterable[bytes | pa.Buffer]) -> str:
    digest = hashlib.sha256()
    for piece in pieces:
        digest.update(piece)
    return digest.hexdigest()[:16]


def completed(table: pa.Table, schema: pa.Schema, owner: Callable[[], Mapping[str, object]]) -> pa.Table:
    """Add the missing columns of `schema` to a table, with the owner's values or null."""
    if lacking := [field for field in schema if field.name not in table.column_names]:
        defaults = owner()
        for field in lacking:
            value = pa.scalar(defaults.get(field.name), field.type)
            table = table.append_column(field, pa.repeat(value, len(table)))
    return table.select(schema.names)


def _joined(left: pa.Table, right: pa.Table) -> pa.Table:
    """Join the columns of two tables that have the same rows."""
    return pa.table([*left.columns, *right.columns], names=[*left.column_names, *right.column_names])


def _last_of_each(keys: Sequence[pa.Table]) -> np.ndarray:
    """Return a mask of the rows that no later row with the same key replaces."""
    if not keys:
        return np.empty(0, bool)
    every = pa.concat_tables(keys)
    if len(every) <= _FEW and len(set(zip(*every.to_pydict().values(), strict=True))) == len(every):
        return np.ones(len(every), bool)
    return ~every.to_pandas().duplicated(keep="last").to_numpy()
