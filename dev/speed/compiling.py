"""Seconds of compilation of a run's steps: the first run on a machine, and the second run in a new process."""

import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import torch

from specbench.specs.run_spec import Sampling

RUNS = {"first": "ar,sjd", "second": "ar,sjd", "window auto": "ar,sjd,jacobi,sjd-isp"}
"""Decoders by name of a run. The second run uses the first run's cache; other runs begin with an empty cache."""


def bench_compile(sampling: Sampling, rounds: int) -> tuple[list[dict], list[str]]:
    """Compile the steps of one image each with an empty cache of Inductor, and again with the filled cache."""
    rows = []
    for turn in range(rounds):
        with tempfile.TemporaryDirectory() as folder, tempfile.TemporaryDirectory() as other:
            for name, decoders in RUNS.items():
                window = ["--window", "auto"] if name == "window auto" else []
                facts = compile_facts(decoders, window, Path(other if window else folder), name)
                rows.append({"name": name, "round": turn, "decoders": decoders, **facts})
    lines = [
        f"{row['name']}: {row['compile_s']:.1f} s, {row['compiled_forms']} forms; {row['whole_s']:.1f} s in all"
        for row in rows
    ]
    return rows, lines


def compile_facts(decoders: str, more: list[str], folder: Path, name: str) -> dict[str, float]:
    """`compile_s` and `compiled_forms` in run.json of a run in a separate process, and its total seconds."""
    out = folder / name.replace(" ", "-")
    flags = {"model": "shapes", "decoder": decoders, "limit": 1, "compile": "on", "threads": torch.get_num_threads()}
    command = [sys.executable, "-m", "specbench", "run", "--quiet", "--out", str(out), *more]
    command += [part for flag, value in flags.items() for part in (f"--{flag}", str(value))]
    # The compiler's headers are kept in the folder for temporary files.
    cold = {"TORCHINDUCTOR_CACHE_DIR": str(folder / "inductor"), "TMPDIR": str(folder)}
    began = time.perf_counter()
    subprocess.run(command, env=os.environ | cold, check=True)
    whole = time.perf_counter() - began
    invocation = json.loads(next(out.glob("*/run.json")).read_text())["invocations"][-1]
    return {"whole_s": round(whole, 1)} | {key: invocation[key] for key in ("compile_s", "compiled_forms")}
