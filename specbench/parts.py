"""An append-only parquet log: a folder of parts that holds every row once, whatever is killed and whenever.

A part is named after the range of appends it covers (`00000003-00000003.parquet`, or
`00000000-00000063.parquet` once merged). It is written aside, synced and renamed, so a part under its name is
whole; and a part inside another's range is a leftover of a merge, which no reader counts. One writer at a
time (the caller holds the lock), any number of readers.
"""

from __future__ import annotations

import fcntl
import os
import re
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq

from specbench.errors import FAILURE, SpecbenchError
from specbench.folders import SCHEMA_VERSION

_VERSION_KEY = b"specbench.schema"
_NAME = re.compile(r"(\d{8,})-(\d{8,})\.parquet")
_FAN_IN = 64
_LEVELS = (_FAN_IN, _FAN_IN**2)
_REREADS = 20


def write_atomically(path: Path, data: bytes) -> None:
    """Write `data` so that `path` is either absent (or its old self) or complete and on disk; makes its folder.

    Raises:
        SpecbenchError: the disk refused, for example because it is full; nothing is left behind.
    """
    aside = path.with_name(f".{path.name[:200]}.tmp")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        try:
            with open(aside, "wb") as file:
                file.write(data)
                file.flush()
                os.fsync(file.fileno())
            os.replace(aside, path)
        except OSError:
            aside.unlink(missing_ok=True)
            raise
        sync_folder(path.parent)
    except OSError as error:
        raise SpecbenchError(
            f"cannot write {path}: {error.strerror}",
            "what was written before is complete; make room and run the same command again to resume",
            FAILURE,
        ) from error


def sync_folder(folder: Path) -> None:
    """Make renames and removals in `folder` survive a power cut."""
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def take_lock(path: Path, busy: str) -> int:
    """Lock the file `path` for as long as the returned handle stays open or this process lives.

    Raises:
        SpecbenchError: another process holds it; `busy` says what that means.
    """
    handle = os.open(path, os.O_RDWR | os.O_CREAT, 0o644)
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        owner = os.read(handle, 32).decode(errors="replace").strip()
        os.close(handle)
        raise SpecbenchError(f"{busy}{f' ({owner})' if owner else ''}", "wait until it is done") from None
    os.ftruncate(handle, 0)
    os.write(handle, f"pid {os.getpid()}".encode())
    return handle


class Parts:
    """The log in `folder`; rows have the columns of `schema` and are identified by the columns `key`.

    A row appended later replaces the earlier row of the same key.
    """

    def __init__(self, folder: Path, schema: pa.Schema, key: Sequence[str]):
        self.folder = folder
        self.schema = schema.with_metadata({_VERSION_KEY: str(SCHEMA_VERSION)})
        self.key = tuple(key)

    def append(self, rows: Iterable[Mapping[str, object]]) -> None:
        """Put `rows` on disk as one part, all or none, before returning.

        Raises:
            SpecbenchError: the disk refused.
        """
        live = self._live()
        number = live[-1][1] + 1 if live else 0
        self._write(number, number, pa.Table.from_pylist(list(rows), schema=self.schema))
        for width in _LEVELS:
            self._merge_tail(width, at_least=_FAN_IN)

    def compact(self) -> None:
        """Merge the small parts at the end of the log, and drop rows that a later one replaced."""
        self._merge_tail(_LEVELS[-1], at_least=2)
        if self._replaced_rows():
            self._merge(self._live())

    def clean(self) -> None:
        """Remove what an interrupted write or merge left behind."""
        live = {path for _, _, path in self._live()}
        for path in self.folder.iterdir() if self.folder.is_dir() else ():
            stray_part = _NAME.fullmatch(path.name) and path not in live
            if stray_part or (path.name.startswith(".") and path.name.endswith(".tmp")):
                path.unlink()

    def read(self, columns: Sequence[str] | None = None) -> pa.Table:
        """The log as one table in order of writing, one row per key, the last one written.

        Raises:
            SpecbenchError: a part is damaged or of another schema version; the message names the file.
        """
        wanted = list(dict.fromkeys([*self.key, *columns])) if columns is not None else self.schema.names
        for _ in range(_REREADS):
            try:
                tables = [self._read_part(path, wanted) for _, _, path in self._settled()]
                break
            except FileNotFoundError:
                continue  # a writer merged this part away between listing and reading
        else:
            raise SpecbenchError(f"{self.folder} changes faster than it can be read", "try again", FAILURE)
        empty = pa.schema([self.schema.field(name) for name in wanted]).empty_table()
        return self._last_of_each_key(pa.concat_tables([empty, *tables]))

    def _settled(self) -> list[tuple[int, int, Path]]:
        """`_live` as two listings in a row agree on it: one alone may miss files that a merge renames meanwhile."""
        live = self._live()
        while (again := self._live()) != live:
            live = again
        return live

    def _live(self) -> list[tuple[int, int, Path]]:
        """(first, last, path) of the parts that count, in order."""
        if not self.folder.is_dir():
            return []
        named = ((_NAME.fullmatch(path.name), path) for path in self.folder.iterdir())
        ranges = sorted(
            ((int(name[1]), int(name[2]), path) for name, path in named if name),
            key=lambda part: (part[0], -part[1]),
        )
        live: list[tuple[int, int, Path]] = []
        for part in ranges:
            if not live or part[0] > live[-1][1]:
                live.append(part)
        return live

    def _merge_tail(self, width: int, at_least: int) -> None:
        live = self._live()
        tail = []
        while live and live[-1][1] - live[-1][0] + 1 < width:
            tail.insert(0, live.pop())
        if len(tail) >= at_least:
            self._merge(tail)

    def _merge(self, parts: list[tuple[int, int, Path]]) -> None:
        table = pa.concat_tables([self._read_part(path, self.schema.names) for _, _, path in parts])
        target = self._write(parts[0][0], parts[-1][1], self._last_of_each_key(table))
        for _, _, path in parts:
            if path != target:
                path.unlink()

    def _write(self, first: int, last: int, table: pa.Table) -> Path:
        sink = pa.BufferOutputStream()
        pq.write_table(
            table.replace_schema_metadata(self.schema.metadata), sink, compression="zstd", write_page_checksum=True
        )
        path = self.folder / f"{first:08d}-{last:08d}.parquet"
        write_atomically(path, sink.getvalue().to_pybytes())
        return path

    def _read_part(self, path: Path, columns: list[str]) -> pa.Table:
        try:
            with pq.ParquetFile(path, page_checksum_verification=True) as file:
                version = (file.schema_arrow.metadata or {}).get(_VERSION_KEY, b"unknown").decode()
                if version != str(SCHEMA_VERSION):
                    raise SpecbenchError(
                        f"{path} has schema version {version}; this specbench reads {SCHEMA_VERSION}",
                        "use the specbench version that wrote it",
                    )
                table = file.read(columns=columns).select(columns)
                return table.cast(pa.schema([self.schema.field(name) for name in columns]))
        except FileNotFoundError:
            raise
        except (pa.ArrowException, OSError, KeyError, ValueError) as error:
            raise SpecbenchError(
                f"{path} is damaged: not a readable parquet part",
                "specbench puts only whole parts in place, so something changed it later; "
                "delete it and run again: only its rows are redone",
            ) from error

    def _replaced_rows(self) -> bool:
        live = self._live()
        total = sum(pq.read_metadata(path).num_rows for _, _, path in live)
        return total > self.read(columns=[]).num_rows

    def _last_of_each_key(self, table: pa.Table) -> pa.Table:
        replaced = table.select(list(self.key)).to_pandas().duplicated(keep="last").to_numpy()
        return table.filter(pa.array(~replaced)) if replaced.any() else table
