"""No import of the package runs upwards, and there is no circle: the contract in pyproject.toml, seen to fail.

Imports inside functions and those for type checkers alone count like all others.
"""

from __future__ import annotations

import ast
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
pytest.importorskip("importlinter", reason="part of the extra 'dev'")


def lint(folder: Path) -> subprocess.CompletedProcess:
    """`lint-imports`, as `make check` runs it, on the package in `folder`."""
    script = "from importlinter.cli import lint_imports_command; lint_imports_command()"
    env = os.environ | {"PYTHONPATH": str(folder)}
    command = [sys.executable, "-c", script, "--no-cache"]
    return subprocess.run(command, cwd=folder, env=env, capture_output=True, text=True, timeout=300)


@pytest.fixture(scope="module")
def copy(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("checkout")
    shutil.copytree(
        ROOT / "specbench", folder / "specbench", ignore=shutil.ignore_patterns("*.safetensors", "__pycache__")
    )
    shutil.copy(ROOT / "pyproject.toml", folder)
    return folder


def test_no_import_runs_upwards_and_there_is_no_circle(copy):
    done = lint(copy)
    assert done.returncode == 0, done.stdout


@pytest.mark.parametrize(
    "module, line, broken",
    [
        ("decoding/loop.py", "def planted():\n    from specbench.runs import plan\n", "No import runs upwards BROKEN"),
        (
            "system/files.py",
            "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    from specbench.specs import presets\n",
            "No import runs upwards BROKEN",
        ),
        ("specs/presets.py", "import specbench.prompts.prompt_set\n", "No import runs upwards BROKEN"),
        ("stats/intervals.py", "from specbench.stats import speed\n", "No circle inside a package BROKEN"),
    ],
    ids=["inside a function", "for type checkers", "between siblings", "a circle"],
)
def test_a_planted_import_breaks_the_contract(copy, module, line, broken):
    path = copy / "specbench" / module
    kept = path.read_text()
    path.write_text(kept + "\n" + line)
    try:
        done = lint(copy)
    finally:
        path.write_text(kept)
    assert done.returncode == 1 and broken in done.stdout, done.stdout + done.stderr


def test_a_package_that_has_no_place_breaks_the_contract(copy):
    (copy / "specbench" / "utils").mkdir()
    (copy / "specbench" / "utils" / "__init__.py").touch()
    try:
        done = lint(copy)
    finally:
        shutil.rmtree(copy / "specbench" / "utils")
    assert done.returncode != 0


def test_no_package_and_its_own_modules_import_each_other():
    """The contract compares siblings; a module that imports its package's `__init__` can make a circle too."""
    import grimp

    graph = grimp.build_graph("specbench", cache_dir=None)
    imports = {module: graph.find_modules_directly_imported_by(module) for module in graph.modules}
    reached: dict[str, set[str]] = {}
    for start in imports:
        seen, queue = set(), [start]
        while queue:
            for found in imports[queue.pop()] - seen:
                seen.add(found)
                queue.append(found)
        reached[start] = seen
    assert not [module for module, seen in reached.items() if module in seen]


MODULE_REASON = "# Imports inside functions: "


def unexplained(source: str) -> list[int]:
    """Lines of imports inside functions without a reason: a comment on a line of the block of imports, one right above
    it, or one for the whole module that starts with `MODULE_REASON`."""
    lines = source.splitlines()
    if any(line.startswith(MODULE_REASON) for line in lines):
        return []
    functions = (one for one in ast.walk(ast.parse(source)) if isinstance(one, ast.FunctionDef | ast.AsyncFunctionDef))
    imports = {node for one in functions for node in ast.walk(one) if isinstance(node, ast.Import | ast.ImportFrom)}
    blocks: list[list[int]] = []
    for first, last in sorted((node.lineno, node.end_lineno) for node in imports):
        if blocks and blocks[-1][1] + 1 == first:
            blocks[-1][1] = last
        else:
            blocks.append([first, last])
    return [
        first
        for first, last in blocks
        if not any("#" in line for line in lines[first - 1 : last]) and not lines[first - 2].strip().startswith("#")
    ]


def test_every_import_inside_a_function_has_its_reason():
    found = {path: unexplained(path.read_text()) for path in sorted((ROOT / "specbench").rglob("*.py"))}
    assert not {str(path): lines for path, lines in found.items() if lines}


def test_an_import_inside_a_function_without_a_reason_is_found():
    bare = "def f():\n    import torch\n    import numpy\n"
    assert unexplained(bare) == [2]
    assert not unexplained(bare.replace("numpy", "numpy  # slow"))
    assert not unexplained(bare.replace("    import torch", "    # Slow.\n    import torch"))
    assert not unexplained(f"{MODULE_REASON}torch is slow.\n{bare}")
