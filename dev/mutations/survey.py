"""Mutate a sample of the package's functions with mutmut, and list the mutations that the tests find.

    python dev/mutations/survey.py 110 110 130        110, 110, 130 mutations of stats, store, metrics
    python dev/mutations/survey.py --again 90         90 earlier mutations whose functions are unchanged

Uses a copy of the committed checkout under build/mutations. mutmut (pip install mutmut) must be installed in the
environment of `make test`, not only named by PYTHONPATH, because some tests start a separate Python. Each mutation
runs the fastest tests that run its function, for SECONDS at most, so the share found is a lower bound for the whole
suite. Writes results/mutations/sample.jsonl; larger numbers add mutations to the sample. `--again` writes again.jsonl,
with the earlier result and the result of the current tests.
Decoding has a separate survey, against the audit: dev/audit/survey.py.
"""

import ast
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
RESULTS = {0: "survived", 33: "no test"}
"""Outcome by exit code: pytest's 1 means that a test fails; mutmut's 33 means that no test runs the function."""
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
    *("test_nothing_foreign_is_unpickled", "whose_own_front_end_is_never_reached", "test_preference"),
    *("an_edited_metric_is_another_score", "an_own_metric_has_differences", "ascii_terminal"),
    *("follow_what_a_plug_in_declares", "networks_that_a_plug_in_declares", "of_a_plug_in_depend_on_the_reference"),
    "has_the_direction_of_a_score_without_its_plug_in",
)
"""Tests of the source text, of a process's earlier imports, and of programs in a separate Python."""
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
    if done.returncode:  # for example, a test fails without any mutation
        sys.exit(done.stdout[-5000:] + done.stderr[-5000:])
    return done.stdout


def fast_tests() -> None:
    """Keep only the fastest tests of each function."""
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
    """Exit codes of the tests by name of the mutation, from mutmut's records of a package."""
    codes = {}
    for path in sorted((COPY / "mutants" / "specbench" / package).rglob("*.meta")):
        codes |= sorted(json.loads(path.read_text())["exit_code_by_key"].items())
    return codes


def prepare() -> None:
    """Make the copy with all mutants, and time the tests."""
    if not COPY.exists():
        subprocess.run(["git", "clone", "--quiet", ROOT, COPY], check=True)
        with (COPY / "pyproject.toml").open("a") as file:
            file.write(CONFIG)
        mutmut("run", "specbench.stats.intervals.x__keys__mutmut_2")  # makes all mutants and times the tests
        fast_tests()


def same_today(mutations: list[str]) -> list[str]:
    """Select mutations whose function has not changed since the commit of the earlier sample."""
    commit = re.search(r"commit (\w+)", OUT.with_name("README.md").read_text())[1]
    texts: dict[str, list[dict[str, str]]] = {}
    same = []
    for mutation in mutations:
        module, _, function = mutation.rpartition("__mutmut_")[0].rpartition(".")
        path = f"{module.replace('.', '/')}.py"
        if path not in texts:
            before = subprocess.run(["git", "show", f"{commit}:{path}"], cwd=ROOT, capture_output=True, text=True)
            today = (ROOT / path).read_text() if (ROOT / path).exists() else ""
            texts[path] = [_functions(text) for text in (before.stdout, today)]
        name = function.removeprefix("x").replace("ǁ", ".").strip("._") if "ǁ" in function else function[2:]
        if (text := texts[path][0].get(name)) and text == texts[path][1].get(name):
            same.append(mutation)
    return same


def _functions(text: str) -> dict[str, str]:
    """Source of the functions and methods of a module without docstrings, by name."""
    sources = {}
    tree = ast.parse(text)
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef) and ast.get_docstring(node) is not None:
            del node.body[0]
    for part in tree.body:
        inside = part.body if isinstance(part, ast.ClassDef) else [part]
        owner = f"{part.name}." if isinstance(part, ast.ClassDef) else ""
        sources |= {f"{owner}{node.name}": ast.unparse(node) for node in inside if isinstance(node, ast.FunctionDef)}
    return sources


def again(number: int) -> int:
    """Try mutations of the sample again, and write the results of the earlier and the current tests."""
    prepare()
    before = {row["mutation"]: row for row in map(json.loads, OUT.read_text().splitlines())}
    names = same_today(list(before))
    random.Random(0).shuffle(names)
    there = {name for package in PACKAGES for name in exit_codes(package)}
    names = [name for name in names if name in there][:number]
    mutmut("run", *names, "--max-children", "1")
    codes = {name: code for package in PACKAGES for name, code in exit_codes(package).items()}
    rows = [before[name] | {"today": RESULTS.get(codes[name], "found")} for name in names]
    OUT.with_name("again.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    print(dict(Counter((row["result"], row["today"]) for row in rows)))
    return 0


def main(numbers: list[int]) -> int:
    prepare()
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
                result = RESULTS.get(code, "found")
                row = {"package": package, "mutation": name, "result": result}
                changed = re.findall(r"^[-+](?![-+]).*", mutmut("show", name), re.MULTILINE)
                rows.append(row | ({} if result == "found" else {"change": changed}))
    OUT.parent.mkdir(parents=True, exist_ok=True)
    OUT.write_text("".join(json.dumps(row) + "\n" for row in rows))
    for package in PACKAGES:
        print(package, dict(Counter(row["result"] for row in rows if row["package"] == package)))
    return 0


if __name__ == "__main__":
    first, *others = sys.argv[1:]
    sys.exit(again(int(others[0])) if first == "--again" else main([int(number) for number in sys.argv[1:]]))
