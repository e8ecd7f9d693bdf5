"""Time of resuming and reporting many stored images, and of scoring them with the cheapest metric.

    python dev/speed/report_scale.py [--rows 1000000] [--images 400] [--out results/speed]

The rows are those of two runs of `shapes`, half AR and half SJD, repeated under new prompt ids; their probabilities are
drawn anew, so that they compress as badly as true ones. Scoring is timed on some true images and taken times the rows.
"""

from __future__ import annotations

import argparse
import json
import resource
import shutil
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from specbench import reporting
from specbench.metrics import scoring
from specbench.store.parquet_log import ParquetLog
from specbench.store.run_folders import find_runs
from specbench.store.run_store import RunStore
from specbench.store.schema import KEY, SAMPLES
from specbench.system import environment
from specbench.system.files import write_atomically

SOURCE = Path(__file__).parents[2] / "results" / "readme"
RUNS = ("shapes-ar", "shapes-sjd-")
PART = 4096


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rows", type=int, default=1_000_000)
    parser.add_argument("--images", type=int, default=400, help="number of images for the timing of scoring")
    parser.add_argument("--out", type=Path, default=Path("results/speed"))
    chosen = parser.parse_args()
    with tempfile.TemporaryDirectory() as scratch:
        folders = [enlarge(folder, Path(scratch), chosen.rows // len(RUNS)) for folder in find_runs(SOURCE, RUNS)]
        resume = timed(lambda: [RunStore(folder).completed() for folder in folders])
        report = timed(lambda: reporting.render(reporting.report_rows(folders)))
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        score = timed(lambda: scoring.score(folders, ["shapes-detector"]), prepare=lambda: keep(folders, chosen.images))
    scored = len(RUNS) * (chosen.images // len(RUNS))
    scoring_all = {name: seconds * chosen.rows / scored for name, seconds in score.items()}
    result = {
        "provenance": environment.environment_facts(),
        "rows": chosen.rows,
        "resume": resume,
        "report": report,
        "peak_memory_gib": round(peak / 2**20, 2),
        "scored_images": scored,
        "score": score,
        "score_all_rows": scoring_all,
        "report_over_scoring": {name: report[name] / scoring_all[name] for name in report},
    }
    text = json.dumps(result, indent=1) + "\n"
    write_atomically(chosen.out / "report_scale.json", text.encode())
    print(text, end="")


def enlarge(folder: Path, out: Path, rows: int) -> Path:
    """Copy a run with `rows` rows and its original images."""
    target = out / folder.name
    (target / "samples").mkdir(parents=True)
    shutil.copy(folder / "run.json", target)
    shutil.copytree(folder / "images", target / "images")
    true = pa.concat_tables(RunStore(folder).batches(SAMPLES.names))
    log, draw = ParquetLog(target / "samples", SAMPLES, KEY), np.random.default_rng(0)
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


def keep(folders: list[Path], images: int) -> None:
    """Reduce the run to this number of rows, for scoring."""
    for folder in folders:
        first = sorted((folder / "samples").iterdir())
        table = pq.read_table(first[0]).slice(0, images // len(folders))
        for path in first:
            path.unlink()
        pq.write_table(table, folder / "samples" / "00000000-00000000.parquet")


def timed(work: Callable[[], object], prepare: Callable[[], object] = lambda: None) -> dict[str, float]:
    prepare()
    wall, cpu = time.perf_counter(), time.process_time()
    work()
    return {"wall_s": time.perf_counter() - wall, "cpu_s": time.process_time() - cpu}


if __name__ == "__main__":
    main()
