"""Try a release as on a fresh machine: README's commands, work without network, packages, every extra alone.

    python dev/release/matrix.py --python python3.11 --python python3.13 --packages-of python3.11

Everything happens in a temporary folder whose path has spaces and letters that are not ASCII, from a clone of the last
commit. Every Python gets `make demo`, `make test` of a selection (`--all-tests` for all) and a demo and report without
network. The wheel and the source distribution are installed by each Python of `--packages-of` into empty environments,
with the newest versions of everything; for each of `--lowest-of` the tests of models run with the lowest versions that
pyproject.toml allows. Extras are installed one at a time over the wheel's environment, so that torch
is downloaded once. Rows of results/release/matrix.json are replaced by new ones of the same Python and step; the exit
code is 1 if a step fails. Needs network, 8 GB of disk if pip takes a torch with CUDA, and the right to make network
namespaces (`unshare`).
"""

import argparse
import json
import os
import shutil
import subprocess
import sys
import tarfile
import tempfile
import time
import tomllib
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
RESULT = ROOT / "results" / "release" / "matrix.json"
SELECTION = (
    "tests/system",
    "tests/prompts",
    "tests/store",
    "tests/stats",
    "tests/cli/test_help.py",
    "tests/decoding/test_identities.py",
    "tests/models/test_shapes_draft_head.py",
)
"""Tests of a step unless all are asked for: files, prompts, stored runs, numbers, help, one model and its decoders."""
LOWEST_TESTS = (
    "tests/models",
    "--ignore=tests/models/test_compilation.py",  # compiling needs a newer torch, see `specbench.runs.compiler`
    # a model is compared with transformers' own generation of images, which was broken in 5.1 and in 5.13
    "--deselect=tests/models/test_family_official_behaviour.py::test_janus_equals_its_native_greedy_generation",
    # OPT and BLOOM of transformers 5.1 compute their masks in functions of their own, so both networks are refused
    *(
        f"--deselect=tests/models/test_loaded_model.py::{test}"
        for test in (
            "test_a_network_is_decoded_from_its_own_distribution[opt-eager]",
            "test_what_slots_of_a_cache_cannot_hold_is_refused",
            "test_a_network_is_freed",
        )
    ),
    # transformers 5.1 ignores the attention implementation of a config.json, so there is nothing to refuse
    "--deselect=tests/models/test_checkpoint_loading.py::test_what_a_family_does_not_apply_is_one_line[lumina-settings1]",
    # huggingface_hub before version 2 requests no list of files, and itself stops an interrupted transfer
    "--deselect=tests/models/test_hub_downloads.py::test_a_long_wait_is_said_at_once_wherever_the_hub_asks_for_it",
    "--deselect=tests/models/test_hub_downloads.py::test_ctrl_c_in_a_download_ends_it_at_once_with_one_line",
)
RUNS_TESTS = ("pytest", "pytest-xdist", "hypothesis")
"""Test packages that the tests of models need. Linters are omitted: they need newer versions than the lowest."""
SECONDS = 3600
"""Time limit of a command."""

PIP_INSTALL = ("-m", "pip", "install", "--quiet")
OFFLINE = ("unshare", "--map-root-user", "--net")
"""Prefix of a command without any network interface except its own loopback, which is down."""

EXTRAS: dict[str, str] = {
    "ray": "import ray",
    "gpu": "import pynvml",
    "hpsv2": "import hpsv2, clint, requests",
    "diffusion": "import diffusers",
    "quant": "import torchao",
    "dev": "import pytest, xdist, hatchling, hypothesis, ray, mypy, importlinter",
    "docs": "import mkdocs, material, mkdocstrings",
}
"""Modules that each extra provides."""
WOULD_INSTALL = """
import json, subprocess, sys
plan = [sys.executable, "-m", "pip", "install", "--quiet", "--dry-run", "--report", "-", sys.argv[1]]
names = {one["metadata"]["name"] for one in json.loads(subprocess.check_output(plan))["install"]}
sys.exit("torch would be replaced" if "torch" in names else print(len(names), "packages, no torch"))
"""


@dataclass
class Matrix:
    """Steps of one Python: the commands and their results.

    Attributes:
        done: called with the row of each step.
    """

    python: str
    done: Callable[[dict], None] = lambda row: None
    rows: list[dict] = field(default_factory=list)

    def step(self, name: str, command: Sequence[object], folder: Path) -> bool:
        """Run a command and keep a row of it; True if it succeeded."""
        words = [str(part) for part in command]
        print(f"{self.python}: {name}: {' '.join(words)}", file=sys.stderr, flush=True)
        start = time.perf_counter()
        try:
            done = subprocess.run(
                words,
                cwd=folder,
                env=clean_environment(),
                text=True,
                timeout=SECONDS,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
            )
            passed, output = done.returncode == 0, done.stdout
        except (OSError, subprocess.TimeoutExpired) as error:
            passed, output = False, str(error)
        lines = [line for line in output.splitlines() if line.strip() and not line.startswith("WARNING: ")]
        seconds = round(time.perf_counter() - start, 1)
        last = lines[-1].strip()[:300] if lines else ""
        self.rows.append({"python": self.python, "step": name, "passed": passed, "seconds": seconds, "last_line": last})
        self.done(self.rows[-1])
        if not passed:
            print("\n".join(lines[-30:]), file=sys.stderr, flush=True)
        return passed


def clean_environment() -> dict[str, str]:
    """This process's environment without variables that make Python or specbench use another installation."""
    unwanted = ("PYTHON", "VIRTUAL_ENV", "SPECBENCH_")
    return {name: value for name, value in os.environ.items() if not name.startswith(unwanted)}


def try_checkout(matrix: Matrix, python: str, _folder: Path, clone: Path, tests: Sequence[str]) -> None:
    """Run README's two commands in a clone; then decode, score and report without network."""
    binaries = clone / ".venv" / "bin"
    if not matrix.step("make demo", ["make", "demo", f"PYTHON={python}"], clone):
        return
    matrix.step("versions", [binaries / "specbench", "--version"], clone)
    try_offline(matrix, "checkout", binaries / "specbench", clone)
    matrix.step("make test", ["make", "test", f"PYTHON={python}", f"TEST_ARGS={' '.join(tests)}"], clone)


def try_offline(matrix: Matrix, what: str, specbench: Path, folder: Path) -> None:
    """Decode, score and report without network, in a separate results folder."""
    out = ("--out", "results/ohne Netz")
    for name, arguments in (
        ("demo", ("demo", "--limit", "1", "--quiet", *out)),
        ("report", ("report", *out, "--html", "report.html")),
        ("doctor", ("doctor",)),
    ):
        matrix.step(f"{what}: {name} without network", [*OFFLINE, specbench, *arguments], folder)


def try_lowest(matrix: Matrix, python: str, folder: Path, clone: Path, jobs: str) -> None:
    """The tests of models with the lowest version of every dependency that pyproject.toml allows."""
    environment, lowest = folder / "lowest", folder / "lowest.txt"
    binary = environment / "bin" / "python"
    lowest.write_text("".join(f"{name}=={bound}\n" for name, bound in lowest_of(clone).items()))
    matrix.step("lowest: environment", [python, "-m", "venv", environment], folder)
    packages = ["--constraint", lowest, clone, *RUNS_TESTS]
    if not matrix.step("lowest: pip install", [binary, *PIP_INSTALL, *packages], folder):
        return
    fit_torchvision(matrix, "lowest", environment, folder)
    matrix.step("lowest: versions", [environment / "bin" / "specbench", "--version"], folder)
    matrix.step("lowest: tests of models", [binary, "-m", "pytest", "-n", jobs, *LOWEST_TESTS], clone)


def lowest_of(clone: Path) -> dict[str, str]:
    """The lower bound of every dependency, by name."""
    requirements = tomllib.loads((clone / "pyproject.toml").read_text())["project"]["dependencies"]
    return dict(requirement.split(">=") for requirement in requirements)


def try_packages(matrix: Matrix, python: str, folder: Path, clone: Path, tests: Sequence[str]) -> None:
    """Wheel and source distribution in empty environments: the demo, every extra alone, the tests."""
    base, dist = folder / "wheel", folder / "dist"
    if not build_packages(matrix, python, clone, dist):
        return
    (wheel,), (sdist,) = dist.glob("*.whl"), dist.glob("*.tar.gz")
    try_kept_torch(matrix, python, wheel, folder)
    matrix.step("wheel: environment", [python, "-m", "venv", base], folder)
    if not matrix.step("wheel: pip install", [base / "bin" / "python", *PIP_INSTALL, wheel], folder):
        return
    fit_torchvision(matrix, "wheel", base, folder)
    matrix.step("wheel: versions", [base / "bin" / "specbench", "--version"], folder)
    work = folder / "arbeit"
    work.mkdir()
    matrix.step("wheel: demo", [base / "bin" / "specbench", "demo"], work)
    try_offline(matrix, "wheel", base / "bin" / "specbench", work)
    for extra in extras_of(clone):
        try_extra(matrix, extra, base, wheel, folder)
    try_source_distribution(matrix, base, sdist, folder, tests)


def try_kept_torch(matrix: Matrix, python: str, wheel: Path, folder: Path) -> None:
    """Ask pip what it would install if a torch with CUDA exists: only its name and version are present."""
    environment = folder / "with CUDA"
    matrix.step("torch kept: environment", [python, "-m", "venv", environment], folder)
    (packages,) = (environment / "lib").glob("python3*/site-packages")
    for name, version in (("torch", "2.13.0+cu130"), ("torchvision", "0.28.0+cu130")):
        (info := packages / f"{name}-{version}.dist-info").mkdir()
        (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n")
        (info / "RECORD").write_text("")
    matrix.step("torch kept: pip install", [environment / "bin" / "python", "-c", WOULD_INSTALL, wheel], folder)


def build_packages(matrix: Matrix, python: str, clone: Path, dist: Path) -> bool:
    """Build wheel and source distribution with the command of CONTRIBUTING.md; True if they exist."""
    tools = dist.with_name("build tools")
    binary = tools / "bin" / "python"
    return (
        matrix.step("build: environment", [python, "-m", "venv", tools], clone)
        and matrix.step("build: hatchling", [binary, *PIP_INSTALL, "hatchling"], clone)
        and matrix.step("build: packages", [binary, "-m", "hatchling", "build", "-d", dist], clone)
    )


def fit_torchvision(matrix: Matrix, what: str, environment: Path, folder: Path) -> None:
    """Remove a torchvision that was built for another torch, as the Makefile does."""
    binary = environment / "bin" / "python"
    if subprocess.run([binary, "-c", "import torchvision"], capture_output=True).returncode:
        command = [binary, "-m", "pip", "uninstall", "--quiet", "--yes", "torchvision"]
        matrix.step(f"{what}: torchvision of another torch removed", command, folder)


def extras_of(clone: Path) -> list[str]:
    """Names of the project's extras."""
    return list(tomllib.loads((clone / "pyproject.toml").read_text())["project"]["optional-dependencies"])


def try_extra(matrix: Matrix, extra: str, base: Path, wheel: Path, folder: Path) -> None:
    """Install the wheel with one extra, import its modules, and run the demo's first images."""
    environment = folder / f"extra {extra}"
    binary = environment / "bin" / "python"
    matrix.step(f"extra {extra}: environment", [base / "bin" / "python", "-m", "venv", environment], folder)
    build_upon(environment, base)
    if matrix.step(f"extra {extra}: pip install", [binary, *PIP_INSTALL, f"{wheel}[{extra}]"], folder):
        matrix.step(f"extra {extra}: import", [binary, "-c", EXTRAS[extra]], folder)
        workers = ("--workers", "2", "--mode", "throughput") if extra == "ray" else ()
        run = ("run", "--decoder", "sjd", "--limit", "2", "--quiet", "--out", f"results/{extra}", *workers)
        matrix.step(f"extra {extra}: run", [binary, "-m", "specbench", *run], folder)
    shutil.rmtree(environment, ignore_errors=True)


def build_upon(environment: Path, base: Path) -> None:
    """Let an environment import the packages of another environment, after its own packages."""
    (site,), (other,) = (list((place / "lib").glob("python3*/site-packages")) for place in (environment, base))
    (site / "base.pth").write_text(f"{other}\n")


def try_source_distribution(matrix: Matrix, base: Path, sdist: Path, folder: Path, tests: Sequence[str]) -> None:
    """Install the source distribution with the packages of its tests, and run them in its unpacked folder."""
    environment = folder / "sdist"
    binary = environment / "bin" / "python"
    matrix.step("sdist: environment", [base / "bin" / "python", "-m", "venv", environment], folder)
    build_upon(environment, base)
    if not matrix.step("sdist: pip install", [binary, *PIP_INSTALL, f"{sdist}[dev]"], folder):
        return
    with tarfile.open(sdist) as content:
        content.extractall(folder, filter="data")
    unpacked = folder / sdist.name.removesuffix(".tar.gz")
    matrix.step("sdist: versions", [environment / "bin" / "specbench", "--version"], folder)
    matrix.step("sdist: demo", [environment / "bin" / "specbench", "demo", "--limit", "1"], folder)
    matrix.step("sdist: tests", [environment / "bin" / "pytest", *tests], unpacked)


def version_of(python: str) -> str:
    """Version of an interpreter, such as "3.13.0"."""
    script = "import platform; print(platform.python_version())"
    done = subprocess.run([python, "-c", script], capture_output=True, text=True)
    if done.returncode:
        raise SystemExit(f"--python {python}: does not run: {done.stderr.strip()[:200]}")
    return done.stdout.strip()


@contextmanager
def fresh_clone() -> Iterator[tuple[Path, Path]]:
    """A temporary folder and a clone of the last commit in it; both are removed afterwards."""
    with tempfile.TemporaryDirectory(prefix="specbench fresh ü图 ") as name:
        clone = Path(name) / "spec bench é"
        subprocess.run(["git", "clone", "--quiet", "--no-hardlinks", ROOT, clone], check=True)
        yield Path(name), clone


def keep(path: Path, rows: Sequence[Mapping], now: Mapping) -> None:
    """Write the rows, each with date and commit; they replace older rows of the same Python and step."""
    stored = json.loads(path.read_text())["rows"] if path.exists() else []
    by_step = {(row["python"], row["step"]): row for row in stored}
    by_step |= {(row["python"], row["step"]): {**row, **now} for row in rows}
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps({"rows": list(by_step.values())}, indent=1, ensure_ascii=False) + "\n")


def try_pythons(pythons: Sequence[str], path: Path, act: Callable[[Matrix, str, Path, Path], None]) -> list[dict]:
    """Rows of every Python, each in a fresh folder; written after each step."""
    rows: list[dict] = []
    for python in pythons:
        with fresh_clone() as (folder, clone):
            head = subprocess.run(["git", "rev-parse", "HEAD"], cwd=clone, capture_output=True, text=True, check=True)
            now = {"date": time.strftime("%Y-%m-%d", time.gmtime()), "git": head.stdout.strip()}
            matrix = Matrix(version_of(python), lambda row, now=now: keep(path, [row], now))
            act(matrix, python, folder, clone)
        rows += matrix.rows
    return rows


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--python", action="append", default=[], help="interpreter for make demo and make test")
    parser.add_argument("--packages-of", action="append", default=[], help="interpreter for wheel, sdist and extras")
    parser.add_argument("--lowest-of", action="append", default=[], help="interpreter for the lowest dependencies")
    parser.add_argument("--all-tests", action="store_true", help="run the whole suite instead of a selection")
    parser.add_argument("--jobs", default="auto", help="processes of the tests")
    parser.add_argument("--out", type=Path, default=RESULT, help="file of the result")
    options = parser.parse_args()
    tests = ("-n", options.jobs, *(() if options.all_tests else SELECTION))
    rows = [
        *try_pythons(options.python, options.out, lambda *places: try_checkout(*places, tests)),
        *try_pythons(options.packages_of, options.out, lambda *places: try_packages(*places, tests)),
        *try_pythons(options.lowest_of, options.out, lambda *places: try_lowest(*places, options.jobs)),
    ]
    failed = [row for row in rows if not row["passed"]]
    for row in failed:
        print(f"failed: {row['python']}: {row['step']}: {row['last_line']}")
    print(f"{len(rows) - len(failed)} of {len(rows)} steps passed; {options.out}")
    return 1 if failed or not rows else 0


if __name__ == "__main__":
    sys.exit(main())
