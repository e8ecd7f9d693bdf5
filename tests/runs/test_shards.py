"""The part of a process by the variables of its scheduler or launcher."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
from refusals import refused

from specbench.runs.shards import plan_shard
from specbench.store.run_store import RunStore

STEP = {"SLURM_JOB_ID": "7", "SLURM_STEP_ID": "0"}


def array(number, first, last, count=None):
    names = ("SLURM_ARRAY_TASK_ID", "SLURM_ARRAY_TASK_MIN", "SLURM_ARRAY_TASK_MAX", "SLURM_ARRAY_TASK_COUNT")
    return dict(zip(names, map(str, (number, first, last, count or last - first + 1)), strict=True))


@pytest.mark.parametrize(("text", "env", "part"), [
    ("auto", {"SLURM_PROCID": "2", "SLURM_NTASKS": "4", **STEP}, (3, 4)),
    ("auto", {"RANK": "0", "WORLD_SIZE": "4", "SLURM_PROCID": "1", "SLURM_NTASKS": "2", **STEP}, (1, 4)),
    ("auto", {"OMPI_COMM_WORLD_RANK": "3", "OMPI_COMM_WORLD_SIZE": "4"}, (4, 4)),
    ("auto", array(3, 1, 16), (3, 16)), ("auto", array(0, 0, 7), (1, 8)),
    ("auto", {**array(2, 1, 3), "SLURM_PROCID": "1", "SLURM_NTASKS": "4", **STEP}, (6, 12)),
    ("auto", {**array(2, 1, 3), "SLURM_PROCID": "0", "SLURM_NTASKS": "1", "SLURM_JOB_ID": "7"}, (2, 3)),
    ("auto/16", array(3, 3, 7, 2), (3, 16)), ("auto/16", {"PBS_ARRAY_INDEX": "16"}, (16, 16)),
    ("auto/4", {"PBS_ARRAYID": "1", "PMI_RANK": "1", "PMI_SIZE": "2"}, (2, 8)),
    ("auto", {"LSB_JOBINDEX": "5", "LSB_JOBINDEX_END": "8"}, (5, 8)),
    ("2/8", {"RANK": "0", "WORLD_SIZE": "4"}, (2, 8)), ("", {"RANK": "0", "WORLD_SIZE": "4"}, (1, 1)),
])  # fmt: skip
def test_the_part_of_a_task(text, env, part):
    assert plan_shard(text, env) == (part, "")


@pytest.mark.parametrize(("text", "env", "problem"), [
    ("auto", {"SLURM_PROCID": "0", "SLURM_NTASKS": "4", "SLURM_JOB_ID": "7"}, "start the command with srun"),
    ("auto", array(3, 3, 7, 2), "give the size as --shard auto/N"),
    ("auto", array(3, 3, 3), "give the size as --shard auto/N"),
    ("auto", array(3, 1, 5, 3), "give the size as --shard auto/N"),
    ("auto", {"PBS_ARRAY_INDEX": "3"}, "give the size as --shard auto/N"),
    ("auto/2", {"PBS_ARRAY_INDEX": "3"}, "number the array from 1"),
    ("auto/2", {"PBS_ARRAY_INDEX": "0"}, "number the array from 1"),
    ("auto/2", {"RANK": "0", "WORLD_SIZE": "2"}, "not an array job"),
    ("auto/x", {"PBS_ARRAY_INDEX": "1"}, "--shard auto/x"), ("automatic", {}, "or auto"),
    *((text, {}, "--shard") for text in ("0/2", "3/2", "2", "a/b", "1/0", "-1/2", "1/2/3", "٣/٤", "1/" + 5000 * "9")),
])  # fmt: skip
def test_a_part_that_is_not_known_is_refused(text, env, problem):
    refused(problem, plan_shard, text, env)


def test_without_a_scheduler_a_line_says_that_all_is_decoded_here():
    part, note = plan_shard("auto", {"LSB_JOBINDEX": "0"})
    assert part == (1, 1) and "all images are decoded here" in note


STUBS = {
    "srun": """#!/bin/bash
# As srun: a copy for each task, and the highest exit code. The first time, the end of the time limit is near.
export SLURM_STEP_ID=0
tasks=()
for rank in $(seq 0 $((SLURM_NTASKS - 1))); do SLURM_PROCID=$rank "$@" & tasks+=($!); done
if [ ! -e warned ]; then
    touch warned
    until ls parts/*/*/samples/*.parquet > /dev/null 2>&1; do sleep 0.1; done
    kill -USR1 "${tasks[@]}"
fi
highest=0
for task in "${tasks[@]}"; do wait $task; code=$?; [ $code -gt $highest ] && highest=$code; done
exit $highest
""",
    "scontrol": '#!/bin/bash\necho "$@" >> requeued\n',
}


@pytest.mark.slow
def test_the_job_of_the_page_is_requeued_resumes_merges_and_scores(tmp_path):
    page = (Path(__file__).parents[2] / "docs" / "workers.md").read_text()
    script = page.partition("```bash\n")[2].partition("```")[0]
    assert len(script.splitlines()) <= 20
    (tmp_path / "job.sbatch").write_text(script)
    (tmp_path / "bin").mkdir()
    for name, text in STUBS.items():
        (tmp_path / "bin" / name).write_text(text)
        (tmp_path / "bin" / name).chmod(0o755)
    (tmp_path / ".venv" / "bin").mkdir(parents=True)
    folders = f"{tmp_path / 'bin'}:{Path(sys.executable).parent}"
    (tmp_path / ".venv" / "bin" / "activate").write_text(f"export PATH={folders}:$PATH\n")
    env = {**os.environ, "SLURM_JOB_ID": "7", "SLURM_NTASKS": "2", "SLURM_PROCID": "0"}

    def job():
        return subprocess.run(
            ["bash", "job.sbatch"], cwd=tmp_path, env=env, capture_output=True, text=True, timeout=600
        )

    first = job()
    assert first.returncode == 138 and (tmp_path / "requeued").read_text() == "requeue 7\n", first.stderr
    assert "stopped by SIGUSR1 with" in first.stderr and "Traceback" not in first.stderr
    second = job()
    assert second.returncode == 0 and "already done" in second.stderr, second.stderr
    assert sorted(path.name for path in (tmp_path / "parts").glob("shard-*")) == ["shard-1-of-2", "shard-2-of-2"]
    assert "shapes-detector" in second.stdout
    assert all(len(RunStore(folder).samples(["status"])) == 4 for folder in (tmp_path / "parts").glob("shapes-*"))
