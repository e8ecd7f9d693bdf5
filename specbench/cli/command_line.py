"""Typer application whose help screens print switches without a type."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import typer
from typer.core import TyperCommand, TyperGroup

COMPLETION = "_SPECBENCH_COMPLETE"
"""Variable by which a shell asks for completion of a line."""


class _PlainSwitches:
    """Mixin of commands: a switch is printed as --quiet, not as `--quiet <bool>`; --help is one of them."""

    def get_params(self, ctx: Any) -> list[Any]:
        parameters = super().get_params(ctx)  # type: ignore[misc]
        for one in parameters:
            if getattr(one, "is_flag", False) and one.metavar is None:
                one.metavar = ""
        return parameters


class Command(_PlainSwitches, TyperCommand):
    """A command of specbench."""


class Group(_PlainSwitches, TyperGroup):
    """A command of specbench that has commands of its own."""


class CommandLine(typer.Typer):
    """Group of commands; arguments as for `typer.Typer`."""

    def __init__(self, **settings: Any) -> None:
        super().__init__(cls=Group, **settings)

    def command(self, name: str | None = None, **settings: Any) -> Callable:
        return super().command(name, cls=Command, **settings)
