"""Results folders: `<out>/<run id>/` with `run.json`, `samples/*.parquet`, `images/*.png` and `scores/`. A row is on
disk before the next image starts, a rerun continues after the existing rows, and one process writes at a time. Stored
rows are validated, because a folder may come from another person. Imports no torch."""

from __future__ import annotations

import hashlib
import json
import math
import os
import re
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import replace
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pyarrow as pa
import pyarrow.compute as pc

from specbench.errors import PARTIAL, SpecbenchError
from specbench.specs.run_spec import RunSpec
from specbench.store import token_sums
from specbench.store.parquet_log import Derived, ParquetLog
from specbench.store.run_info import RUN_JSON, SCHEMA_VERSION, Invocation, RunInfo, check_same_run, read_info
from specbench.store.schema import (
    KEY,
    LENGTHS,
    OWNER,
    SAMPLES,
    TRACES,
    Key,
    RowStatus,
    read_facts,
    read_machines,
    read_meta,
    with_facts,
)
from specbench.store.token_sums import LISTS, SUMS
from specbench.system.environment import now
from specbench.system.files import blaming, files_named, read_regular, sync_folder, take_lock, write_atomically
from specbench.system.images import picture_bytes, png_bytes, read_picture
from specbench.system.json_values import Word, nonfinite_as_null, nonfinite_as_text, parse_json

_PATTERNS = {"image": r"^images/[^./\\\x00][^/\\\x00]*$", "image_sha256": r"^[0-9a-f]{64}$"}
_OBJECTS = {"facts": read_facts, "meta": lambda texts: [*map(read_meta, texts.to_pylist())], "machine": read_machines}
_NOT_NEGATIVE = re.compile(r"nfe|prefills|batch|attempts|logp_spread|.*_ms")
_ALWAYS = (*KEY, "prompt", "status", *SUMS.names)
_DECODED = ("batch", "tokens", "forced", "logp")
_STEPS = ("nfe", "prefills", "committed_step", "drafted", "tested", "accepted")
"""Columns without nulls: `_ALWAYS` in every row, `_DECODED` in every decoded row, `_STEPS` in every row that specbench
decoded (for imported tokens, all of `_STEPS` are null)."""
_REDO = "delete the file if it exists, and run again to decode the image again"
_WAIT = "wait until it is done; to split the images: --shard auto in tasks of a job, --shard I/N in other processes"


class RunStore:
    """One run folder. Reading needs no preparation. Writing begins with `lock` and `begin` and ends with `close`."""

    def __init__(self, folder: Path | str):
        self.folder = Path(folder)
        sums = Derived(
            token_sums.VERSION, SUMS, ("status", *LISTS), lambda rows: token_sums.token_sums(self._checked(rows))
        )
        self._samples = ParquetLog(self.folder / "samples", SAMPLES, KEY, sums, self._owner)
        self._traces = ParquetLog(self.folder / "traces", TRACES, KEY, owner=self._owner)
        self._lock: int | None = None
        self._made: list[Path] = []
        self._held: dict[Path, int] = {}  # open handles of locked folders
        self._began = False
        self._known_owner: dict[str, str | None] = {}

    def lock(self, spec: RunSpec) -> RunStore:
        """Lock the folder against other writers until `close`, which removes a new folder if `begin` was not called."""
        self.check(spec)
        self._take_lock()
        with self.undone_on_error():
            self.check(spec)
            self._clean()
            self._check_place()
        return self

    def _check_place(self) -> None:
        """Raise an error if the locked folder was replaced, because new rows would land in the new folder."""
        for folder in (self.folder, *(self.folder / name for name in ("samples", "images", "traces"))):
            if folder not in self._held:
                with suppress(FileNotFoundError):
                    self._held[folder] = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
                continue
            locked = os.fstat(self._held[folder])
            if folder.is_dir() and os.path.samestat(locked, folder.stat()):
                continue
            now_at = Path("/proc/self/fd", str(self._held[folder]))
            where = f"it is now {now_at.readlink()}" if locked.st_nlink and now_at.exists() else "it is no longer there"
            raise SpecbenchError(
                f"{folder} was moved or removed while this run wrote to it: {where}",
                "run the same command again to decode the missing images; if the folder was moved, with the new --out",
                PARTIAL,
            )
        if self._began and not (self.folder / RUN_JSON).exists():
            advice = "restore the file, then run the same command again to decode the missing images"
            raise SpecbenchError(f"{self.folder / RUN_JSON} was removed while this run wrote", advice, PARTIAL)

    @contextmanager
    def _in_place(self) -> Iterator[None]:
        """Call `_check_place` before and after the block, also if the block raises an error."""
        self._check_place()
        try:
            yield
        finally:
            self._check_place()

    def _take_lock(self) -> None:
        samples = self.folder / "samples"
        try:
            self._made = [folder for folder in (samples, *samples.parents) if not folder.exists()]
            samples.mkdir(parents=True, exist_ok=True)
            self._lock = take_lock(self.folder / ".lock", f"{self.folder} is being written by another process", _WAIT)
            sync_folder(self.folder)
        except OSError as error:
            what = f"cannot write to {self.folder}: {error.strerror}"
            raise SpecbenchError(what, "choose another folder with --out") from error

    def begin(self, spec: RunSpec, provenance: Mapping[str, Any], facts: Mapping[str, Any] | None = None) -> RunStore:
        """Write `run.json` into the locked folder, or add an invocation to the run's file. `provenance`: fields of
        this `Invocation`; `facts`: fields of `specbench.store.run_info.RunInfo`, such as `origins`."""
        info = self.info() if (self.folder / RUN_JSON).exists() else RunInfo(spec)
        where = {"device": spec.device, "threads": spec.threads}
        call = Invocation.from_json({**provenance, **where, "finished_at": None})
        info = replace(info, invocations=[*info.invocations, call], **(facts or {}))
        self._write_info(self._upgraded(info))
        self._made, self._began = [], True
        return self

    def decoded_also_on(self, hardware: Mapping[str, object]) -> None:
        """Add an invocation to `run.json` for a worker whose hardware differs from the first worker's."""
        info = self.info()
        *before, call = info.invocations
        unknown: dict[str, Any] = dict.fromkeys(("compile_s", "compiled_forms", "compile_options", "graph_bytes"))
        other = replace(call, hardware=hardware, stored={}, **unknown)
        if other.machine not in info.machines:
            self._write_info(replace(info, invocations=[*before, other, call]))

    def adopt(self, infos: Sequence[RunInfo]) -> RunStore:
        """Lock the folder to receive rows from other folders of the same run. `infos`: their descriptions."""
        self._take_lock()
        with self.undone_on_error():
            self._clean()
            info = self.info() if (self.folder / RUN_JSON).exists() else replace(infos[0], invocations=[])
            for other in infos:
                check_same_run(self.folder, info, other.spec)
            calls = [call for other in infos for call in other.invocations if call not in info.invocations]
            calls = sorted([*info.invocations, *calls], key=lambda call: str(call.started_at))
            self._write_info(self._upgraded(replace(info, invocations=calls)))
            self._made = []
        return self

    @contextmanager
    def undone_on_error(self) -> Iterator[None]:
        """Call `close(finished=False)` if the block raises an error."""
        try:
            yield
        except BaseException:
            self.close(finished=False)
            raise

    def check(self, spec: RunSpec) -> None:
        """Raise an error if the folder contains another run than `spec`, or rows without `run.json`."""
        if (self.folder / RUN_JSON).exists():
            check_same_run(self.folder, self.info(), spec)
        elif self._samples.read(columns=[]).num_rows:
            what = f"{self.folder} contains images, but no run.json"
            raise SpecbenchError(what, "move the folder away and run again, or put its run.json back")

    @property
    def locked(self) -> bool:
        """Whether this object holds the lock of the folder."""
        return self._lock is not None

    def info(self) -> RunInfo:
        """The run's description."""
        return read_info(self.folder)

    def _owner(self) -> dict[str, str | None]:
        if (self.folder / RUN_JSON).exists():
            self._known_owner = self._known_owner or self.info().owner
        return self._known_owner

    def unfinished(self) -> bool:
        """Whether the last writer was killed, so that there may be leftovers to remove."""
        return (self.folder / RUN_JSON).exists() and self.info().invocations[-1].finished_at is None

    def completed(self, traced: bool = False) -> set[Key]:
        """Keys of the finished images; if `traced`, only of images with a trace. Failed images and images without their
        file are decoded again. A run without a folder `images` keeps only numbers, so no file is missing there."""
        rows = self._checked(self._samples.read(["status", "image"]))
        done = pc.equal(rows["status"], RowStatus.OK)
        if (self.folder / "images").is_dir():
            names = pa.array(os.listdir(os.fsencode(self.folder / "images")), pa.binary())
            there = pc.binary_join_element_wise(b"images", names, b"/")
            image = rows["image"].cast(pa.binary())
            done = pc.and_(done, pc.or_(pc.is_null(image), pc.is_in(image, there)))
        keys = [rows[name].filter(done).to_numpy().tolist() for name in KEY]
        done = set(zip(*keys, strict=True))
        return done & set(zip(*(self.traces([])[name] for name in KEY), strict=True)) if traced else done

    def append(
        self,
        rows: Sequence[dict[str, Any]],
        images: Mapping[str, np.ndarray] | None = None,
        traces: Sequence[Mapping[str, object]] = (),
    ) -> None:
        """Write images and traces to disk, then their rows. All rows appear together or not at all.
        `rows, traces`: see `specbench.store.schema`; `images`: uint8 [3, H, W] by path inside the run folder."""
        with self._in_place():
            for name in ["images"] * bool(images) + ["traces"] * bool(traces):
                if self.folder / name not in self._held:
                    (self.folder / name).mkdir(exist_ok=True)
                    self._check_place()
            digests: dict[object, str] = {}
            for path, pixels in (images or {}).items():
                data = png_bytes(np.moveaxis(pixels, 0, -1))
                write_atomically(self.folder / path, data)
                digests[path] = hashlib.sha256(data).hexdigest()
            if traces:
                self._traces.append(traces)
            self._samples.append(
                [row | {"image_sha256": digests[row["image"]]} if row.get("image") in digests else row for row in rows]
            )

    def samples(self, columns: Sequence[str] | None = None) -> pd.DataFrame:
        """The stored rows, one per (prompt id, sample); the key is always among the columns."""
        return self._checked(self._samples.read(columns)).to_pandas()

    def batches(self, columns: Sequence[str] | None, size: int = 65_536) -> Iterator[pa.Table]:
        """Yield the stored rows in batches of at most `size` rows, for runs of any size."""
        return map(self._checked, self._samples.batches(SAMPLES.names if columns is None else columns, size))

    def batches_with_facts(self, columns: Sequence[str]) -> Iterator[pa.Table]:
        """Yield `batches` of these columns, with a column per number in `facts`; at least one batch."""
        columns = [*columns, "facts"]
        for rows in chain([self._samples.no_rows(columns)], self._samples.batches(columns)):
            try:
                rows = with_facts(rows)
            except ValueError as error:
                raise self._foreign("facts") from error
            yield self._checked(rows)

    def _checked(self, rows: pa.Table) -> pa.Table:
        """Return the rows. Raise an error if specbench cannot have written them, because a folder may be untrusted."""
        wrong = [name for name in _ALWAYS if name in rows.column_names and rows[name].null_count]
        if "status" in rows.column_names:
            ok = pc.equal(rows["status"], RowStatus.OK)
            gaps = [name for name in _DECODED if name in rows.column_names and rows[name].null_count]
            decoded = rows.select(gaps).filter(ok)
            wrong += [name for name in gaps if decoded[name].null_count]
            steps = [rows[name].filter(ok) for name in _STEPS if name in rows.column_names]
            unlike = (pc.not_equal(step.is_null(), steps[0].is_null()) for step in steps)
            wrong += ["nfe"] * any(pc.any(step).as_py() for step in unlike)
        for name, pattern in _PATTERNS.items():
            if name in rows.column_names:
                fitting = pc.match_substring_regex(pc.drop_null(rows[name]), pattern)
                wrong += [name] * (not pc.all(fitting, min_count=0).as_py())
        for name, read in _OBJECTS.items():
            if name in rows.column_names:
                try:
                    read(rows[name])
                except ValueError:
                    wrong.append(name)
        for name in filter(_NOT_NEGATIVE.fullmatch, rows.column_names):
            least, most = pc.min_max(rows[name]).as_py().values()
            # `logp_spread` may be infinite or NaN, if a token has probability 0.
            bound = math.inf if name == "logp_spread" else sys.float_info.max
            wrong += [name] * (least is not None and (least < (name == "nfe") or most > bound))
        wrong += _uneven(rows)
        if wrong:
            raise self._foreign(wrong[0])
        return rows

    def _foreign(self, column: str) -> SpecbenchError:
        what = f"{self._samples.folder}: specbench did not write these rows; see their column '{column}'"
        return SpecbenchError(what, "move the run's folder away and run again")

    def trace_rows(self) -> list[dict[str, object]]:
        """Read the traces in the form that `append` accepts."""
        return self._traces.read().to_pylist()

    def traces(self, columns: Sequence[str] | None = None) -> pd.DataFrame:
        """The traces of the stored images, one row per (prompt id, sample); empty without `run --trace`."""
        names = [*KEY, "started_at"]
        kept = self._traces.read(None if columns is None else [*names, *columns]).to_pandas()
        if kept.empty:
            return kept.drop(columns="started_at")
        return kept.merge(self.samples(["started_at"]), on=names).drop(columns="started_at")

    def with_traces(self) -> pd.DataFrame:
        """`samples` of all columns, joined with the columns of the traces if there are traces."""
        samples, traces = self.samples(), self.traces()
        return samples if traces.empty else samples.merge(traces, on=[*KEY, *OWNER], how="left")

    def close(self, finished: bool = True) -> None:
        """End writing. If `finished`, merge small parts and record the time in `run.json`."""
        if self._lock is None:
            return
        try:
            with self._in_place() if finished and self._began else nullcontext():
                if finished and (self.folder / RUN_JSON).exists():
                    self._samples.compact()
                    self._traces.compact()
                    if self._began:
                        self._finish()
        finally:
            self._leave()

    def _finish(self) -> None:
        """Record the end of this call in `run.json`, in all its invocations (one per kind of worker hardware)."""
        info, ended = self.info(), now()
        for call in info.invocations:
            if call.started_at == info.invocations[-1].started_at:
                call.finished_at = ended
        self._write_info(info)

    def _leave(self) -> None:
        """Unlock the folder, and remove it if it was created for a run that never began."""
        if self._made:
            (self.folder / ".lock").unlink(missing_ok=True)
            with suppress(OSError):  # the folder contains other files
                for folder in self._made:
                    folder.rmdir()
            self._made = []
        for handle in (self._lock, *self._held.values()):
            if handle is not None:
                os.close(handle)
        self._lock, self._held = None, {}

    def __enter__(self) -> RunStore:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        self.close(finished=kind is None)

    def _upgraded(self, info: RunInfo) -> RunInfo:
        """Rewrite the parquet files of an older schema version; return the updated description of the run."""
        if info.schema < SCHEMA_VERSION:
            self._samples.upgrade()
            self._traces.upgrade()
        return replace(info, schema=SCHEMA_VERSION)

    def _clean(self) -> None:
        self._samples.clean()
        self._traces.clean()
        for folder in (self.folder, self.folder / "images"):
            for leftover in files_named(folder, ".*.tmp"):
                leftover.unlink()

    def _write_info(self, info: RunInfo) -> None:
        text = json.dumps(nonfinite_as_text(info.to_json()), indent=2, allow_nan=False, ensure_ascii=False)
        write_atomically(self.folder / RUN_JSON, text.encode("utf-8", "backslashreplace"))


def _uneven(rows: pa.Table) -> list[str]:
    """List columns with missing values, or with other list lengths than the columns of their group."""
    for group in LENGTHS:
        there = [name for name in group if name in rows.column_names]
        lengths = {name: pc.list_value_length(rows[name]) for name in there}
        for name in there:
            gaps = pc.list_flatten(rows[name]).null_count
            if gaps or not pc.all(pc.equal(lengths[there[0]], lengths[name]), min_count=0).as_py():
                return [name]
    slots = pc.unique(pc.list_value_length(rows["forced"])).to_pylist() if "forced" in rows.column_names else ()
    return ["forced"] * (len(slots) - (None in slots) > 1)


def read_image(folder: Path, image: str, sha256: object) -> np.ndarray:
    """Read a stored image, uint8 [H, W, 3]. `image`, `sha256`: columns of its row; old rows have no `image_sha256`."""
    return read_picture(folder / image, _REDO, _digest(sha256), folder)


def image_bytes(folder: Path, image: str, sha256: object) -> bytes:
    """Read a stored image's file without decoding it. Raises the errors of `read_image` except decoding errors."""
    return picture_bytes(folder / image, _REDO, _digest(sha256), folder)


def _digest(value: object) -> str | None:
    return value if isinstance(value, str) else None


AUDIT_JSON = "audit.json"
_MAX_BYTES = 2**26


def images_fingerprint(rows: pd.DataFrame) -> str:
    """Digest the key and `started_at` of all `rows`, to detect that the audited images have changed."""
    stamps = sorted(zip(*(rows[name].astype(str) for name in (*KEY, "started_at")), strict=True))
    return hashlib.sha256(json.dumps(stamps).encode()).hexdigest()[:16]


def write_audit(folder: Path, result: Mapping[str, object]) -> None:
    """Store the result of an audit in the run folder, replacing an earlier result."""
    text = json.dumps(nonfinite_as_null(dict(result)), indent=2, allow_nan=False)
    write_atomically(Path(folder) / AUDIT_JSON, text.encode())


class AuditVerdict(Word):
    """Verdict of a stored audit. OTHERS: p was recorded for another model."""

    CONSISTENT = "consistent"
    DEVIATES = "deviates"
    UNLIKELY = "deviates by likelihood"
    IMPOSSIBLE = "impossible tokens"
    OTHERS = "recorded p is not the model's"


def read_audit(folder: Path) -> dict[str, Any] | None:
    """Read the stored result of an audit; None if the run was not audited."""
    path = Path(folder) / AUDIT_JSON
    if not path.is_file():
        return None
    with blaming(path, "is damaged: not readable as an audit", "delete it and audit again"):
        result = parse_json(read_regular(path, _MAX_BYTES))
        if not isinstance(result["deviates"], bool) or not isinstance(result["fingerprint"], str):
            raise TypeError("deviates or fingerprint")
        float(result["tv"]), int(result["images"])
        result["verdict"] = AuditVerdict(result["verdict"])
    return result
