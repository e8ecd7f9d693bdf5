"""Refusals: an impossible call raises an error of a single line."""

from collections.abc import Callable

import pytest

from specbench.errors import SpecbenchError


def refused(text: str, call: Callable, /, *arguments: object, **settings: object) -> SpecbenchError:
    """The error of a call with these arguments; `text`: a regular expression that its one line matches."""
    with pytest.raises(SpecbenchError, match=text or None) as caught:
        call(*arguments, **settings)
    assert "\n" not in str(caught.value)
    return caught.value
