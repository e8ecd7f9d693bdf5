"""Names: two modules do not share one without a reason, and a test file is named after the module that it tests."""

import ast
import runpy
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
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
