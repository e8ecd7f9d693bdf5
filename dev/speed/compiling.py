"""Seconds of compilation of a run's steps: the first run on a machine, and a second one in a new process."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

import torch

from specbench.specs.run_spec import Sampling

DECODERS = "ar,sjd"


def bench_compile(sampling: Sampling, rounds: int) -> tuple[list[dict], list[str]]:
    """Compile the steps of one image each with an empty cache of Inductor, and again with the one it left."""
    rows = []
    for turn in range(rounds):
        with tempfile.TemporaryDirectory() as folder:
            cache = Path(folder) / "inductor"
            rows += [
                {"name": name, "round": turn, "decoders": DECODERS, **compile_facts(Path(folder) / name, cache)}
                for name in ("first", "second")
            ]
    return rows, [f"{row['name']}: {row['compile_s']:.1f} s, {row['compiled_forms']} forms" for row in rows]


def compile_facts(out: Path, cache: Path) -> dict[str, float]:
    """`compile_s` and `compiled_forms` that a run in a process of its own notes in run.json."""
    flags = {"model": "shapes", "decoder": DECODERS, "limit": 1, "compile": "on", "threads": torch.get_num_threads()}
    command = [sys.executable, "-m", "specbench", "run", "--quiet", "--out", str(out)]
    command += [part for name, value in flags.items() for part in (f"--{name}", str(value))]
    subprocess.run(command, env=os.environ | {"TORCHINDUCTOR_CACHE_DIR": str(cache)}, check=True)
    invocation = json.loads(next(out.glob("*/run.json")).read_text())["invocations"][-1]
    return {name: invocation[name] for name in ("compile_s", "compiled_forms")}
