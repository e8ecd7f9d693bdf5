"""Shards into one: the runs of several results folders, concatenated.

A shard is an ordinary results folder, so nothing has to be shared while they run. Rows are addressed by (prompt id,
sample) and do not depend on who made them, so merging is copying; what is there already is left alone, and a merge that
was cut off is done by merging again. Scores are not copied: those over all images differ from those over a part.
"""

from __future__ import annotations

import shutil
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from specbench.errors import SpecbenchError
from specbench.store.run_folders import read_info, runs_in
from specbench.store.run_store import RunStore

ROWS = 1024
"""Rows copied at a time."""


@dataclass(frozen=True)
class Merged:
    """One run after a merge: its folder, the rows copied now, and those it has in all."""

    folder: Path
    copied: int
    rows: int


def merge(sources: Sequence[Path], out: Path) -> list[Merged]:
    """Concatenate the runs of results folders into `out`.

    Args:
        sources: results folders, or run folders; none means every `shard-*` in `out`.

    Raises:
        SpecbenchError: a source without runs, a damaged or busy folder, or two runs of one name that differ.
    """
    sources = list(sources) or sorted(out.glob("shard-*-of-*"))
    if not sources:
        raise SpecbenchError(f"no shards in {out}", "name the folders to merge, or make them with run --shard")
    runs: dict[str, list[Path]] = {}
    for source in sources:
        found = [source] if (source / "run.json").is_file() else runs_in(source)
        if not found:
            raise SpecbenchError(f"no runs in {source}", "name results folders")
        for folder in found:
            runs.setdefault(read_info(folder)["run_id"], []).append(folder)
    return [_merge_run(folders, out / name) for name, folders in runs.items()]


def _merge_run(folders: Sequence[Path], target: Path) -> Merged:
    infos = [read_info(folder) for folder in folders]
    copied = 0
    with RunStore(target).adopt(infos) as store:
        for folder in folders:
            copied += _copy_rows(RunStore(folder), store)
        rows = len(store.samples(["status"]))
    return Merged(target, copied, rows)


def _copy_rows(source: RunStore, target: RunStore) -> int:
    """Copy what `target` does not have; a failed image replaces nothing, and a good one replaces a failed one."""
    there = target.samples(["status"])
    known = set(zip(there["prompt_id"], there["sample"], strict=True))
    done = target.completed()
    traces = {(row["prompt_id"], row["sample"]): row for row in source.trace_rows()}
    copied = 0
    for batch in source.batches(None, ROWS):
        rows = [row for row in batch.to_pylist() if _wanted(row, known, done)]
        for row in rows:
            if row["image"]:
                _copy_picture(source.folder / row["image"], target.folder / row["image"])
        kept = [traces[key] for row in rows if (key := (row["prompt_id"], row["sample"])) in traces]
        if rows:
            target.append(rows, traces=kept)
        copied += len(rows)
    return copied


def _wanted(row: Mapping, known: set, done: set) -> bool:
    key = row["prompt_id"], row["sample"]
    return key not in (done if row["status"] == "ok" else known)


def _copy_picture(source: Path, target: Path) -> None:
    """A picture that its owner deleted to save room stays away."""
    if not source.is_file():
        return
    target.parent.mkdir(exist_ok=True)
    aside = target.with_name(f".{target.name}.tmp")
    try:
        shutil.copyfile(source, aside)
        aside.replace(target)
    except OSError as error:
        aside.unlink(missing_ok=True)
        raise SpecbenchError(f"cannot write {target}: {error.strerror}", "make room and merge again") from error
