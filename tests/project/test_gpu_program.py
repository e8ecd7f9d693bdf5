"""`make gpu` at a tiny scale on a CPU: all parts give claims, and its plain loop draws the tokens of AR."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from specbench.decoding.loop import decode
from specbench.prompts import Request
from specbench.specs.presets import resolve
from specbench.specs.run_spec import Sampling

PROGRAM = Path(__file__).parents[2] / "dev" / "gpu" / "prove.py"


@pytest.fixture
def program(monkeypatch):
    monkeypatch.syspath_prepend(PROGRAM.parent)
    import prove

    return prove


def test_the_other_engine_draws_the_tokens_of_ar(program):
    from parts.engine import PlainLoop
    from parts.scales import SCALES, random_llama

    model, greedy = random_llama("cpu", SCALES["tiny"]), Sampling(3.0, 1.0, 1)
    [image] = decode(model, [Request("", "gpu")], resolve("ar"), greedy, 0, render=False)
    tokens, _ = PlainLoop(model, greedy, False).decode(model.layout.length)
    assert torch.cat(tokens).tolist() == image.tokens.tolist() and len(set(image.tokens.tolist())) > 2


@pytest.mark.slow
def test_the_whole_program_runs_on_a_cpu(tmp_path):
    command = [sys.executable, PROGRAM, "--device", "cpu", "--out", tmp_path]
    done = subprocess.run(command, capture_output=True, text=True, timeout=1300)
    assert done.returncode == 0, done.stderr
    raw = json.loads(next(tmp_path.rglob("raw.json")).read_text())
    verdicts = {part["part"]: {claim["verdict"] for claim in part["claims"]} for part in raw["parts"]}
    assert "failed" not in set().union(*verdicts.values()) and "met" in verdicts["exactness"] & verdicts["memory"]
