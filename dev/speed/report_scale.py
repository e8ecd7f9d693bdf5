"""Time and memory of reading many stored images: resuming, reporting and comparing runs, and listing many run folders.

    python dev/speed/report_scale.py [--rows 1000000] [--folders 10000] [--out results/speed] [--work FOLDER]

The rows come from two runs of `shapes`, half AR and half SJD, repeated under new prompt ids; their probabilities are
drawn again, so that they compress as badly as real values. Each figure comes from a new process, without its imports.
"""

import argparse
import json
import resource
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pyarrow as pa

from specbench import available, reporting
from specbench.reporting.compare import compare_runs
from specbench.store.run_folders import find_runs
from specbench.store.run_store import RunStore
from specbench.store.schema import SAMPLES
from specbench.system import environment
from specbench.system.files import write_atomically

SOURCE = Path(__file__).parents[2] / "results" / "older"
RUNS = ("shapes-ar", "shapes-gsd")
PART = 4096
WORK: dict[str, Callable[[list[Path]], object]] = {
    "resume": lambda runs: [RunStore(folder).completed() for folder in runs],
    "report": lambda runs: reporting.render(reporting.report_rows(runs)),
    "compare": lambda runs: compare_runs(*runs),
    "list": lambda runs: available("runs", runs[0].parent),
}
"""Timed operations, given the run folders."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rows", type=int, default=1_000_000)
    parser.add_argument("--folders", type=int, default=10_000, help="run folders that are listed")
    parser.add_argument("--out", type=Path, default=Path("results/speed"))
    parser.add_argument("--work", type=Path, help="folder for the runs, kept and used again")
    parser.add_argument("--one", choices=WORK, help="time only this operation on the runs in --work, and print it")
    chosen = parser.parse_args()
    if chosen.one:
        print(json.dumps(timed(WORK[chosen.one], find_runs(chosen.work))))
        return
    with tempfile.TemporaryDirectory() as scratch:
        work = chosen.work or Path(scratch)
        prepare(work, chosen.rows, chosen.folders)
        figures = {name: in_a_process(name, work / ("folders" if name == "list" else "rows")) for name in WORK}
    result = {
        "command": " ".join(["python", *sys.argv]),
        "provenance": environment.environment_facts(),
        "rows": chosen.rows,
        "folders": chosen.folders,
        **figures,
    }
    text = json.dumps(result, indent=1) + "\n"
    write_atomically(chosen.out / "report_scale.json", text.encode())
    print(text, end="")


def prepare(work: Path, rows: int, folders: int) -> None:
    """Create the missing runs."""
    sources = find_runs(SOURCE, RUNS)
    if not (work / "rows").is_dir():
        for folder in sources:
            enlarge(folder, work / "rows", rows // len(RUNS))
    for number in range(folders):
        list_entry(sources[-1], work / "folders" / f"run-{number:05d}")


def list_entry(source: Path, target: Path) -> None:
    """Copy the parts of a run that listing reads: its description, and the names of its images."""
    (target / "images").mkdir(parents=True, exist_ok=True)
    shutil.copy(source / "run.json", target)
    for image in (source / "images").iterdir():
        (target / "images" / image.name).touch()


def in_a_process(name: str, folder: Path) -> dict[str, float]:
    command = [sys.executable, __file__, "--one", name, "--work", str(folder)]
    return json.loads(subprocess.run(command, check=True, capture_output=True, text=True).stdout)


def enlarge(folder: Path, out: Path, rows: int) -> Path:
    """Copy a run with `rows` rows and its original images."""
    target = out / folder.name
    (target / "samples").mkdir(parents=True)
    shutil.copy(folder / "run.json", target)
    shutil.copytree(folder / "images", target / "images")
    true = pa.concat_tables(RunStore(folder).batches(SAMPLES.names))
    log, draw = RunStore(target)._samples, np.random.default_rng(0)
    for number, start in enumerate(range(0, rows, PART)):
        log._write(number, number, repeated(true, start, min(PART, rows - start), draw))
    return target


def repeated(true: pa.Table, start: int, n: int, draw: np.random.Generator) -> pa.Table:
    """Rows `start` to `start + n` of the original rows, repeated cyclically."""
    piece = true.take(pa.array((start + np.arange(n)) % true.num_rows)).combine_chunks()
    piece = replaced(piece, "prompt_id", pa.array([f"prompt-{start + row:08d}" for row in range(n)]))
    for name in ("logp", "entropy", "top1"):
        lists = piece[name].combine_chunks()
        values = draw.exponential(2.0, len(lists.flatten())).astype(np.float32)
        values = -values if name == "logp" else values
        piece = replaced(piece, name, pa.ListArray.from_arrays(lists.offsets, pa.array(values)))
    return piece


def replaced(table: pa.Table, name: str, column: pa.Array) -> pa.Table:
    return table.set_column(table.schema.get_field_index(name), table.schema.field(name), column)


def timed(work: Callable[[list[Path]], object], runs: list[Path]) -> dict[str, float]:
    wall, cpu = time.perf_counter(), time.process_time()
    work(runs)
    wall, cpu = time.perf_counter() - wall, time.process_time() - cpu
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return {"wall_s": wall, "cpu_s": cpu, "peak_memory_gib": round(peak / 2**20, 2)}


if __name__ == "__main__":
    main()
