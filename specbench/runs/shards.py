"""Shards: each process decodes one share of the images, chosen by `--shard I/N`, the scheduler or the launcher."""

from collections.abc import Mapping

from specbench.errors import SpecbenchError
from specbench.system.limits import whole_number

MOST_SHARDS = 100_000
_AUTO = "auto"
_TASKS = (
    ("RANK", "WORLD_SIZE"),
    ("OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE"),
    ("PMI_RANK", "PMI_SIZE"),
    ("SLURM_PROCID", "SLURM_NTASKS"),
)
"""Variables with a task's index, from 0, and the number of tasks. Inner launchers first: torchrun, mpirun, srun."""
_ARRAYS = ("SLURM_ARRAY_TASK_ID", "PBS_ARRAY_INDEX", "PBS_ARRAYID", "LSB_JOBINDEX")
_FROM_1 = "number the array from 1: --array=1-N, -J 1-N or [1-N]"


def plan_shard(text: str | None, env: Mapping[str, str]) -> tuple[tuple[int, int], str]:
    """Return the shard of this process, the number of shards, and a note for the user. `text`: "2/8"; "auto" (variables
    of SLURM, LSF, MPI and torchrun); "auto/8" for job arrays without a variable for their size, such as PBS."""
    if not text:
        return (1, 1), ""
    if text == _AUTO or text.startswith(f"{_AUTO}/"):
        return _automatic(text, env)
    number, slash, shards = text.partition("/")
    if not (slash and 1 <= whole_number(number) <= whole_number(shards) <= MOST_SHARDS):
        advice = "write for example 2/8 for the second of eight shards; auto reads it from SLURM, LSF, MPI or torchrun"
        raise SpecbenchError(f"--shard {text}: expected I/N with 1 <= I <= N, or auto", advice)
    return (int(number), int(shards)), ""


def shard_folder(number: int, shards: int) -> str:
    """Return the folder of a shard's runs inside --out, because shards must not write to the same folder."""
    return f"shard-{number}-of-{shards}" if shards > 1 else ""


def _automatic(text: str, env: Mapping[str, str]) -> tuple[tuple[int, int], str]:
    """Return the shard of this process from its index in the job array and its task index within the job."""
    size = text.partition("/")[2]
    array, task = _array(text, size, env), _task(env)
    if size and array is None:
        raise SpecbenchError(
            f"--shard {text}: this is not an array job", "for tasks of one job, use auto without a number"
        )
    if array is None and task is None:
        return (1, 1), "--shard auto: no scheduler or launcher has assigned a shard, so all images are decoded here"
    (job, jobs), (rank, tasks) = array or (1, 1), task or (0, 1)
    return ((job - 1) * tasks + rank + 1, jobs * tasks), ""


def _task(env: Mapping[str, str]) -> tuple[int, int] | None:
    for number, count in _TASKS:
        rank, tasks = _number(env, number), _number(env, count)
        if rank is None or not tasks or rank >= tasks:
            continue
        if number == "SLURM_PROCID" and tasks > 1 and "SLURM_JOB_ID" in env and "SLURM_STEP_ID" not in env:
            what = f"--shard auto: this is the batch script, not one of the job's {tasks} tasks"
            raise SpecbenchError(what, "start the command with srun")
        return rank, tasks
    return None


def _array(text: str, size: str, env: Mapping[str, str]) -> tuple[int, int] | None:
    """Return the number of a job in its array, from 1, and the array's size."""
    name = next((name for name in _ARRAYS if _number(env, name) is not None), None)
    number = _number(env, name) if name else None
    if number is None or (name == "LSB_JOBINDEX" and number == 0):  # 0 in LSF: no array
        return None
    if size:
        jobs, first = whole_number(size), 1
    elif name == "SLURM_ARRAY_TASK_ID":  # the count is too small if only a part of an array is resubmitted
        first, last = _number(env, "SLURM_ARRAY_TASK_MIN") or 0, _number(env, "SLURM_ARRAY_TASK_MAX") or 0
        jobs = _number(env, "SLURM_ARRAY_TASK_COUNT") or 0
        jobs = jobs if first in (0, 1) and last - first + 1 == jobs else 0
    else:
        jobs, first = _number(env, "LSB_JOBINDEX_END") or 0 if name == "LSB_JOBINDEX" else 0, 1
    if not first <= number < first + jobs <= MOST_SHARDS + first:
        what = f"--shard {text}: {name}={number} does not determine the shard and the number of shards"
        raise SpecbenchError(what, f"give the size as --shard auto/N, and {_FROM_1}")
    return number - first + 1, jobs


def _number(env: Mapping[str, str], name: str) -> int | None:
    value = env.get(name, "")
    return int(value) if value.isascii() and value.isdecimal() and len(value) <= 10 else None
