"""Components of a decoder, as data: drafters, token initialisations, verifiers, residuals, refinements.

`decoders.toml` names the code of each, the options it adds to the command line, and whether it is lossless (the joint
distribution of the image tokens equals AR sampling). Static draft trees are text: a node is its path from the root, one
digit (child index) per level. Importing this module never imports torch.
"""

import tomllib
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from specbench.errors import SpecbenchError
from specbench.specs.options import Component, Option

COMPONENT_KINDS = {
    "drafter": "drafter",
    "init": "initialisation of fresh draft tokens",
    "verifier": "acceptance test",
    "residual": "residual distribution after a rejection",
    "refine": "refinement of unverified draft tokens",
}
"""Description of each kind of component, for help texts."""
ANY_TAIL = "any-tail"  # Option with which a verifier that looks ahead may keep the later drafts, which is lossy
WRITTEN = tomllib.loads(Path(__file__).with_name("decoders.toml").read_text(encoding="utf-8"))
"""Contents of `decoders.toml`: components, options, papers, presets and EAGLE-1's static draft trees."""
NAMED_TREES: Mapping[str, str] = WRITTEN["tree"]


def node_paths(text: str) -> list[str]:
    """List the nodes of a draft tree by depth, given its name or paths separated by spaces or commas ("0 1 00": two
    children of the root and one grandchild)."""
    paths = NAMED_TREES.get(text, text).replace(",", " ").split()
    if not paths or not all(path.isascii() and path.isdigit() for path in paths):
        names = ", ".join(NAMED_TREES)
        raise SpecbenchError(f"--tree {text}: not a draft tree", f"valid: {names}, or paths of digits such as '0 1 00'")
    nodes = sorted(set(paths), key=lambda path: (len(path), path))
    for path in nodes:
        preceding = path[:-1] + str(int(path[-1]) - 1)
        for needed in (path[:-1], preceding if path[-1] != "0" else path[:-1]):
            if needed and needed not in nodes:
                kind = "parent" if needed == path[:-1] else "preceding sibling"
                raise SpecbenchError(f"--tree: node {path} has no {kind} {needed}", f"add node {needed}")
    return nodes


def _tuples(entry: Mapping[str, Any]) -> dict[str, Any]:
    return {name: tuple(value) if isinstance(value, list) else value for name, value in entry.items()}


BRANCHING = {"tree", "siblings", "paths"}
"""Options that make drafts branch, except `eagle-paths.paths`, of which only a single path is verified."""


def _is_chain(option: str) -> Callable[[Mapping[str, object]], bool]:
    """Return a test of whether drafts form a chain: `option` is 1, or is a tree of only first children."""
    if option == "tree":
        return lambda values: not set("".join(node_paths(str(values["tree"])))) - {"0"}
    return lambda values: values[option] == 1


def _component(entry: Mapping[str, Any], options: Mapping[str, Option]) -> Component:
    fields = _tuples(entry) | {"options": tuple(options[name] for name in entry.get("options", ()))}
    for branching in BRANCHING & set(entry.get("options", ())):
        fields["is_chain"] = _is_chain(branching)
    for place in ("target", "loop"):
        if place in fields:
            fields[place] = f"specbench.decoding.{fields[place]}"
    return Component(**fields)


def _read() -> dict[str, dict[str, Component]]:
    checks = {"tree": node_paths}
    options = {
        key: Option(**{"name": key, "check": checks.get(key), **_tuples(entry)})
        for key, entry in WRITTEN["option"].items()
    }
    return {
        kind: {name: _component(entry, options) for name, entry in WRITTEN[kind].items()} for kind in COMPONENT_KINDS
    }


CHOICES = _read()
DRAFTERS, VERIFIERS = CHOICES["drafter"], CHOICES["verifier"]


def columns_fed(options: Mapping[str, object]) -> int:
    """Return the columns of a full target forward with these decoder options: the window, its siblings and further
    paths, or a tree and the tokens skipped before it. For decoders of several image rows: columns of a single row."""
    if "tree" in options:
        nodes = node_paths(str(options["tree"]))
        leaves = [len(path) for path in nodes if path + "0" not in nodes]
        return 1 + len(nodes) + ("interval" in options) * (sum(leaves) // len(leaves))
    window = int(str(options.get("window", 1)))
    if "levels" in options:
        children = int(str(options["siblings"]))
        return window + sum(int(children**level) - 1 for level in range(1, min(int(str(options["levels"])), window)))
    if "paths" in options:
        return 1 + int(str(options["paths"])) * (window - 1)
    return window + (int(str(options.get("siblings", 1))) - 1) * min(int(str(options.get("depth", window))), window - 1)
