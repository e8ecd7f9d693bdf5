"""python dev/names/repeated.py [--private]: top-level names of the package that two or more modules define.

A search for such a name finds several definitions, so the exit code is 1 if there is such a name outside `KEPT`, which
gives the reason for each exception. Commands of the command line are ignored, because they are named after the library
functions that they call; methods are also ignored. Constants that no other module reads count as private.
"""

import argparse
import ast
import sys
from collections import defaultdict
from pathlib import Path

PACKAGE = Path(__file__).parents[2] / "specbench"
_FACADE = "the function of the public API calls the function with the same name"
KEPT = {
    "estimate": _FACADE,
    "run": _FACADE,
    "score": _FACADE,
    "load": "a function of every module of a model family, see specbench.models.families.base; api.load reads runs",
    "render": "reporting.render is public API; the other draws a picture",
}
"""Repeated names that are allowed, with the reason."""


def defined(module: Path) -> set[str]:
    """Functions, classes and assigned names at the top level of a module."""
    names: set[str] = set()
    for node in ast.parse(module.read_text(encoding="utf-8")).body:
        if isinstance(node, ast.FunctionDef | ast.ClassDef):
            names.add(node.name)
        elif isinstance(node, ast.Assign):
            names |= {target.id for target in node.targets if isinstance(target, ast.Name)}
        elif isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
            names.add(node.target.id)
    return names


def repeated(private: bool = False) -> dict[str, list[str]]:
    """Modules of each name that several modules define."""
    places_of: dict[str, list[str]] = defaultdict(list)
    for module in sorted(PACKAGE.rglob("*.py")):
        place = module.relative_to(PACKAGE).with_suffix("").as_posix()
        if place.startswith("cli/"):
            continue
        for name in defined(module):
            if private or not name.startswith("_"):
                places_of[name].append(place)
    return {name: places for name, places in sorted(places_of.items()) if len(places) > 1}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--private", action="store_true", help="private names too")
    names = repeated(parser.parse_args().private)
    for name, places in names.items():
        reason = f" (kept: {KEPT[name]})" if name in KEPT else ""
        print(f"{name}: {', '.join(places)}{reason}")
    new = [name for name in names if name not in KEPT]
    print(f"{len(names)} names, {len(new)} without a reason")
    sys.exit(1 if new else 0)


if __name__ == "__main__":
    main()
