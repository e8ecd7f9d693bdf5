"""Whole and right things for `cases.py` to damage: a results folder, a draft head, a checkpoint; each made once."""

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
from specbench.runs.executors.local import InProcess
from specbench.runs.runner import run

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT / "tests"))
from checkpoints import write  # noqa: E402

TABLES = tuple(path.read_text() for path in sorted((ROOT / "benchmarks").glob("*-[1-4].toml")))


@functools.cache
def example_run() -> Path:
    """A results folder with one small run."""
    out = Path(tempfile.mkdtemp(prefix="specbench-fuzz-")) / "results"
    run(InProcess(make_model()), specs()[1:], UNITS[:3], out)
    return out


def example_info() -> dict:
    """Its run.json."""
    (path,) = example_run().glob("*/run.json")
    return json.loads(path.read_text())


@functools.cache
def example_head() -> Path:
    """A folder with a draft head."""
    folder = Path(tempfile.mkdtemp(prefix="specbench-fuzz-"))
    config = LlamaConfig(vocab_size=11, hidden_size=8, intermediate_size=12, num_hidden_layers=1, num_attention_heads=2)
    save_head(new_head(config, torch.zeros(11, 8), 0), folder, {})
    return folder


@functools.cache
def example_checkpoint() -> Path:
    """A folder with a checkpoint of SimpleAR."""
    folder = Path(tempfile.mkdtemp(prefix="specbench-fuzz-"))
    write("simplear", folder)
    return folder
