"""Interrupt commands at random moments of a whole process, imports included.

    python dev/drills/interrupts.py run --count 60 --seconds 600    # also: demo, score, report, audit, fetch, ...
    python dev/drills/interrupts.py table

Every interrupt must end the command with exit code 130 and one line, within 3 s or after the current image. Outcomes
are lines of results/drills/interrupts.jsonl; a later call continues their count. A sleeping Python process is
interrupted at the same moment; its time to end shows how much the machine is loaded.
"""

import argparse
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections import defaultdict
from pathlib import Path

from specbench.system.version import __version__

sys.path.insert(0, str(Path(__file__).parents[2] / "tests" / "support"))

LOG = Path(__file__).parents[2] / "results" / "drills" / "interrupts.jsonl"
REPO = "deepseek-community/Janus-Pro-1B"
RUN = ("run", "--decoder", "ar,sjd", "--limit", "6", "--threads", "1")
COMMANDS = {
    "run": RUN,
    "demo": ("demo", "--limit", "2"),
    "score": ("score", "--metric", "shapes-detector"),
    "report": ("report", "--format", "html"),
    "audit": ("audit", "--run", "shapes-sjd"),
    "fetch": ("fetch", REPO, "--no-progress"),
    "bench": ("bench", "gsd-1", "--model", "shapes", "--limit", "1"),
    "compile": (*RUN, "--compile", "on"),
}
LONGEST_S = dict(run=25.0, demo=40.0, score=15.0, report=4.0, audit=20.0, fetch=5.0, bench=30.0, compile=60.0)
"""Interrupts are sent between the start and this time; in most cases the command is then still running."""
WITHIN_S = 3.0
SLEEPER = """
import signal, time
signal.signal(signal.SIGINT, signal.default_int_handler)  # a job in the background starts without it
print(flush=True)
time.sleep(600)
"""


def prepared(name: str, box: Path) -> dict[str, str]:
    """Put the inputs of a command into a folder; returns its additional environment variables."""
    if name in ("score", "report", "audit"):
        subprocess.run([sys.executable, "-m", "specbench", *RUN, "--quiet"], cwd=box, check=True, capture_output=True)
    if name != "fetch":
        return {}
    import hub_drill

    served, files = hub_drill.hub(), box / "repository"
    files.mkdir()
    (files / "config.json").write_text("{}")
    (files / "model.safetensors").write_bytes(bytes(4_000_000))
    served.put(REPO, "c" * 40, files)
    served.cut_after = 100_000  # the client tries again until it is interrupted
    return served.env(box)


def interrupt(name: str, box: Path, env: dict[str, str], draw: random.Random) -> dict | None:
    """Start a command, interrupt it, and describe how it ended; None if it ended before the interrupt."""
    at = draw.uniform(0.3, LONGEST_S[name])
    command = [sys.executable, "-m", "specbench", *COMMANDS[name]]
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    control = subprocess.Popen([sys.executable, "-c", SLEEPER], **pipes)
    control.stdout.readline()
    errors = box / "said"
    with errors.open("w") as stderr:
        running = subprocess.Popen(command, cwd=box, env=os.environ | env, stdout=subprocess.DEVNULL, stderr=stderr)
        time.sleep(at)
        alive = running.poll() is None
        running.send_signal(signal.SIGINT)
        control.send_signal(signal.SIGINT)
        start = time.monotonic()
        ended = _wait(running, control, start)
    if not alive:
        return None
    lines = errors.read_text().splitlines()
    return {
        "command": name,
        "at_s": round(at, 2),
        "ended_s": ended["command"],
        "control_s": ended["control"],
        "code": running.returncode,
        "errors": sum(line.startswith("error: ") for line in lines),
        "traceback": any("Traceback" in line or "Exception ignored" in line for line in lines),
        "image_in_work": any(line.startswith("ending after") for line in lines),
        "last": lines[-1] if lines else "",
        "load": round(os.getloadavg()[0], 1),
        "version": __version__,
    }


def _wait(running: subprocess.Popen, control: subprocess.Popen, start: float) -> dict[str, float]:
    """Seconds from `start` until each process ends; a command that does not end is killed after two minutes."""
    ended: dict[str, float] = {}
    while len(ended) < 2:
        for name, process in (("command", running), ("control", control)):
            if name not in ended and process.poll() is not None:
                ended[name] = round(time.monotonic() - start, 2)
        if time.monotonic() - start > 120:
            running.kill()
        time.sleep(0.01)
    return ended


def outcomes() -> list[dict]:
    return [json.loads(line) for line in LOG.read_text().splitlines()] if LOG.exists() else []


def was_done(row: dict) -> bool:
    """Whether all output existed when the interrupt came."""
    return row["code"] == 0 and not row["errors"] and row["ended_s"] < 1


def as_wanted(row: dict) -> bool:
    """Whether a command ended as required; if the control was slow, the command may also be slow."""
    in_time = row["ended_s"] <= WITHIN_S * max(1.0, row["control_s"] / 0.1) or row["image_in_work"]
    return was_done(row) or (row["code"] == 130 and row["errors"] == 1 and not row["traceback"] and in_time)


def table() -> str:
    groups = defaultdict(list)
    for row in outcomes():
        groups[row["command"]].append(row)
    groups["all"] = outcomes()
    heads = (
        "command",
        "interrupts",
        "exit code 130",
        "one line",
        "was done",
        "traceback",
        "over 3 s",
        "slowest, s",
        "not as wanted",
    )
    lines = [f"| {' | '.join(heads)} |", f"| --- |{' ---: |' * 8}"]
    for name, rows in groups.items():
        late = [row for row in rows if row["ended_s"] > WITHIN_S and not row["image_in_work"]]
        cells = [len(rows), sum(row["code"] == 130 for row in rows), sum(row["errors"] == 1 for row in rows)]
        cells += [sum(map(was_done, rows)), sum(row["traceback"] for row in rows), len(late)]
        cells += [f"{max((row['ended_s'] for row in rows), default=0):.1f}", sum(not as_wanted(row) for row in rows)]
        lines.append(f"| {name} | {' | '.join(map(str, cells))} |")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("command", choices=(*COMMANDS, "table"))
    parser.add_argument("--count", type=int, default=40, help="interrupts in the log at the end, of this command")
    parser.add_argument("--seconds", type=float, default=600, help="end after this time")
    asked = parser.parse_args()
    if asked.command == "table":
        print(table())
        return
    deadline = time.monotonic() + asked.seconds
    with tempfile.TemporaryDirectory() as folder:
        inputs = Path(folder, "inputs")
        inputs.mkdir()
        env = prepared(asked.command, inputs)
        done = sum(row["command"] == asked.command for row in outcomes())
        while done < asked.count and time.monotonic() < deadline:
            box = shutil.copytree(inputs, Path(folder, "box"))
            env |= {"SPECBENCH_CACHE": str(box / "cache")}
            outcome = interrupt(asked.command, box, env, random.Random())
            shutil.rmtree(box)
            if outcome:
                done += 1
                with LOG.open("a") as log:
                    log.write(json.dumps(outcome) + "\n")


if __name__ == "__main__":
    main()
