"""`make gpu` at a tiny scale on a CPU: all parts give claims, and its plain loop draws the tokens of AR."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

PROGRAM = Path(__file__).parents[2] / "dev" / "gpu" / "prove.py"


@pytest.mark.slow
def test_the_whole_program_runs_on_a_cpu(tmp_path):
    command = [sys.executable, PROGRAM, "--device", "cpu", "--out", tmp_path]
    done = subprocess.run(command, capture_output=True, text=True, timeout=1300)
    assert done.returncode == 0, done.stderr
    raw = json.loads(next(tmp_path.rglob("raw.json")).read_text())
    verdicts = {part["part"]: {claim["verdict"] for claim in part["claims"]} for part in raw["parts"]}
    assert "failed" not in set().union(*verdicts.values()) and "met" in verdicts["exactness"] & verdicts["memory"]
