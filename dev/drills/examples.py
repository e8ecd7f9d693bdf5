"""Valid inputs for `cases.py` to corrupt: a results folder, a draft head, a checkpoint; each created once."""

import functools
import itertools
import json
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

import torch
from kills import REQUESTS, make_model, specs
from transformers import LlamaConfig

from specbench import api
from specbench.metrics import scoring
from specbench.models.draft_head import new_head, save_head
from specbench.prompts import Prompt, Request
from specbench.prompts.public_files import read_dpg_bench
from specbench.runs.executors.local import LocalExecutor
from specbench.runs.runner import run
from specbench.store.packed import pack
from specbench.store.run_store import RunStore, write_audit
from specbench.store.schema import base_row, sample_row

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT / "tests" / "support"))
import published  # noqa: E402
import synthetic  # noqa: E402
from checkpoints import write  # noqa: E402
from drawn import drawn_run  # noqa: E402

TABLES = tuple(path.read_text() for path in sorted((ROOT / "benchmarks").glob("*-[1-4].toml")))


@functools.cache
def example_run() -> Path:
    """Create a results folder with one small run."""
    out = Path(tempfile.mkdtemp(prefix="specbench-fuzz-")) / "results"
    run(LocalExecutor(make_model()), specs()[1:], REQUESTS[:3], out)
    return out


def example_info() -> dict:
    """Read run.json of `example_run`."""
    (path,) = example_run().glob("*/run.json")
    return json.loads(path.read_text())


@functools.cache
def scorable() -> Path:
    """Create a folder whose `results` hold a run that `shapes-detector` can score."""
    box = Path(tempfile.mkdtemp(prefix="specbench-drill-"))
    drawn_run(box / "results", n=8)
    return box


@functools.cache
def shards() -> Path:
    """Create a folder with two shards of two runs."""
    box = Path(tempfile.mkdtemp(prefix="specbench-drill-"))
    for number in range(2):
        run(LocalExecutor(make_model()), specs(), REQUESTS[number::2], box / f"shard-{number + 1}-of-2")
    return box


@functools.cache
def exportable() -> Path:
    """Create a folder whose `results` hold a run of GenEval prompts."""
    box = Path(tempfile.mkdtemp(prefix="specbench-drill-"))
    drawn_run(box / "results", n=8, meta=lambda number: {"line": number, "include": []})
    return box


@functools.cache
def judged() -> Path:
    """Create a folder with a run of DPG-Bench's prompts and answers that claim to come from its judge."""
    box = Path(tempfile.mkdtemp(prefix="specbench-drill-"))
    prompts = read_dpg_bench(published.write("dpg-bench", box / "set"))
    small_run(box / "results", prompts, samples=4)
    lines = [
        f"images/{prompt.id}.png, ({left}, {top}, {left + 4}, {top + 4}), {question['question']}, yes"
        for prompt in prompts
        for top, left in itertools.product((0, 4), (0, 4))
        for question in prompt.meta["questions"]
    ]
    (box / "detail.txt").write_text("\n".join(lines))
    return box


@functools.cache
def empty() -> Path:
    """Create an empty folder."""
    return Path(tempfile.mkdtemp(prefix="specbench-drill-"))


@functools.cache
def example_stranger() -> Path:
    """Create a results folder with a run that was decoded by `shapes`, scored and audited, without any
    contradiction."""
    box = Path(tempfile.mkdtemp(prefix="specbench-fuzz-"))
    rows = [
        {"id": f"s{line}", "text": text, "category": "one", "line": line, "include": []}
        for line, text in enumerate(("a red circle", "two squares"))
    ]
    (box / "prompts.jsonl").write_text("\n".join(map(json.dumps, rows)))
    api.run(decoder="sjd", prompts=str(box / "prompts.jsonl"), baseline="0", out=str(box / "results"))
    (folder,) = (box / "results").iterdir()
    scoring.score([folder], ["shapes-detector"]).check()
    write_audit(folder, {"verdict": "consistent", "deviates": False, "fingerprint": "x", "tv": 0.0, "images": 2})
    return box / "results"


@functools.cache
def example_pack() -> Path:
    """Pack the folder of `example_stranger` into a file."""
    out = example_stranger()
    pack(list(out.iterdir()), out.parent / "runs.zip")
    return out.parent / "runs.zip"


def small_run(out: Path, prompts: Sequence[Prompt], samples: int = 1) -> None:
    """Create a results folder with one or several images per prompt."""
    with RunStore(out / synthetic.SJD.run_id).lock(synthetic.SJD).begin(synthetic.SJD, synthetic.INVOCATION) as store:
        for prompt, sample in itertools.product(prompts, range(samples)):
            base = base_row(Request.of(prompt, sample), 0, synthetic.INVOCATION["started_at"])
            row = sample_row(base, item := synthetic.generation(4, 40.0), True)
            store.append([row], {row["image"]: item.image})


@functools.cache
def example_head() -> Path:
    """Create a folder with a draft head."""
    folder = Path(tempfile.mkdtemp(prefix="specbench-fuzz-"))
    config = LlamaConfig(vocab_size=11, hidden_size=8, intermediate_size=12, num_hidden_layers=1, num_attention_heads=2)
    save_head(new_head(config, torch.zeros(11, 8), 0), folder, {})
    return folder


@functools.cache
def example_checkpoint(model: str = "simplear") -> Path:
    """Create a folder with a checkpoint of a model."""
    folder = Path(tempfile.mkdtemp(prefix="specbench-fuzz-"))
    write(model, folder)
    return folder
