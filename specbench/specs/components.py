"""Components of a decoder, as data: drafters, token initialisations, verifiers, residuals, refinements.

`decoders.toml` names the code that implements each, the options it adds to the command line, and whether it is
lossless (the joint distribution of the image tokens equals AR sampling). Importing this module never imports torch.
"""

from __future__ import annotations

import tomllib
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from specbench.specs.options import Component, Option
from specbench.specs.tree_paths import node_paths

COMPONENT_KINDS = {
    "drafter": "drafter",
    "init": "initialisation of fresh draft tokens",
    "verifier": "acceptance test",
    "residual": "residual distribution after a rejection",
    "refine": "refinement of unverified draft tokens",
}
"""Description of each kind of component, for help texts."""
ANY_TAIL = "any-tail"  # Option that lets a verifier that looks ahead keep drafts, which is lossy


def _tuples(entry: Mapping[str, Any]) -> dict[str, Any]:
    return {name: tuple(value) if isinstance(value, list) else value for name, value in entry.items()}


def _is_chain(option: str) -> Callable[[Mapping[str, object]], bool]:
    """The rule that a chain's `option` is 1, or, as a tree, has first children only."""
    if option == "tree":
        return lambda values: not set("".join(node_paths(str(values["tree"])))) - {"0"}
    return lambda values: values[option] == 1


def _component(entry: Mapping[str, Any], options: Mapping[str, Option]) -> Component:
    given = _tuples(entry) | {"options": tuple(options[name] for name in entry.get("options", ()))}
    if rule := given.pop("chain_if", ""):
        given["is_chain"] = _is_chain(rule)
    for place in ("target", "loop"):
        if place in given:
            given[place] = f"specbench.decoding.{given[place]}"
    return Component(**given)


DECODERS = tomllib.loads(Path(__file__).with_name("decoders.toml").read_text(encoding="utf-8"))
"""Components, options, papers and presets, as written down."""


def _read() -> dict[str, dict[str, Component]]:
    checks = {"tree": node_paths}
    options = {
        key: Option(**{"name": key, "check": checks.get(key), **_tuples(entry)})
        for key, entry in DECODERS["option"].items()
    }
    return {
        kind: {name: _component(entry, options) for name, entry in DECODERS[kind].items()} for kind in COMPONENT_KINDS
    }


CHOICES = _read()
DRAFTERS, VERIFIERS = CHOICES["drafter"], CHOICES["verifier"]
