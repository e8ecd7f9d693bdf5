"""Scaling over workers, and CPU cost of the driver, with models that sleep instead of computing.

    python dev/speed/scale.py [--out results/scale]

Every step of the model sleeps, so one worker and two workers differ only in the distribution of work. The driver's own
time is measured with 64 simulated workers that answer at once with stored images: it covers the queue and writing rows
and pictures to the disk, and nothing else.
"""

import argparse
import json
import sys
import tempfile
import time
from collections import deque
from collections.abc import Sequence
from contextlib import closing
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1] / "drills"))

from crew import ForkCrew
from kills import TEXTS, make_model, specs

from specbench.prompts import Request
from specbench.runs.executors.local import Chunk, decode_chunk
from specbench.runs.executors.ray_workers import WorkerPool
from specbench.runs.run_progress import Reporter
from specbench.runs.runner import run
from specbench.system import environment
from specbench.system.files import write_atomically

STEP_S = 0.2
REQUESTS = [Request(TEXTS[number % 4], f"p{number}") for number in range(128)]


def sleeping_model():
    """The model of the drills, with a fixed forward time of `STEP_S`."""
    model = make_model()
    begin = model.begin

    def begin_slow(*arguments):
        session = begin(*arguments)
        forward = session.forward

        def slow(*arguments, **options):
            time.sleep(STEP_S)
            return forward(*arguments, **options)

        session.forward = slow
        return session

    model.begin = begin_slow
    return model


class Stopwatch(Reporter):
    """Reporter that times from the first ready worker to the last row."""

    def start(self, total: int, done: int, folders: Sequence[Path] = ()) -> None:
        self._started = time.perf_counter()

    def row(self, run_id, row) -> None:
        self.seconds = time.perf_counter() - self._started


class Instant:
    """Worker backend that returns previously decoded rows."""

    def __init__(self, size: int, finished: dict):
        self.size, self._finished, self._done = size, finished, deque()

    def prepare(self, worker, specs, text):
        return self._take({})

    def submit(self, worker, chunk):
        return self._take(self._finished[chunk.requests[0].prompt_id])

    def _take(self, outcome):
        self._done.append(ticket := (object(), outcome))
        return ticket[0]

    def wait(self, tickets):
        return self._done[0][0]

    def result(self, ticket):
        return self._done.popleft()[1]


def seconds_with(workers: int, images: int) -> float:
    watch = Stopwatch()
    with tempfile.TemporaryDirectory() as out, closing(ForkCrew(sleeping_model, workers)) as crew:
        run(WorkerPool(lambda: crew), specs()[:1], REQUESTS[:images], Path(out), reporter=watch)
    return watch.seconds


def driver_ms(workers: int) -> float:
    """CPU milliseconds of the driver per image."""
    model, spec = make_model(), specs()[0]
    finished = {request.prompt_id: decode_chunk(model, Chunk(spec, (request,))) for request in REQUESTS}
    with tempfile.TemporaryDirectory() as out:
        started = time.process_time()
        run(WorkerPool(lambda: Instant(workers, finished)), [spec], REQUESTS, Path(out))
        return 1000 * (time.process_time() - started) / len(REQUESTS)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--images", type=int, default=24)
    parser.add_argument("--out", type=Path, default=Path("results/scale"))
    chosen = parser.parse_args()
    alone, two = (seconds_with(workers, chosen.images) for workers in (1, 2))
    result = {
        "provenance": environment.environment_facts(),
        "step_s": STEP_S,
        "images": chosen.images,
        "one_worker_s": alone,
        "two_workers_s": two,
        "speedup": alone / two,
        "driver_cpu_ms_per_image": {str(workers): driver_ms(workers) for workers in (1, 64)},
    }
    text = json.dumps(result, indent=1) + "\n"
    write_atomically(chosen.out / "workers.json", text.encode())
    print(text, end="")


if __name__ == "__main__":
    main()
