"""CPU time of the start of the command line, beside that of an older revision.

    python dev/speed/startup.py [--before 4159804] [--pairs 40] [--out results/speed]

The older revision is checked out into a temporary folder and runs with the same interpreter and packages. Both take
turns; each process is measured by the system (user and system time), with byte code already compiled. 4159804 is the
last revision of 0.1.0 before its modules were moved.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path

from specbench.system import environment
from specbench.system.files import write_atomically

COMMANDS = ("--help", "run --help", "report --help", "list decoders")
HERE = Path(__file__).resolve().parents[2]


def cpu_ms(checkout: Path, command: str, env: Mapping[str, str]) -> float:
    """User and system time of one command of a checkout, in milliseconds."""
    arguments = [sys.executable, "-m", "specbench", *command.split()]
    with subprocess.Popen(arguments, cwd=checkout, env=env, stdout=subprocess.DEVNULL) as process:
        _, status, used = os.wait4(process.pid, 0)
        process.returncode = os.waitstatus_to_exitcode(status)
    if process.returncode:
        raise SystemExit(f"{checkout}: specbench {command} failed")
    return (used.ru_utime + used.ru_stime) * 1e3


def measure(checkouts: Mapping[str, Path], pairs: int, cache: str) -> Iterator[dict]:
    """One row per command, checkout and pair; the first pair compiles byte code and is not counted."""
    env = {name: value for name, value in os.environ.items() if name != "PYTHONDONTWRITEBYTECODE"}
    env |= {"PYTHONPYCACHEPREFIX": cache}
    for command in COMMANDS:
        for pair in range(pairs + 1):
            order = list(checkouts) if pair % 2 else list(reversed(checkouts))
            for name in order:
                spent = cpu_ms(checkouts[name], command, env)
                if pair:
                    yield {"command": command, "code": name, "pair": pair, "cpu_ms": round(spent, 2)}


def medians(rows: list[dict]) -> Iterator[dict]:
    """Median milliseconds of each command, and the median ratio of a pair."""
    for command in COMMANDS:
        before, now = (
            [row["cpu_ms"] for row in rows if row["command"] == command and row["code"] == code]
            for code in ("before", "now")
        )
        ratio = statistics.median(new / old for new, old in zip(now, before, strict=True))
        shown = {"before_ms": statistics.median(before), "now_ms": statistics.median(now), "ratio": ratio}
        yield {"command": command, "pairs": len(now), **{name: round(value, 3) for name, value in shown.items()}}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--before", default="4159804", metavar="REVISION")
    parser.add_argument("--pairs", type=int, default=40)
    parser.add_argument("--out", type=Path, default=Path("results/speed"))
    options = parser.parse_args()
    facts = environment.environment_facts()
    with tempfile.TemporaryDirectory() as folder:
        older = Path(folder) / "before"
        subprocess.run(["git", "worktree", "add", "--detach", older, options.before], cwd=HERE, check=True)
        try:
            rows = list(measure({"before": older, "now": HERE}, options.pairs, f"{folder}/cache"))
        finally:
            subprocess.run(["git", "worktree", "remove", "--force", older], cwd=HERE, check=True)
    summary = list(medians(rows))
    print(json.dumps(summary, indent=1))
    content = {"command": ["python", *sys.argv], "before": options.before, "environment": facts, "medians": summary}
    write_atomically(options.out / "startup.json", (json.dumps(content | {"rows": rows}, indent=1) + "\n").encode())


if __name__ == "__main__":
    main()
