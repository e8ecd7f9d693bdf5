"""One run on several machines: what makes it, what decoded it, and shards that differ in their threads alone. It
concerns several modules: run_spec, run_info, run_folders, runs.preparation, cli.stored, reporting.sections."""

from dataclasses import replace

import pytest
import tiny
from synthetic import INVOCATION

from specbench.papers.cells import same_hardware
from specbench.reporting.comparability import configuration, mismatched_fields
from specbench.reporting.report_rows import report_rows
from specbench.reporting.sections import circumstances, sections
from specbench.runs.preparation import _twins
from specbench.store.merge_shards import merge_runs
from specbench.store.run_folders import find_runs_like, run_folder
from specbench.store.run_info import Invocation, RunInfo
from specbench.store.run_store import RunStore

CARDS = ["NVIDIA A100-SXM4-40GB"] * 7 + ["NVIDIA L4"]
SPEC = tiny.spec("ar")
ON_CUDA = replace(SPEC, device="cuda", threads=8)


def described(spec, gpus=(), **hardware) -> RunInfo:
    machine = INVOCATION["hardware"] | {"gpus": list(gpus)} | hardware
    return RunInfo(spec, invocations=[Invocation.from_json(INVOCATION | {"hardware": machine})])


def stored(out, threads: int, device: str = "cpu") -> RunStore:
    spec = replace(SPEC, threads=threads, device=device)
    store = RunStore(out / spec.run_id)
    store.check(spec)
    with store.lock(spec):
        return store.begin(spec, INVOCATION)


def test_a_run_continues_on_a_node_with_another_number_of_cores(tmp_path):
    store, _ = (stored(tmp_path, threads, device) for threads, device in ((8, "cuda"), (96, "cuda:1")))
    info = store.info()
    assert [(call.device, call.threads) for call in info.invocations] == [("cuda", 8), ("cuda:1", 96)]
    assert list(find_runs_like(tmp_path, **vars(replace(ON_CUDA, threads=1)))) == [store.folder]


def test_a_run_on_a_gpu_is_resumed_under_the_id_that_had_its_number_and_threads(tmp_path):
    earlier = tmp_path / ON_CUDA.earlier_ids[1]
    assert earlier.name == "enumerable-ar-b27d703c" != ON_CUDA.run_id and SPEC.run_id == "enumerable-ar-825d070e"
    stored(tmp_path, 8, "cuda").folder.rename(earlier)
    assert run_folder(tmp_path, ON_CUDA) == earlier and RunStore(earlier).check(ON_CUDA) is None
    assert run_folder(tmp_path, replace(ON_CUDA, threads=9)).name == ON_CUDA.run_id, "of 9 threads there was none"


@pytest.mark.parametrize(
    ("device", "gpus"), [("cpu", []), ("cuda", CARDS[:1]), ("cuda:7", CARDS[7:]), ("cuda:3", CARDS[:1])]
)
def test_what_decoded_is_named_and_compared(device, gpus):
    info = described(replace(SPEC, device=device), CARDS)
    [call] = info.invocations
    assert call.gpus == gpus and call.machine == ", ".join(["Linux x86_64", "Test CPU", "2 cores", *gpus])
    assert (", NVIDIA A100-SXM4-40GB (and 7 more), " in call.environment) == (device in ("cuda", "cuda:3"))
    assert same_hardware("NVIDIA A100", type("Run", (), {"info": info})()) == (gpus == CARDS[:1])


def test_cards_hidden_from_one_of_two_commands_make_no_other_hardware():
    first, other = described(ON_CUDA, CARDS), described(replace(ON_CUDA, device="cuda:0"), CARDS[:1])
    assert mismatched_fields(first, other) == {}
    assert configuration(first) == "float32" and configuration(described(SPEC)) == "float32, 1 thread"
    assert mismatched_fields(described(replace(SPEC, threads=2)), described(SPEC)) == {"threads": "threads (2, AR 1)"}


def test_run_merge_and_report_say_which_runs_differ_in_threads_alone(tmp_path, cli):
    for number, threads in ((1, 2), (2, 8)):
        stored(tmp_path / f"shard-{number}-of-2", threads)
    first, other, new = (replace(SPEC, threads=threads) for threads in (2, 8, 4))
    outcome = cli("merge", "--out", tmp_path)
    names = " and ".join(sorted([f"{first.run_id} (2)", f"{other.run_id} (8)"]))
    note = f"{names} differ only in the number of threads"
    assert outcome.code == 0 and note in " ".join(outcome.err.split())
    assert _twins(tmp_path, [other]) == [] and f"{new.run_id} (4)" in _twins(tmp_path, [new])[0]
    rows = report_rows([tmp_path / first.run_id, tmp_path / other.run_id])
    assert any(note in text for text in circumstances(rows))


def test_on_a_gpu_shards_of_two_nodes_are_one_run(tmp_path):
    for number, threads in ((1, 2), (2, 8)):
        stored(tmp_path / f"shard-{number}-of-2", threads, "cuda")
    [merged] = merge_runs((), tmp_path)
    [section] = sections(report_rows([merged.folder]))
    assert "cuda, eager, batch 1" in section.heading and "thread" not in section.heading
