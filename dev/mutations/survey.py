"""Mutate a sample of the package's functions by mutmut, and see which mutations the tests find.

    python dev/mutations/survey.py 110 110 130        so many mutations of stats, store and metrics

Works in a copy of the committed checkout under build/mutations. mutmut (pip install mutmut) must be installed in the
environment of `make test`, not only named by PYTHONPATH, as some tests start a Python of their own. Each mutation
meets the fastest tests that run its function, SECONDS of them at most, so that the share found is a lower bound of what
the whole suite finds. Writes results/mutations/sample.jsonl; greater numbers add to what was tried.
Decoding has a survey of its own, against the audit: dev/audit/survey.py.
"""

from __future__ import annotations

import json
import random
import re
import subprocess
import sys
from collections import Counter
from pathlib import Path

ROOT = Path(__file__).parents[2]
COPY = ROOT / "build" / "mutations"
OUT = ROOT / "results" / "mutations" / "sample.jsonl"
PACKAGES = ("stats", "store", "metrics")
SECONDS = 25
TESTS = (
    "stats",
    "store",
    "metrics",
    "reporting",
    "runs/test_runner.py",
    "runs/test_published.py",
    "cli/test_commands.py",
)
LEFT_OUT = (
    *("test_nothing_foreign_is_unpickled", "whose_own_front_end_is_never_reached"),
    *("test_preference", "preprocessed_while_read"),
)
"""Tests of the source text, of what a process imported or made before, and of programs in a Python of their own."""
CONFIG = f"""
[tool.mutmut]
source_paths = ["specbench"]
only_mutate = {json.dumps([f"specbench/{name}/*" for name in PACKAGES])}
also_copy = ["docs", "dev", "prompts", "results", "benchmarks", ".ci", "README.md", "CHANGELOG.md", "Makefile"]
pytest_add_cli_args = ["-p", "no:cacheprovider", "-p", "no:xdist", "-k", "not {" and not ".join(LEFT_OUT)}"]
pytest_add_cli_args_test_selection = {json.dumps([f"tests/{name}" for name in TESTS])}
use_git_change_detection = false
track_dependencies = false
timeout_multiplier = 3.0
timeout_constant = 10.0
"""


def mutmut(*arguments: str) -> str:
    done = subprocess.run([sys.executable, "-m", "mutmut", *arguments], cwd=COPY, capture_output=True, text=True)
    if done.returncode:  # such as a test that fails without any mutation
        sys.exit(done.stdout[-5000:] + done.stderr[-5000:])
    return done.stdout


def fast_tests() -> None:
    """Leave to each function the fastest of its tests."""
    path = COPY / "mutants" / "mutmut-stats.json"
    stats = json.loads(path.read_text())
    seconds = stats["duration_by_test"]
    for name, tests in stats["tests_by_mangled_function_name"].items():
        kept, spent = [], 0.0
        for test in sorted(set(tests), key=lambda test: (seconds.get(test, 0.0), test)):
            spent += seconds.get(test, 0.0)
            if not kept or spent <= SECONDS:
                kept.append(test)
        stats["tests_by_mangled_function_name"][name] = kept
    path.write_text(json.dumps(stats))


def exit_codes(package: str) -> dict[str, int | None]:
    """What mutmut keeps of every mutation of a package: its name, and the exit code of the tests."""
    found = {}
    for path in sorted((COPY / "mutants" / "specbench" / package).rglob("*.meta")):
        found |= sorted(json.loads(path.read_text())["exit_code_by_key"].items())
    return found


def main(numbers: list[int]) -> int:
    if not COPY.exists():
        subprocess.run(["git", "clone", "--quiet", ROOT, COPY], check=True)
        with (COPY / "pyproject.toml").open("a") as file:
            file.write(CONFIG)
        mutmut("run", "specbench.stats.tokens.x_top1__mutmut_1")  # makes all mutants and times the tests
        fast_tests()
    sample, chance = {}, random.Random(0)
    for package, number in zip(PACKAGES, numbers, strict=True):
        codes = exit_codes(package)
        names = list(codes)
        chance.shuffle(names)
        sample |= {name: codes[name] for name in names[:number]}
    if untried := [name for name, code in sample.items() if code is None]:
        mutmut("run", *untried, "--max-children", "1")
    rows = []
    for package in PACKAGES:
        for name, code in exit_codes(package).items():
            if name in sample:
                # pytest ends with 1 where a test fails; 33 is mutmut's code where no test runs the function.
                result = {0: "survived", 33: "no test"}.get(code, "found")
                row = {"package": package, "mutation": name, "result": result}
                changed = re.findall(r"^[-+](?![-+]).*", mutmut("show", name), re.MULTILINE)
                rows.append(row | ({} if result == "found" else {"change": changed}))
    OUT.parent.mkdir(parents=True, exist_ok=True)
    OUT.write_text("".join(json.dumps(row) + "\n" for row in rows))
    for package in PACKAGES:
        print(package, dict(Counter(row["result"] for row in rows if row["package"] == package)))
    return 0


if __name__ == "__main__":
    sys.exit(main([int(number) for number in sys.argv[1:]]))
