"""Valid inputs for `cases.py` to corrupt: a results folder, a draft head, a checkpoint; each created once."""

from __future__ import annotations

import functools
import json
import sys
import tempfile
from pathlib import Path

import torch
from kills import UNITS, make_model, specs
from transformers import LlamaConfig

from specbench.models.draft_head import new_head, save_head
from specbench.runs.executors.local import LocalExecutor
from specbench.runs.runner import run

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT / "tests"))
from checkpoints import write  # noqa: E402

TABLES = tuple(path.read_text() for path in sorted((ROOT / "benchmarks").glob("*-[1-4].toml")))


@functools.cache
def example_run() -> Path:
    """Create a results folder with one small run."""
    out = Path(tempfile.mkdtemp(prefix="specbench-fuzz-")) / "results"
    run(LocalExecutor(make_model()), specs()[1:], UNITS[:3], out)
    return out


def example_info() -> dict:
    """Read its run.json."""
    (path,) = example_run().glob("*/run.json")
    return json.loads(path.read_text())


@functools.cache
def example_head() -> Path:
    """Create a folder with a draft head."""
    folder = Path(tempfile.mkdtemp(prefix="specbench-fuzz-"))
    config = LlamaConfig(vocab_size=11, hidden_size=8, intermediate_size=12, num_hidden_layers=1, num_attention_heads=2)
    save_head(new_head(config, torch.zeros(11, 8), 0), folder, {})
    return folder


@functools.cache
def example_checkpoint() -> Path:
    """Create a folder with a checkpoint of SimpleAR."""
    folder = Path(tempfile.mkdtemp(prefix="specbench-fuzz-"))
    write("simplear", folder)
    return folder
