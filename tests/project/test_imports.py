"""Imports of the package: no circles, declared packages, and a reason for each import inside a function. `lint-imports`
checks the contract in pyproject.toml. Names: two modules do not share one without a reason, and a test file is named
after the module that it tests."""

import ast
import re
import runpy
import sys
import tomllib
from importlib.metadata import packages_distributions
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


def test_no_package_and_its_own_modules_import_each_other():
    """The contract compares siblings; a module that imports its package's `__init__` can make a circle too."""
    grimp = pytest.importorskip("grimp", reason="part of the extra 'dev'")
    graph = grimp.build_graph("specbench", cache_dir=None)
    imports = {module: graph.find_modules_directly_imported_by(module) for module in graph.modules}
    for start in imports:
        seen, queue = set(), [start]
        while queue:
            new = imports[queue.pop()] - seen
            seen |= new
            queue += new
        assert start not in seen


def test_what_is_imported_is_declared():
    """Imports of modules as a whole: those inside functions may be of extras, and of other programs."""
    declared = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["dependencies"]
    needed = {re.match(r"[\w-]+", text)[0].lower().replace("_", "-") for text in declared}
    of_module, undeclared = packages_distributions(), set()
    for path in (ROOT / "specbench").rglob("*.py"):
        if path.name == "x_omni_decoder.py":  # a module of the extra diffusion, imported inside a function
            continue
        for node in ast.parse(path.read_text()).body:
            plain = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
            names = [node.module] if isinstance(node, ast.ImportFrom) else plain
            for module in {name.partition(".")[0] for name in names} - {"specbench", *sys.stdlib_module_names}:
                if not needed & {name.lower().replace("_", "-") for name in of_module.get(module, ())}:
                    undeclared.add(module)
    assert undeclared == set()


MODULE_REASON = "# Imports inside functions: "


def unexplained(source: str) -> list[int]:
    """Lines of imports inside functions without a reason: a comment on a line of the block of imports, one right above
    it, or one for the whole module that starts with `MODULE_REASON`; one in a package's `__init__` is for all of it."""
    lines = source.splitlines()
    if any(line.startswith(MODULE_REASON) for line in lines):
        return []
    kinds = ast.FunctionDef | ast.AsyncFunctionDef
    functions = (function for function in ast.walk(ast.parse(source)) if isinstance(function, kinds))
    inside = (node for function in functions for node in ast.walk(function))
    imports = {node for node in inside if isinstance(node, ast.Import | ast.ImportFrom)}
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
    packages = [path.parent for path in (ROOT / "specbench").glob("*/__init__.py") if MODULE_REASON in path.read_text()]
    paths = sorted(path for path in (ROOT / "specbench").rglob("*.py") if path.parent not in packages)
    unreasoned = {path: unexplained(path.read_text()) for path in paths}
    assert not {str(path): lines for path, lines in unreasoned.items() if lines}


TESTS = sorted(path for path in (ROOT / "tests").glob("*/test_*.py") if path.parent.name != "project")


def test_every_repeated_name_has_a_reason_and_every_reason_a_name():
    tool = runpy.run_path(str(ROOT / "dev/names/repeated.py"))
    assert sorted(tool["repeated"]()) == sorted(tool["KEPT"])


@pytest.mark.parametrize("path", TESTS, ids=lambda path: f"{path.parent.name}/{path.stem}")
def test_a_test_file_is_named_after_its_module_or_says_that_it_concerns_several(path):
    package, tested = ROOT / "specbench" / path.parent.name, path.stem.removeprefix("test_")
    modules = list(package.rglob("*.py"))
    names = {module.stem for module in modules} | {f"{module.parent.name}_{module.stem}" for module in modules}
    docstring = ast.get_docstring(ast.parse(path.read_text(encoding="utf-8"))) or ""
    assert tested in names or "several modules:" in docstring
