"""Scores per image: `image_scores/<metric>-<feature fingerprint>/*.parquet`. Shared columns: `value` (or `correct`),
`feature`, and `details`, a JSON object of the metric's other values. Schema versions 1 to 4 used
`scores/<metric>-<feature fingerprint>/`. Such folders are readable; the next scoring or merge rewrites them."""

import io
import json
import os
import shutil
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

import pandas as pd
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from specbench.errors import SpecbenchError
from specbench.store.parquet_log import ParquetLog, completed
from specbench.store.run_info import RUN_JSON, read_info
from specbench.store.schema import IMAGE_SCORES, KEY, RUN_SCORES
from specbench.system.files import blaming, check_regular, files_named, read_regular, take_lock, write_atomically
from specbench.system.json_values import nonfinite_as_null, parse_json

_MAX_BYTES = 2**26
_AS_FLOAT32 = (pa.float32(), pa.float16(), pa.uint8(), pa.int8(), pa.uint16(), pa.int16())
_FIXED = pa.schema([IMAGE_SCORES.field(name) for name in (*KEY, "started_at", "category")])


def owner_of(folder: Path) -> dict[str, str | None]:
    """Return the columns that identify the run of every score row; for external images, model and decoder are None."""
    if (folder / RUN_JSON).is_file():
        return read_info(folder).owner
    return {"run_id": folder.name, "model": None, "decoder": None}


class ImageScores:
    """Scores per image of one metric in a run folder: a parquet log of rows with the metric's `columns`."""

    def __init__(self, run: Path, metric: str, fingerprint: str, columns: Mapping[str, pa.DataType]):
        if taken := [name for name in _FIXED.names if name in columns]:
            raise ValueError(f"a column {taken[0]}")
        self._run, name = run, f"{metric}-{fingerprint}"
        made_by: dict[str, str | None] = {"metric": metric, "fingerprint": fingerprint}
        self._log = ParquetLog(run / "image_scores" / name, IMAGE_SCORES, KEY, owner=lambda: owner_of(run) | made_by)
        self._own = pa.schema([*_FIXED, *columns.items()])
        self._old = ParquetLog(run / "scores" / name, self._own, KEY)

    @property
    def folder(self) -> Path:
        """Folder of the parts."""
        return feature_place(self._run, self._log.folder.name)

    def read(self, columns: Sequence[str] | None = None) -> pa.Table:
        """Key and `columns` of each image, or all columns. Raises the errors of `ParquetLog.read`."""
        names = [*KEY, *(columns or [name for name in self._own.names if name not in KEY])]
        if self.folder == self._old.folder:
            return self._old.read(names)
        places = {name: self._place(name) for name in names}
        stored = self._log.read(list(dict.fromkeys(places.values())))
        details = [parse_json(text) for text in stored["details"].to_pylist()] if "details" in places.values() else []
        read = {}
        for name, place in places.items():
            kind = self._own.field(name).type
            inside = place == "details"
            read[name] = pa.array([detail[name] for detail in details], kind) if inside else stored[place].cast(kind)
        return pa.table(read)

    def _place(self, name: str) -> str:
        """Return the stored column that contains the values of a metric's column."""
        if name in _FIXED.names:
            return name
        return next((place for place, column in _places(self._own).items() if column == name), "details")

    def append(self, rows: Iterable[Mapping[str, object]]) -> None:
        """Write rows as one part."""
        self._log.append_table(_packed(pa.Table.from_pylist(list(rows), schema=self._own)))

    def prepare(self) -> None:
        """Create the folder, rewrite a folder of an older schema, and remove leftovers. The caller holds the lock."""
        if self._old.folder.is_dir():
            if not self._log.folder.is_dir():
                self._log.append_table(_packed(self._old.read()))
            shutil.rmtree(self._old.folder)
        self._log.folder.mkdir(parents=True, exist_ok=True)
        self._log.clean()

    def compact(self) -> None:
        """Merge small parts."""
        self._log.compact()


def rewrite_older(run: Path) -> None:
    """Rewrite the scores of older schema versions in a run folder."""
    if not (run / "scores").is_dir():
        return
    handle = take_lock(run / "scores" / ".lock", f"{run} is being scored by another process")
    damaged = ("is damaged: not readable as scores", "delete it and score again")
    try:
        for folder in (path for path in files_named(run / "scores", "*") if path.is_dir()):
            metric, _, fingerprint = folder.name.rpartition("-")
            for part in files_named(folder, "*.parquet")[:1]:
                with blaming(part, *damaged):
                    schema = pq.read_schema(pa.BufferReader(read_regular(part, _MAX_BYTES)))
                columns = {field.name: field.type for field in schema if field.name not in _FIXED.names}
                ImageScores(run, metric, fingerprint, columns).prepare()
        for path in files_named(run / "scores", "*.parquet"):
            with blaming(path, *damaged):
                table = pq.ParquetFile(pa.BufferReader(read_regular(path, _MAX_BYTES))).read()
                if not len(table):
                    path.unlink()
                elif not table.schema.equals(RUN_SCORES):
                    whole = completed(table, RUN_SCORES, lambda: owner_of(run)).cast(RUN_SCORES)
                    write_atomically(path, parquet_bytes(whole))
    finally:
        os.close(handle)


def parquet_bytes(table: pa.Table) -> bytes:
    """Encode a table as a parquet file."""
    sink = io.BytesIO()
    pq.write_table(table, sink)
    return sink.getvalue()


def feature_place(run: Path, name: str) -> Path:
    """The folder `<metric>-<fingerprint>` of scores per image."""
    places = run / "image_scores" / name, run / "scores" / name
    return places[1] if places[1].is_dir() and not places[0].is_dir() else places[0]


def stored_values(folder: Path) -> pd.DataFrame | None:
    """Read key, category and `value` of each image from one of `feature_folders`; None if it stores no `value`."""
    if (part := next(iter(files_named(folder, "*.parquet")), None)) is None:
        return None
    try:
        check_regular(part)
        schema = pq.read_schema(pa.OSFile(os.fsencode(part)))
    except (pa.ArrowException, OSError, SpecbenchError):
        return None  # the metric reports the damage when it reads the part
    place = _places(schema).get("value")
    if place is None or not {"category", *KEY} <= set(schema.names) or not _is_number(schema.field(place).type):
        return None
    columns = pa.schema([schema.field(name) for name in (*KEY, "category", place)])
    rows = ParquetLog(folder, columns, KEY).read().to_pandas().rename(columns={place: "value"})
    return None if len(rows) and rows["value"].isna().all() else rows


def _is_number(kind: pa.DataType) -> bool:
    return pa.types.is_boolean(kind) or pa.types.is_integer(kind) or pa.types.is_floating(kind)


def _places(schema: pa.Schema) -> dict[str, str]:
    """Map each stored column to the metric's column that it contains."""
    kinds = {field.name: field.type for field in schema}
    numbers = [name for name in ("value", "correct") if name in kinds and _is_number(kinds[name])]
    exact = getattr(kinds.get("feature"), "value_type", None) in _AS_FLOAT32
    return dict(zip(("value",), numbers, strict=False)) | ({"feature": "feature"} if exact else {})


def _packed(rows: pa.Table) -> pa.Table:
    """Convert rows with a metric's columns to stored rows, without the owner's columns."""
    places = _places(rows.schema)
    rest = [name for name in rows.column_names if name not in (*_FIXED.names, *places.values())]
    details = [json.dumps(nonfinite_as_null(row), ensure_ascii=False) for row in rows.select(rest).to_pylist()]
    kept = {name: rows[name] for name in _FIXED.names}
    kept |= {place: pc.cast(rows[column], IMAGE_SCORES.field(place).type) for place, column in places.items()}
    return pa.table({**kept, "details": pa.array(details if rest else [None] * len(rows), pa.string())})
