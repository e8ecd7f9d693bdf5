"""Kill the writing commands other than runs: scoring, merging, reports, exports, packing, imports, downloads.

    python dev/drills/writers.py score --kills 50    # also: merge, report, two-reports, export, pack, import, fetch

After each kill (SIGKILL at a random moment) the same command runs again, and its results are compared with the results
of an undisturbed command. Outcomes go to the log of `kills.py`, whose `report` prints them.
"""

import argparse
import os
import random
import re
import shutil
import signal
import sys
import tempfile
import time
import zipfile
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import examples
import hub_drill
import pandas as pd
from kills import LOG, RESULTS, contents, log, outcomes

from specbench.metrics import scoring
from specbench.metrics.official_exchange import export_images, import_scores
from specbench.reporting.html import write_page
from specbench.store import parquet_log
from specbench.store.merge_shards import merge_runs
from specbench.store.packed import pack

_SVG_ID = re.compile(rb"\bf[0-9a-f]{8}-|\b[mp][0-9a-f]{10}\b")
"""Ids in the figures of a page. They are random, so that different figures have different ids."""
Act = Callable[[Path], None]
Read = Callable[[Path], dict]


def score(box: Path) -> None:
    scoring.score(sorted((box / "results").iterdir()), ["shapes-detector"]).check()


def scores(box: Path) -> dict:
    """Features by image, and the run's numbers."""
    by_key: dict = {}
    for folder in box.glob("results/*/image_scores/*"):
        for row in pd.read_parquet(folder).to_dict("records"):
            by_key.setdefault(("image", row["prompt_id"], row["sample"]), []).append(str(row))
    for path in box.glob("results/*/scores/*.parquet"):
        for row in pd.read_parquet(path).to_dict("records"):
            by_key.setdefault(("run", row["metric"]), []).append(str(row))
    return by_key


def merge_all(box: Path) -> None:
    merge_runs(sorted(path for path in box.iterdir() if path.name.startswith("shard")), box / "merged")


def report(box: Path) -> None:
    write_page(sorted((box / "results").iterdir()), box / "page.html")


def by_two(act: Act) -> Act:
    """Let two processes run `act` in one folder at the same time."""

    def both(box: Path) -> None:
        other = os.fork()
        act(box)
        if not other:
            os._exit(0)
        os.waitpid(other, 0)

    return both


def export(box: Path) -> None:
    (folder,) = (box / "results").iterdir()
    if not (box / "official").exists():  # if it exists, the kill came after the end
        export_images("geneval", folder, box / "official")


def pack_all(box: Path) -> None:
    pack(sorted((box / "results").iterdir()), box / "runs.zip")


def members(box: Path) -> dict:
    with zipfile.ZipFile(box / "runs.zip") as archive:
        return {name: [archive.read(name)] for name in archive.namelist()}


def import_answers(box: Path) -> None:
    (folder,) = (box / "results").iterdir()
    import_scores("dpg-bench", folder, box / "detail.txt")


def received(box: Path) -> dict:
    """Downloads as a user finds them: files of the cache under their names, and the stored commits."""
    paths = [path for pattern in ("hf/*/snapshots/*/*", "hf/*/refs/*", "specbench/*") for path in box.glob(pattern)]
    return {path.name: [path.read_bytes()] for path in paths if path.is_file() and path.suffix != ".lock"}


def files(box: Path) -> dict:
    """Everything that is neither input nor a lock, by path."""
    written = (box / name for name in ("page.html", "official"))
    paths = (path for place in written for path in ([place] if place.is_file() else place.rglob("*")))
    return {
        str(path.relative_to(box)): [_SVG_ID.sub(b"", path.read_bytes().replace(os.fsencode(box), b""))]
        for path in paths
        if path.is_file()
    }


KINDS: dict[str, tuple[Act, Read, Callable[[], Path]]] = {
    "score": (score, scores, examples.scorable),
    "merge": (merge_all, lambda box: contents(box / "merged"), examples.shards),
    "report": (report, files, examples.scorable),
    "two-reports": (by_two(report), files, examples.scorable),
    "export": (export, files, examples.exportable),
    "pack": (pack_all, members, examples.scorable),
    "import": (import_answers, scores, examples.judged),
    "fetch": (hub_drill.fetch, received, examples.empty),
    "two-fetches": (by_two(hub_drill.fetch), received, examples.empty),
}
"""Command to kill, reader of its outcome, and its working folder."""


def drill(kind: str, kills: int, seed: int, seconds: float) -> None:
    """Kill until the log has `kills` outcomes of the kind, or the time is up."""
    act, read, example = KINDS[kind]
    ends = time.monotonic() + seconds
    os.fsync = lambda handle: None  # only a power failure, not a kill, loses written data
    parquet_log._FAN_IN, parquet_log._LEVELS = 3, (3, 9)  # merges happen within a few rows
    example()
    with tempfile.TemporaryDirectory() as folder:
        act(_copy(example(), folder))  # imports modules that are imported on first use
    with tempfile.TemporaryDirectory() as folder:
        started = time.monotonic()
        act(box := _copy(example(), folder))
        whole, truth = time.monotonic() - started, read(box)
    number, misses = sum(row["kind"] == kind for row in outcomes()), 0
    RESULTS.mkdir(exist_ok=True)
    while number < kills and time.monotonic() < ends:
        draw = random.Random(f"{seed} {kind} {number} {misses}")
        with tempfile.TemporaryDirectory() as folder:
            box = _copy(example(), folder)
            if not _killed(lambda box=box: act(box), draw.uniform(0.0, whole)):
                misses += 1  # the process ended before the kill
                continue
            act(box)
            left = [*box.rglob(".*.tmp"), *box.rglob("*.incomplete"), *box.rglob("*.part")]
            log(kind, number, compare(read(box), truth) | {"left_behind": len(left)})
        number += 1
    print(f"{kind}: {number} of {kills} kills", file=sys.stderr)


def _copy(example: Path, folder: str) -> Path:
    return Path(shutil.copytree(example, Path(folder) / "box"))


def _killed(act: Callable[[], None], after: float) -> bool:
    """Run `act` in a child process and kill it; return whether the child was still alive."""
    child = os.fork()
    if not child:
        os.setpgrp()
        act()
        os._exit(0)
    time.sleep(after)
    alive = not os.waitpid(child, os.WNOHANG)[0]
    if alive:
        with suppress(ProcessLookupError):
            os.killpg(child, signal.SIGKILL)
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
    return alive


def compare(seen: dict, truth: dict) -> dict[str, int]:
    return {
        "rows": sum(map(len, seen.values())),
        "lost": len(truth.keys() - seen.keys()),
        "duplicated": sum(len(rows) - len(truth.get(key, rows)) for key, rows in seen.items()),
        "changed": sum(rows[-1] != truth[key][-1] for key, rows in seen.items() if key in truth),
        "foreign": len(seen.keys() - truth.keys()),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("kind", choices=KINDS)
    parser.add_argument("--kills", type=int, default=50)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--seconds", type=float, default=150.0, help=f"stop after this time; {LOG.name} is continued")
    options = parser.parse_args()
    drill(options.kind, options.kills, options.seed, options.seconds)


if __name__ == "__main__":
    main()
