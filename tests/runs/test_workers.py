"""However many workers decode, and whichever of them die, the rows equal the rows of a single process. It concerns
several modules: executors.ray_workers, ray_cluster and local."""

import json
import random
import shutil
import subprocess
import threading
from collections import Counter
from contextlib import closing
from dataclasses import replace

import pytest
import tiny
from stored_rows import contents
from tiny import REQUESTS, SPECS

from specbench.errors import FAILURE, MISSING_PREREQUISITE, PARTIAL, SpecbenchError
from specbench.runs.executors import local, ray_cluster
from specbench.runs.executors.local import Chunk, decode_chunk
from specbench.runs.executors.ray_workers import ATTEMPTS, RESTARTS, RayWorkers, WorkerLost, WorkerPool
from specbench.runs.runner import run
from specbench.store.run_store import RunStore

NODE_A, NODE_B = {"cpu": "A", "cores": 8, "gpus": []}, {"cpu": "B", "cores": 64, "gpus": []}


class SimulatedCrew:
    """Workers that answer in any order and die when `fate` says so."""

    def __init__(self, size: int, draw: random.Random, fate=lambda chunk: False, hardware=None):
        self.size, self._draw, self._fate, self._hardware = size, draw, fate, hardware
        self._model, self._work = tiny.tiny_model(), {}
        self.started, self.most_at_once = Counter(range(size)), 0

    def prepare(self, worker, specs, text):
        return self._take(worker, None)

    def submit(self, worker, chunk):
        return self._take(worker, chunk)

    def _take(self, worker, chunk):
        assert worker not in [busy for busy, _ in self._work.values()]
        self._work[ticket := object()] = worker, chunk
        self.most_at_once = max(self.most_at_once, len(self._work))
        return ticket

    def wait(self, tickets):
        assert set(tickets) == set(self._work)
        return self._draw.choice(list(tickets))

    def result(self, ticket):
        _, chunk = self._work.pop(ticket)
        if chunk is None:
            return {"hardware": next(self._hardware)} if self._hardware else {}
        if self._fate(chunk):
            raise WorkerLost("a simulated death")
        return decode_chunk(self._model, chunk)

    def replace(self, worker):
        self.started[worker] += 1


def test_workers_on_other_hardware_are_recorded(tmp_path):
    """Times of a run that decoded on two kinds of machine are comparable with neither kind."""
    crew = SimulatedCrew(3, random.Random(1), hardware=iter([NODE_A, NODE_B, NODE_B]))
    run(WorkerPool(lambda: crew), SPECS, REQUESTS, tmp_path)
    for spec in SPECS:
        info = RunStore(tmp_path / spec.run_id).info()
        assert [line.split(", ")[1] for line in info.machines] == ["A", "B"]
        assert all(call.finished_at for call in info.invocations) and len(info.invocations) == 2


@pytest.mark.parametrize("size", [1, 2, 7, 64])
def test_any_number_of_workers_in_any_order(tmp_path, undisturbed, size):
    crew = SimulatedCrew(size, random.Random(size))
    summary = run(WorkerPool(lambda: crew), SPECS, REQUESTS, tmp_path)
    assert (summary.done, summary.failed) == (24, 0) and contents(tmp_path) == undisturbed
    assert crew.most_at_once >= min(size, 24)


@pytest.mark.parametrize("seed", range(6))
def test_workers_that_die_at_random(tmp_path, undisturbed, seed):
    """Restarts are finite, no image is tried more than twice, and a rerun makes the rows what they should be."""
    draw = random.Random(seed)
    tried: Counter = Counter()

    def fate(chunk: Chunk) -> bool:
        tried.update((chunk.spec.run_id, *request.key) for request in chunk.requests)
        return draw.random() < 0.15

    crew = SimulatedCrew(3, draw, fate)
    try:
        summary = run(WorkerPool(lambda: crew), SPECS, REQUESTS, tmp_path)
        assert summary.done + summary.failed == 24
    except SpecbenchError as error:
        assert "all 3 workers were lost" in error.what and error.exit_code == FAILURE
    assert max(tried.values()) <= ATTEMPTS and max(crew.started.values()) <= 1 + RESTARTS
    run(tiny.executor(), SPECS, REQUESTS, tmp_path)
    assert contents(tmp_path) == undisturbed


def test_an_image_that_takes_two_workers_along_is_a_row_that_says_so_and_its_batch_goes_on(tmp_path, undisturbed):
    def fate(chunk: Chunk) -> bool:
        return any(request.prompt_id == "CAT" for request in chunk.requests)

    summary = run(WorkerPool(lambda: SimulatedCrew(4, random.Random(0), fate), restarts=9), SPECS, REQUESTS, tmp_path)
    assert (summary.done, summary.failed, summary.problem().exit_code) == (18, 6, PARTIAL)
    rows = RunStore(next(tmp_path.iterdir())).samples()
    pool = WorkerPool(lambda: SimulatedCrew(2, random.Random(0), fate), restarts=9)
    batched = run(pool, [tiny.spec("ar", batch=6)], REQUESTS, tmp_path / "batched")
    assert (batched.done, batched.failed) == (9, 3)
    shutil.rmtree(tmp_path / "batched")
    bad = rows[rows["status"] == "failed"]
    assert set(bad["error"]) == {"its worker was lost 2 times: a simulated death"} and set(bad["attempts"]) == {2}
    assert set(rows[rows["status"] == "ok"]["attempts"]) == {1}
    run(tiny.executor(), SPECS, REQUESTS, tmp_path)
    assert contents(tmp_path) == undisturbed


def test_out_of_memory_in_one_worker_is_tried_again_once(tmp_path, undisturbed, monkeypatch):
    healthy, failed = local.decode, []

    def short_of_memory(model, requests, *rest, **more):
        key = requests[0].prompt_id, requests[0].sample
        if requests[0].prompt_id == "CAT" and key not in failed:
            failed.append(key)
            raise MemoryError("a device out of memory")
        return healthy(model, requests, *rest, **more)

    monkeypatch.setattr(local, "decode", short_of_memory)
    summary = run(WorkerPool(lambda: SimulatedCrew(2, random.Random(0))), SPECS, REQUESTS, tmp_path)
    assert (summary.done, summary.failed) == (24, 0) and failed and contents(tmp_path) == undisturbed


def test_what_cannot_be_decoded_is_said_once_and_not_tried_forever(tmp_path, monkeypatch):
    calls: Counter = Counter()

    def broken(model, requests, *rest, **more):
        calls.update(request.prompt_id for request in requests)
        raise RuntimeError("no luck")

    monkeypatch.setattr(local, "decode", broken)
    summary = run(WorkerPool(lambda: SimulatedCrew(3, random.Random(0))), SPECS[:1], REQUESTS, tmp_path)
    assert (summary.failed, summary.errors) == (12, ["RuntimeError: no luck"]) and sum(calls.values()) == ATTEMPTS * 12


def test_ctrl_c_finishes_what_is_being_decoded(tmp_path, undisturbed):
    pool, reporter = WorkerPool(lambda: SimulatedCrew(3, random.Random(0))), tiny.interrupt_after(1)
    summary = run(pool, SPECS, REQUESTS, tmp_path, reporter=reporter)
    assert summary.interrupted and summary.done == reporter.rows <= 5
    run(tiny.executor(), SPECS, REQUESTS, tmp_path)
    assert contents(tmp_path) == undisturbed


def test_a_finished_run_typed_again_is_done_and_starts_no_workers(tmp_path, undisturbed):
    crew = SimulatedCrew(2, random.Random(0))
    run(WorkerPool(lambda: crew), SPECS, REQUESTS, tmp_path)
    summary = run(WorkerPool(lambda: pytest.fail("workers were started")), SPECS, REQUESTS, tmp_path)
    assert (summary.resumed, summary.done, summary.problem()) == (24, 0, None) and contents(tmp_path) == undisturbed


def test_without_ray_one_line_says_what_to_install(cli, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setitem(__import__("sys").modules, "ray", None)
    cli("run", "--decoder", "ar", "--workers", "2").refused("'ray>=2.40'", code=MISSING_PREREQUISITE, alone=True)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(("outcome", "problem"), [
    (subprocess.TimeoutExpired("ray", 15), "no Ray cluster answers there: no answer within 15 s"),
    ("raw log\nray.exceptions.AuthenticationError: RPC error: InvalidAuthToken", "requires a token (export RAY"),
])  # fmt: skip
def test_a_cluster_that_does_not_answer_is_one_line_of_a_dry_run(cli, tmp_path, monkeypatch, outcome, problem):
    pytest.importorskip("ray", reason="Ray is not installed")

    def health_check(command, **_):
        if isinstance(outcome, Exception):
            raise outcome
        return subprocess.CompletedProcess(command, 1, "", outcome)

    monkeypatch.setattr(ray_cluster.subprocess, "run", health_check)
    run = ("run", "--decoder", "ar", "--ray", "HEAD:6379", "--limit", "1", "--out", tmp_path, "--dry-run", "--json")
    (obstacle,) = json.loads(cli(*run).out)[0]["obstacles"]
    assert problem in obstacle


def test_latency_and_throughput_never_share_a_folder_or_a_table(cli, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    command = ("run", "--decoder", "ar", "--limit", "1", "--dry-run", "--json")
    others = ((), ("--mode", "throughput"), ("--workers", "2"))
    ids = [json.loads(cli(*command, *more).out)[0]["run_id"] for more in others]
    assert ids[0] != ids[1] and ids[0] == json.loads(cli(*command, "--mode", "latency").out)[0]["run_id"]
    run(tiny.executor(), [replace(tiny.spec("ar"), mode="throughput")], REQUESTS[:2], tmp_path)
    rows = RunStore(next(tmp_path.iterdir())).samples()
    assert rows[["latency_ms", "latency_e2e_ms"]].isna().all(axis=None) and (rows["target_ms"] > 0).all()


@pytest.mark.slow
def test_two_ray_nodes_one_of_which_is_killed(tmp_path, undisturbed):
    pytest.importorskip("ray", reason="Ray is not installed")
    from ray.cluster_utils import Cluster

    limits = {"num_cpus": 1, "object_store_memory": 100 * 2**20}
    cluster = Cluster(initialize_head=True, head_node_args=limits | {"include_dashboard": False})
    try:
        second = cluster.add_node(**limits)
        cluster.wait_for_nodes()

        sabotage = threading.Thread(target=cluster.remove_node, args=(second, False))
        saboteur = tiny.OnRow(lambda rows: rows == 6 and sabotage.start())
        with closing(RayWorkers(tiny.tiny_model, 2, cluster.address)) as crew:
            assert len(set(crew.pids())) == 2
            summary = run(WorkerPool(lambda: crew), SPECS, REQUESTS, tmp_path, reporter=saboteur)
        assert (summary.done, summary.failed) == (24, 0) and contents(tmp_path) == undisturbed
    finally:
        cluster.shutdown()
