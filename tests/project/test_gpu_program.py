"""`make gpu` at a tiny scale on a CPU: claims come as they are measured, a part that fails or is cut leaves the others
alone, and the queue answers what decides first."""

import json
import subprocess
import sys
import time
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


@pytest.fixture
def prove(program, monkeypatch):
    """Run parts in this process, one after the other."""
    alone = {name: part._replace(alone=True) for name, part in program.PARTS.items()}
    monkeypatch.setattr(program, "PARTS", alone)

    def here(name, device, scale, seconds):
        return program.pieces(name, device, scale)

    return lambda results, names, minutes=None: program.prove(results, names, minutes, here)


def claim(what, verdict="told"):
    return {"what": what, "value": 1, "goal": "-", "verdict": verdict}


def broken(device, scale):
    raise RuntimeError("planted")


@pytest.mark.slow
def test_parts_give_claims_and_a_broken_one_is_a_row(program, prove, tmp_path, monkeypatch):
    parts = ["decisive", "families", "repeats", "engine", "form-apart", "int8wo"]  # a slow test below has the others
    monkeypatch.setitem(program.PARTS, "families", program.PARTS["families"]._replace(run=broken))
    results = program.Results("cpu", "tiny", [tmp_path / "here", tmp_path / "copy"])
    assert prove(results, parts) == []
    here, copy = (folder / "raw.json" for folder in results.folders)
    raw = json.loads(here.read_text())
    assert raw["parts"] == json.loads(json.dumps(results.parts)) and raw["versions"]["torch"]
    assert copy.read_text() == here.read_text()
    claims = {part["part"]: part["claims"] for part in results.parts}
    assert [claim["verdict"] for claim in claims.pop("families")] == ["failed"]
    assert all(claim["verdict"] != "failed" for of_part in claims.values() for claim in of_part), claims
    assert claims["repeats"][0]["verdict"] == "met"
    shown = (results.folders[0] / "report.md").read_text()
    assert "| families | the part runs to its end | RuntimeError: planted | - | failed |" in shown
    assert all(f"| {name} |" in shown for name in parts)


def test_the_queue_goes_on_where_it_stopped(program, tmp_path, monkeypatch):
    ran = []

    def part(name):
        def run(device, scale):
            ran.append(name)
            if name == "fails" and ran.count(name) == 1:
                raise RuntimeError("planted")
            return [claim(name)], []

        return program.PARTS["energy"]._replace(run=run, seconds=60 if name == "long" else 1)

    parts = {name: part(name) for name in ("quick", "long", "fails")}
    monkeypatch.setattr(program, "PARTS", parts)
    results = program.Results("cpu", "tiny", [tmp_path])

    def queue(names=(), minutes=0.5):
        return program.prove(results, names, minutes, lambda *arguments: program.pieces(*arguments[:3]))

    assert queue() == ["long"] and ran == ["quick", "fails"]
    assert queue() == [] and ran[2:] == ["long", "fails"]  # the first of a call runs, whatever it may take
    assert queue() == [] and len(ran) == 4
    assert queue(["quick"]) == [] and ran[4:] == ["quick"]  # a part that is named
    monkeypatch.setattr(program, "_digest", lambda files: "other code")
    assert queue(minutes=None) == [] and ran[5:] == ["quick", "long", "fails"]


def test_a_part_that_is_cut_leaves_its_rows_and_nothing_that_it_started(program, tmp_path, monkeypatch):
    script = tmp_path / "part.py"
    script.write_text(
        "import json, subprocess, sys, time\n"
        "child = subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(60)'], stdout=subprocess.DEVNULL)\n"
        "print('piece ' + json.dumps({'claims': [], 'rows': [{'pid': child.pid}]}), flush=True)\n"
        "time.sleep(60)"
    )
    monkeypatch.setattr(program, "__file__", str(script))
    first, last = program.pieces_apart("decisive", "cpu", "tiny", 1)
    assert [(claim["verdict"], claim["value"]) for claim in last["claims"]] == [("failed", "not done after 1 s")]
    state, until = Path(f"/proc/{first['rows'][0]['pid']}/stat"), time.monotonic() + 10
    while state.exists() and state.read_text().split()[2] != "Z" and time.monotonic() < until:
        time.sleep(0.05)
    assert not state.exists() or state.read_text().split()[2] == "Z"


def test_the_other_engine_draws_the_tokens_of_ar(program):
    from parts.engine import PlainLoop
    from parts.scales import SCALES, random_llama

    model, greedy = random_llama("cpu", SCALES["tiny"]), Sampling(3.0, 1.0, 1)
    [image] = decode(model, [Request("", "gpu")], resolve("ar"), greedy, 0, render=False)
    tokens, _ = PlainLoop(model, greedy, False).decode(model.layout.length)
    assert torch.cat(tokens).tolist() == image.tokens.tolist() and len(set(image.tokens.tolist())) > 2


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
    raw = json.loads(next(tmp_path.rglob("raw.json")).read_text())
    verdicts = {part["part"]: {claim["verdict"] for claim in part["claims"]} for part in raw["parts"]}
    assert "failed" not in set().union(*verdicts.values()) and "met" in verdicts["exactness"] & verdicts["memory"]
