"""Kill processes of a run at random moments, resume, and compare with an undisturbed run.

    python dev/drills/kills.py driver --kills 100    # also: moved, worker, pool-driver, pool-resume, ray-worker, ...
    python dev/drills/kills.py report    # with the outcomes of writers.py

Every kill is followed by a rerun to completion and a comparison of all rows and pictures. Outcomes are appended to
results/drills/kills.jsonl, a line per kill; a later call continues their count, so the drill may itself be stopped. The
model is enumerable: a run of 24 images takes a fraction of a second, so that kills hit all of its moments.
"""

import argparse
import json
import os
import random
import shutil
import signal
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path

import pandas as pd
import torch
from crew import ForkCrew

from specbench.checks.enumerable_model import EnumerableModel
from specbench.errors import PARTIAL, SpecbenchError
from specbench.models.interface import TokenLayout
from specbench.prompts import Request
from specbench.runs.executors.local import Executor, LocalExecutor
from specbench.runs.executors.ray_workers import RayWorkers, WorkerPool
from specbench.runs.runner import run
from specbench.specs.presets import resolve
from specbench.specs.run_spec import RunSpec, Sampling
from specbench.store import parquet_log
from specbench.system.version import __version__

RESULTS = Path(__file__).parents[2] / "results" / "drills"
LOG = RESULTS / "kills.jsonl"
TEXTS = ("a cat", "a dog", "two | cats", "a <b>dog</b>")
REQUESTS = [Request(TEXTS[n % 4], f"p/{n}", sample) for n in range(6) for sample in range(2)]
FACTS = ("status", "seed", "nfe", "tokens", "logp", "committed_step", "accepted", "image")


def make_model() -> EnumerableModel:
    return EnumerableModel(make_model.layout, TEXTS)


make_model.layout = TokenLayout.with_row_ends(2, 2, 3)
PREVIEWED = TokenLayout(2, 2, 4, (-1, -1, 4, -1, -1, 5, -1, -1, 5), before=((1, 2),), ranges=((0, 2), (1, 4)))
"""A preview before the grid; both have separate ids and row ends."""


def specs() -> list[RunSpec]:
    return [
        RunSpec(model="enumerable", weights_sha256="0" * 64, prompts="pets", prompts_sha256="1" * 64, seed=0,
                decoder=resolve(name, {} if name == "ar" else {"window": 3}), sampling=Sampling(guidance=2.0),
                batch=1, dtype="float32", device="cpu", threads=1)
        for name in ("ar", "preview" if make_model.layout is PREVIEWED else "scd-mc")
    ]  # fmt: skip


def decode_all(executor: Executor, out: Path) -> None:
    run(executor, specs(), REQUESTS, out)


def contents(out: Path) -> dict[tuple, list[tuple]]:
    """Read all rows and images by (prompt, sample), without using specbench."""
    images: dict[tuple, list[tuple]] = {}
    for folder in sorted(out.iterdir()):
        for row in pd.read_parquet(folder / "samples").to_dict("records"):
            facts = [row[name].tolist() if hasattr(row[name], "tolist") else row[name] for name in FACTS]
            picture = (folder / row["image"]).read_bytes() if row["image"] else None
            images.setdefault((folder.name, row["prompt_id"], row["sample"]), []).append((facts, picture))
    return images


def compare(out: Path, truth: dict) -> dict[str, int]:
    seen = contents(out)
    return {
        "rows": sum(map(len, seen.values())),
        "lost": len(truth.keys() - seen.keys()),
        "duplicated": sum(len(rows) - 1 for rows in seen.values()),
        "changed": sum(rows[-1] != truth[key][-1] for key, rows in seen.items() if key in truth),
        "foreign": len(seen.keys() - truth.keys()),
        "left_behind": len(list(out.rglob(".*.tmp"))),
    }


Drill = Callable[[Path, random.Random], bool]
"""Start a run in a folder and kill one of its processes; return whether the process was still alive."""


def local() -> Executor:
    return LocalExecutor(make_model())


def pool() -> Executor:
    return WorkerPool(lambda: ForkCrew(make_model, 2))


def driver(
    out: Path,
    draw: random.Random,
    executor: Callable[[], Executor] = local,
    resume: Callable[[], Executor] = local,
) -> bool:
    """Kill the whole run (SIGKILL) at a random moment."""
    child = os.fork()
    if not child:
        os.setpgrp()
        decode_all(executor(), out)
        os._exit(0)
    time.sleep(draw.uniform(0.0, driver.seconds))
    died = not os.waitpid(child, os.WNOHANG)[0]
    if died:
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
    for _ in range(2):  # once to the end, and again when all images exist
        decode_all(resume(), out)
    return died


driver.seconds = 1.0


def moved(out: Path, draw: random.Random) -> bool:
    """Move the results, a run, or a part of a run away at a random moment. The process must end with exit code 3 unless
    it is done, and a rerun must continue after the folder is back."""
    child = os.fork()
    if not child:
        os.setpgrp()
        try:
            decode_all(local(), out)
        except SpecbenchError as error:
            os._exit(error.exit_code)
        os._exit(0)
    time.sleep(draw.uniform(0.0, driver.seconds))
    place, aside = (
        draw.choice([out, *out.glob("*"), *out.glob("*/samples"), *out.glob("*/images")]),
        out.parent / "aside",
    )
    alive = not os.waitpid(child, os.WNOHANG)[0]
    if alive and place.is_dir():
        place.rename(aside)
        code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
        if code not in (0, PARTIAL) or (code == 0 and place.exists()):
            raise RuntimeError(f"exit code {code} after {place} was moved away")
        if place.exists():  # rows that were being written at that moment, but no later rows
            shutil.rmtree(place)
        aside.rename(place)
    elif alive:
        os.waitpid(child, 0)
    decode_all(local(), out)
    return alive


def pool_driver(out: Path, draw: random.Random) -> bool:
    """Kill the driver of two workers (SIGKILL) at a random moment."""
    return driver(out, draw, pool)


def pool_resume(out: Path, draw: random.Random) -> bool:
    """Kill the driver of two workers (SIGKILL) at a random moment, and resume with two workers."""
    return driver(out, draw, pool, pool)


def worker(out: Path, draw: random.Random) -> bool:
    """Kill one of two workers (SIGKILL) at a random moment; the run must continue by itself."""
    with closing(ForkCrew(make_model, 2)) as crew:
        return _kill_a_worker(crew, out, draw)


def _kill_a_worker(crew, out: Path, draw: random.Random) -> bool:
    victim, killed = draw.randrange(crew.size), []

    def strike() -> None:
        try:
            os.kill(crew.pids()[victim], signal.SIGKILL)
            killed.append(victim)
        except (ProcessLookupError, OSError):
            pass

    timer = threading.Timer(draw.uniform(0.0, driver.seconds), strike)
    timer.start()
    decode_all(WorkerPool(lambda: crew), out)
    timer.cancel()
    timer.join()
    decode_all(LocalExecutor(make_model()), out)
    return bool(killed)


def ray_workers() -> Iterator[Drill]:
    """Kill one of two Ray actors (SIGKILL) at a random moment; one Ray cluster serves all kills."""
    with closing(RayWorkers(make_model, 2)) as crew:
        crew.pids()
        yield lambda out, draw: _kill_a_worker(crew, out, draw)


def ray_nodes() -> Iterator[Drill]:
    """Kill the second of two local Ray nodes (SIGKILL) half-way, together with its worker."""
    yield _kill_a_node


def _kill_a_node(out: Path, draw: random.Random) -> bool:
    from ray.cluster_utils import Cluster

    limits = {"num_cpus": 1, "object_store_memory": 100 * 2**20}
    cluster = Cluster(initialize_head=True, head_node_args=limits | {"include_dashboard": False})
    try:
        second = cluster.add_node(**limits)
        cluster.wait_for_nodes()
        with closing(RayWorkers(make_model, 2, cluster.address)) as crew:
            crew.pids()
            timer = threading.Timer(draw.uniform(0.0, driver.seconds), cluster.remove_node, (second, False))
            timer.start()
            decode_all(WorkerPool(lambda: crew), out)
            timer.join()
            decode_all(LocalExecutor(make_model()), out)
    finally:
        cluster.shutdown()
    return True


KINDS: dict[str, Callable[[], Iterator[Drill]]] = {
    "driver": lambda: iter([driver]),
    "two-grids": lambda: iter([driver]),
    "moved": lambda: iter([moved]),
    "pool-driver": lambda: iter([pool_driver]),
    "pool-resume": lambda: iter([pool_resume]),
    "worker": lambda: iter([worker]),
    "ray-worker": ray_workers,
    "ray-node": ray_nodes,
}


def drill(kind: str, kills: int, seed: int, seconds: float) -> None:
    """Kill until the log has `kills` outcomes of the kind, or the time is up."""
    ends = time.monotonic() + seconds
    torch.set_num_threads(1)  # a forked child lacks the threads of its parent, but would wait for them
    parquet_log._FAN_IN, parquet_log._LEVELS = 3, (3, 9)  # merges happen within a run of 24 rows
    make_model.layout = PREVIEWED if kind == "two-grids" else make_model.layout
    started = time.monotonic()
    truth = truth_of_a_quiet_run()
    driver.seconds = time.monotonic() - started
    number, misses = sum(row["kind"] == kind for row in outcomes()), 0
    RESULTS.mkdir(exist_ok=True)
    for strike in KINDS[kind]():
        while number < kills and time.monotonic() < ends:
            draw = random.Random(f"{seed} {kind} {number} {misses}")
            with tempfile.TemporaryDirectory() as folder:
                if not strike(Path(folder) / "out", draw):
                    misses += 1  # the process ended before the kill
                    continue
                outcome = compare(Path(folder) / "out", truth)
            log(kind, number, outcome)
            number += 1
    print(f"{kind}: {number} of {kills} kills", file=sys.stderr)


def log(kind: str, number: int, outcome: dict[str, int]) -> None:
    with LOG.open("a") as lines:
        lines.write(json.dumps({"kind": kind, "kill": number, "specbench": __version__} | outcome) + "\n")


def truth_of_a_quiet_run() -> dict:
    with tempfile.TemporaryDirectory() as folder:
        decode_all(LocalExecutor(make_model()), Path(folder))
        return contents(Path(folder))


def outcomes() -> list[dict]:
    return [json.loads(line) for line in LOG.read_text().splitlines()] if LOG.exists() else []


def report() -> int:
    """Print the table of the log; returns 1 if any outcome was wrong."""
    totals: dict[str, Counter] = {}
    for row in outcomes():
        kind = totals.setdefault(row["kind"], Counter())
        kind.update({name: value for name, value in row.items() if isinstance(value, int) and name != "kill"})
        kind["kills"] += 1
    names = ("kills", "rows", "lost", "duplicated", "changed", "foreign", "left_behind")
    lines = [f"| killed | {' | '.join(name.replace('_', ' ') for name in names)} |", "| --- " * (len(names) + 1) + "|"]
    everything = sum(totals.values(), Counter())
    for kind, counts in [*totals.items(), ("all", everything)]:
        lines.append(f"| {kind} | {' | '.join(str(counts[name]) for name in names)} |")
    print("\n".join(lines))
    return int(any(everything[name] for name in names[2:]))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("kind", choices=(*KINDS, "report"))
    parser.add_argument("--kills", type=int, default=100)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--seconds", type=float, default=150.0, help="stop after this time; run again to continue")
    options = parser.parse_args()
    if options.kind == "report":
        sys.exit(report())
    drill(options.kind, options.kills, options.seed, options.seconds)


if __name__ == "__main__":
    main()
