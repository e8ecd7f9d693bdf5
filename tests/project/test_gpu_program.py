"""`make gpu` at a tiny scale on a CPU: every part gives claims, and one that fails leaves the others alone."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch

PROGRAM = Path(__file__).parents[2] / "dev" / "gpu" / "prove.py"


@pytest.fixture
def program(monkeypatch):
    monkeypatch.syspath_prepend(PROGRAM.parent)
    import prove

    return prove


def broken(device, scale):
    raise RuntimeError("planted")


def test_parts_give_claims_and_a_broken_one_is_a_row(program, tmp_path, monkeypatch):
    parts = ["exactness", "families", "repeats", "forwards", "form-sums", "generate", "steps", "eager-steps"]
    parts += ["memory", "energy", "recorded", "scores"]
    monkeypatch.setitem(program.PARTS, "families", program.PARTS["families"]._replace(run=broken))
    folder, found, left = program.prove("cpu", "tiny", tmp_path, parts, apart=False)
    assert not left
    raw = json.loads((folder / "raw.json").read_text())
    assert raw["parts"] == json.loads(json.dumps(found)) and raw["versions"]["torch"]
    claims = {part["part"]: part["claims"] for part in found}
    assert [one["verdict"] for one in claims.pop("families")] == ["failed"]
    assert all(one["verdict"] != "failed" for of_part in claims.values() for one in of_part), claims
    assert claims["exactness"][0]["verdict"] == "met" and claims["memory"][0]["verdict"] == "met"
    assert claims["repeats"][0]["verdict"] == claims["recorded"][0]["verdict"] == "met"
    shown = (folder / "report.md").read_text()
    assert "| families | the part runs to its end | RuntimeError: planted | - | failed |" in shown
    assert all(f"| {name} |" in shown for name in parts)


def test_the_queue_goes_on_where_it_stopped(program, tmp_path, monkeypatch):
    ran = []

    def part(name):
        def run(device, scale):
            ran.append(name)
            if name == "fails" and ran.count(name) == 1:
                raise RuntimeError("planted")
            return [{"what": name, "value": 1, "goal": "-", "verdict": "told"}], []

        return program.PARTS["energy"]._replace(run=run, seconds=60 if name == "long" else 1)

    monkeypatch.setattr(program, "PARTS", {name: part(name) for name in ("quick", "long", "fails")})

    def queue(names=(), minutes=0.5):
        return program.prove("cpu", "tiny", tmp_path, names, minutes, apart=False)[2]

    assert queue() == ["long"] and ran == ["quick", "fails"]
    assert queue() == ["long"] and ran[2:] == ["fails"]  # what failed is measured again, what did not is not
    assert queue(minutes=2) == [] and ran[3:] == ["long"]
    assert queue() == [] and len(ran) == 4
    assert queue(["quick"]) == [] and ran[4:] == ["quick"]  # a part that is named
    monkeypatch.setattr(program, "_digest", lambda files: "other code")
    assert queue(minutes=None) == [] and ran[5:] == ["quick", "long", "fails"]


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is one")
def test_without_the_device_it_says_so_in_one_line(program, monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["prove.py", "--device", "cuda"])
    assert program.main() == 5
    streams = capsys.readouterr()
    assert not streams.out and streams.err.count("\n") == 1 and "for a trial on a CPU: --device cpu" in streams.err


@pytest.mark.slow
def test_the_whole_program_runs_on_a_cpu(tmp_path):
    command = [sys.executable, PROGRAM, "--device", "cpu", "--out", tmp_path]
    done = subprocess.run(command, capture_output=True, text=True, timeout=1300)
    assert done.returncode == 0, done.stderr
    assert "failed" not in next(tmp_path.rglob("report.md")).read_text()
