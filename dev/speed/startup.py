"""Compare the CPU time in which the command line starts with an older revision.

    python dev/speed/startup.py [--before 4159804] [--pairs 40] [--out results/speed]
    python dev/speed/startup.py --before 8d696a4a --pairs 5 --name start-of-runs \
        --command "run --decoder ar,sjd --limit 1 --compile on" --command "run --decoder ar --limit 1 --compile off"

The older revision is checked out into a temporary folder and runs with the same interpreter and packages. Both take
turns; each process is measured by the system (user and system time), with byte code already compiled. 4159804 is the
last revision of 0.1.0 before its modules were moved.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from specbench.system import environment
from specbench.system.files import write_atomically

COMMANDS = ("--help", "run --help", "report --help", "list decoders")
HERE = Path(__file__).resolve().parents[2]


def cpu_and_clock_ms(checkout: Path, command: str, env: Mapping[str, str]) -> tuple[float, float]:
    """User and system time of a command of a checkout, and its wall-clock time, in milliseconds."""
    arguments = [sys.executable, "-m", "specbench", *command.split()]
    with tempfile.TemporaryDirectory() as out:
        arguments += ["--out", out] if arguments[3:4] == ["run"] and "--help" not in arguments else []
        start = time.perf_counter()
        with subprocess.Popen(arguments, cwd=checkout, env=env, stdout=subprocess.DEVNULL) as process:
            _, status, used = os.wait4(process.pid, 0)
            process.returncode = os.waitstatus_to_exitcode(status)
    if process.returncode:
        raise SystemExit(f"{checkout}: specbench {command} failed")
    return (used.ru_utime + used.ru_stime) * 1e3, (time.perf_counter() - start) * 1e3


def measure(checkouts: Mapping[str, Path], commands: Sequence[str], pairs: int, cache: str) -> Iterator[dict]:
    """One row per command, checkout and pair; the first pair compiles byte code and is not counted."""
    env = {name: value for name, value in os.environ.items() if name != "PYTHONDONTWRITEBYTECODE"}
    env |= {"PYTHONPYCACHEPREFIX": cache}
    for command in commands:
        for pair in range(pairs + 1):
            order = list(checkouts) if pair % 2 else list(reversed(checkouts))
            for name in order:
                spent, clock = cpu_and_clock_ms(checkouts[name], command, env)
                if pair:
                    times = {"cpu_ms": round(spent, 2), "clock_ms": round(clock, 2)}
                    yield {"command": command, "code": name, "pair": pair, **times}


def medians(rows: list[dict], kind: str) -> Iterator[dict]:
    """Median milliseconds of each command by CPU or clock, and the median ratio of a pair."""
    for command in dict.fromkeys(row["command"] for row in rows):
        before, now = (
            [row[kind] for row in rows if row["command"] == command and row["code"] == code]
            for code in ("before", "now")
        )
        ratio = statistics.median(new / old for new, old in zip(now, before, strict=True))
        shown = {"before_ms": statistics.median(before), "now_ms": statistics.median(now), "ratio": ratio}
        rounded = {name: round(value, 3) for name, value in shown.items()}
        yield {"command": command, "time": kind.removesuffix("_ms"), "pairs": len(now), **rounded}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--before", default="4159804", metavar="REVISION")
    parser.add_argument("--pairs", type=int, default=40)
    parser.add_argument("--command", action="append", metavar="COMMAND", help="specbench commands, not the usual ones")
    parser.add_argument("--name", default="startup", help="of the file that is written")
    parser.add_argument("--out", type=Path, default=Path("results/speed"))
    options = parser.parse_args()
    facts = environment.environment_facts()
    with tempfile.TemporaryDirectory() as folder:
        older = Path(folder) / "before"
        subprocess.run(["git", "worktree", "add", "--detach", older, options.before], cwd=HERE, check=True)
        try:
            rows = list(
                measure({"before": older, "now": HERE}, options.command or COMMANDS, options.pairs, f"{folder}/cache")
            )
        finally:
            subprocess.run(["git", "worktree", "remove", "--force", older], cwd=HERE, check=True)
    summary = [line for kind in ("cpu_ms", "clock_ms") for line in medians(rows, kind)]
    print(json.dumps(summary, indent=1))
    content = {"command": ["python", *sys.argv], "before": options.before, "environment": facts, "medians": summary}
    write_atomically(
        options.out / f"{options.name}.json", (json.dumps(content | {"rows": rows}, indent=1) + "\n").encode()
    )


if __name__ == "__main__":
    main()
