"""Tests of compiled code, which skip if nothing can be compiled."""

import pytest

from specbench.runs import compiler

LACKING = compiler.missing("cpu")

needs_compiler = pytest.mark.skipif(LACKING is not None, reason=f"nothing can be compiled here: {LACKING}")
