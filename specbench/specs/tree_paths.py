"""Static draft trees as text: a node is its path from the root, one digit (child index) per level. Imports no torch."""

from __future__ import annotations

from collections.abc import Mapping

from specbench.errors import SpecbenchError

NAMED = {
    "chain": "0 00 000 0000 00000",
    "mc_sim_7b_63": "0 1 2 3 00 01 02 10 11 20 21 30 000 001 002 010 011 020 021 100 0000 0001 0002 00000 00001",
    "naive_extend_57": "0 1 2 3 4 00 01 02 03 10 11 12 20 21 22 30 31 40 "
    "000 001 002 003 010 011 012 020 021 022 030 031 100 101 110 200 "
    "0000 0001 0002 0003 0010 0011 0012 0020 0021 0030 0100 0101 0110 0200 "
    "00000 00001 00002 00010 00011 00100 00101 00110 00200",
}
"""Static draft trees of EAGLE-1."""


def node_paths(text: str) -> list[str]:
    """List the nodes of a draft tree by depth, given its name or paths separated by spaces or commas ("0 1 00": two
    children of the root and one grandchild)."""
    paths = NAMED.get(text, text).replace(",", " ").split()
    if not paths or not all(path.isascii() and path.isdigit() for path in paths):
        names = ", ".join(NAMED)
        raise SpecbenchError(f"--tree {text}: not a draft tree", f"valid: {names}, or paths of digits such as '0 1 00'")
    nodes = sorted(set(paths), key=lambda path: (len(path), path))
    for path in nodes:
        preceding = path[:-1] + str(int(path[-1]) - 1)
        for needed in (path[:-1], preceding if path[-1] != "0" else path[:-1]):
            if needed and needed not in nodes:
                kind = "parent" if needed == path[:-1] else "preceding sibling"
                raise SpecbenchError(f"--tree: node {path} has no {kind} {needed}", f"add node {needed}")
    return nodes


def columns_fed(options: Mapping[str, object]) -> int:
    """Columns of a full target forward with these decoder options: the window, its siblings and further paths, or a
    tree and the tokens skipped before it. Of decoders that fill several rows, those of one row."""
    if "tree" in options:
        nodes = node_paths(str(options["tree"]))
        leaves = [len(path) for path in nodes if path + "0" not in nodes]
        return 1 + len(nodes) + ("interval" in options) * (sum(leaves) // len(leaves))
    window = int(str(options.get("window", 1)))
    if "paths" in options:
        return 1 + int(str(options["paths"])) * (window - 1)
    return window + (int(str(options.get("siblings", 1))) - 1) * min(int(str(options.get("depth", 0))), window - 1)
