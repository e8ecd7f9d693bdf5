"""Versions of preprocessing code, part of the identity of the features it makes.

A fix that changes what a function returns raises its version, so that features kept from before are not used again. A
test pins what each version returns.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

F = TypeVar("F", bound=Callable)


def code_version(number: int) -> Callable[[F], F]:
    """Decorate a function with the version of its code; functions without it have version 1."""

    def mark(function: F) -> F:
        function.code_version = number  # type: ignore[attr-defined]
        return function

    return mark


def described(name: str, *functions: Callable) -> str:
    """Name preprocessing for an identity, with the versions of its functions where one is above 1."""
    versions = [getattr(function, "code_version", 1) for function in functions]
    return name if max(versions) == 1 else f"{name}, code {'.'.join(map(str, versions))}"
