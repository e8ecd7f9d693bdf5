"""Merge shards: copy the rows of runs from several results folders into `out`. A row does not depend on the worker that
decoded it. Existing rows are kept, and repeating an interrupted merge completes it. Scores are not copied, because
scores of a shard are not scores of the whole run. Files of older schema versions in `out` are rewritten."""

import os
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from specbench.errors import SpecbenchError, chosen
from specbench.store.image_scores import rewrite_older
from specbench.store.run_folders import Names, find_runs, runs_in, shards_in
from specbench.store.run_info import RUN_JSON, read_info
from specbench.store.run_store import RunStore, image_bytes
from specbench.store.schema import RowStatus
from specbench.system.files import write_atomically

_ROWS = 1024  # Rows per copied batch
MAX_WANTED = 10**9  # Assumed number of requested images of a shard if the run does not record it
_SHARD = re.compile(r"shard-(\d+)-of-(\d+)")


@dataclass(frozen=True)
class Merged:
    """Merged run: its folder, number of rows copied, and total number of rows."""

    folder: Path
    copied: int
    rows: int


def merge_runs(folders: Names = (), out: str | Path = "results") -> list[Merged]:
    """Concatenate the runs of results folders into `out` (`specbench merge`).

    Args:
        folders: results folders, also with shards in them, or run folders; every `shard-*-of-*` in `out` by default.

    Returns:
        Per run: its folder, the number of rows copied, and the total number of rows.

    Raises:
        SpecbenchError: a folder without runs, a damaged or locked run, or two different runs with the same name.
    """
    out = Path(out)
    if not (sources := with_shards(chosen("folder", folders)) or shards_in(out)):
        raise SpecbenchError(f"no shards in {out}", "name the folders to merge, or make them with run --shard")
    runs: dict[str, list[Path]] = {}
    for source in sources:
        for folder in [source] if (source / RUN_JSON).is_file() else find_runs(source):
            runs.setdefault(read_info(folder).run_id, []).append(folder)
    merged = []
    for name, parts in runs.items():
        with RunStore(out / name).adopt([read_info(part) for part in parts]) as store:
            copied = sum(_copy_rows(RunStore(part), store) for part in parts)
            rows = len(store.samples(["status"]))
            rewrite_older(store.folder)
        merged.append(Merged(out / name, copied, rows))
    return merged


def with_shards(folders: Iterable[str | Path]) -> list[Path]:
    """Add the shards in each results folder to the folders; a folder that holds only shards is left out."""
    found = []
    for folder in map(Path, folders):
        shards = shards_in(folder)
        found += [*([] if shards and not runs_in(folder) else [folder]), *shards]
    return found


def incomplete_shards(folders: Iterable[str | Path]) -> list[str]:
    """Describe missing shards (no folder) and unfinished shards (too few images). A run's shards differ by at most one
    image, but an added baseline decodes only the first prompts, so its shards may have fewer images, or none."""
    images: dict[int, dict[int, dict[str, tuple[int, int]]]] = {}
    for folder in map(Path, folders):
        if shard := _SHARD.search(str(folder)):
            runs = runs_in(folder)
            sizes = {run.name: read_info(run).invocations[-1].wanted or MAX_WANTED for run in runs}
            counts = {run.name: (len(RunStore(run).completed()), sizes[run.name]) for run in runs}
            images.setdefault(int(shard[2]), {})[int(shard[1])] = counts
    lines = []
    for of, parts in images.items():
        most = {
            name: max(part.get(name, (0,))[0] for part in parts.values()) for part in parts.values() for name in part
        }
        absent = [part for part in range(1, of + 1) if part not in parts]
        # A shard may contain no images of an added baseline.
        whole = [name for name in most if most[name] >= max(1, max(most.values()) - 1)]
        behind = [
            part
            for part, runs in sorted(parts.items())
            if any(name not in runs for name in whole)
            or any(done < min(most[name] - 1, size) for name, (done, size) in runs.items())
        ]
        lines += [f"missing shards: {_spans(absent)} of {of}"] * bool(absent)
        lines += [f"unfinished shards: {_spans(behind)} of {of}"] * bool(behind)
    return lines


def _spans(numbers: Sequence[int]) -> str:
    """Format ascending numbers, with ranges for consecutive numbers: "1, 4-8"."""
    starts = [n for n in numbers if n - 1 not in numbers]
    ends = [n for n in numbers if n + 1 not in numbers]
    return ", ".join(str(a) if a == b else f"{a}-{b}" for a, b in zip(starts, ends, strict=True))


def _copy_rows(source: RunStore, target: RunStore) -> int:
    """Copy rows that are missing in `target`. Successful images replace failed images, never the reverse."""
    there = target.samples(["status"])
    stored = set(zip(there["prompt_id"], there["sample"], strict=True))
    done = target.completed()
    traces = {(row["prompt_id"], row["sample"]): row for row in source.trace_rows()}
    copied = 0
    for batch in source.batches(None, _ROWS):
        keyed = [(row, (row["prompt_id"], row["sample"])) for row in batch.to_pylist()]
        rows = [row for row, key in keyed if key not in (done if row["status"] == RowStatus.OK else stored)]
        for row in rows:
            if row["image"] and os.path.lexists(source.folder / row["image"]):  # skip deleted images
                data = image_bytes(source.folder, row["image"], row["image_sha256"])
                write_atomically(target.folder / row["image"], data)
        kept = [traces[key] for row in rows if (key := (row["prompt_id"], row["sample"])) in traces]
        if rows:
            target.append(rows, traces=kept)
        copied += len(rows)
    return copied
