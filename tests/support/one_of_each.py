"""Presets as cases of a test: the first one with each component of a kind, and the others in a slow test."""

import pytest

from specbench.specs.presets import PRESETS


def presets(kind: str, names=PRESETS) -> list:
    first = {PRESETS[name].choices[kind]: name for name in reversed(list(names))}.values()
    return [name if name in first else pytest.param(name, marks=pytest.mark.slow) for name in names]
