"""The error type for users (message, hint, exit code), and the exit codes."""

from __future__ import annotations

import os
import traceback
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, TypeVar

from specbench import names

FAILURE = 1
BAD_INPUT = 2
PARTIAL = 3
GATE = 4
MISSING_PREREQUISITE = 5
INTERRUPTED = 130


class SpecbenchError(Exception):
    """An error the user can act on.

    Args:
        what: a line that names the invalid value.
        try_this: hint on what to type or change, or an empty string.
        exit_code: exit code of the process.
    """

    def __init__(self, what: str, try_this: str = "", exit_code: int = BAD_INPUT) -> None:
        super().__init__(what)
        self.what = what
        self.try_this = try_this
        self.exit_code = exit_code

    def __str__(self) -> str:
        return f"{self.what} ({self.try_this})" if self.try_this else self.what

    def __reduce__(self) -> tuple[type[SpecbenchError], tuple[str, str, int]]:
        return type(self), (self.what, self.try_this, self.exit_code)


class CompileError(SpecbenchError):
    """A step cannot be compiled; with `--compile auto`, the run continues eagerly."""


def listed(names: Iterable[str]) -> str:
    """Join names with commas, as they are typed; quote names that contain a comma."""
    return ", ".join(f'"{name}"' if "," in name else name for name in names)


def enumerated(texts: Iterable[str], last: str = "and") -> str:
    """Join texts without repetition, as in a sentence: "csv, json and parquet"."""
    *first, end = dict.fromkeys(texts)
    return f"{', '.join(first)} {last} {end}" if first else end


def chosen(what: str, values: Any) -> list[Any]:
    """Return a value, or the values of an iterable, as a list. None and () mean all and give []; any other empty
    iterable is an error."""
    one = isinstance(values, str) or not isinstance(values, Iterable)
    kept = list(() if values is None else [values] if one else values)
    if not kept and not isinstance(values, tuple | None):
        raise SpecbenchError(f"no {what} given", "the list is empty; omit it to choose all")
    return kept


_LISTS = {**{kind: f"{kind}s" for kind in ("decoder", "model", "metric", "table", "run")}, "prompt set": "prompts"}
"""{kind of name: argument of `specbench list` that lists the names}."""


def unknown_name(kind: str, name: str, valid: Iterable[str], most: int = 12) -> SpecbenchError:
    """Build the error for a name not in `valid`. The hint is the most similar name, or else all valid names. For more
    than `most` valid names, the hint names the command that lists them."""
    valid = sorted(valid)
    near = names.guess(name, valid)
    hint = f"did you mean '{near}'?" if near else f"valid: {listed(valid) or 'none'}"
    if len(valid) > most and kind in _LISTS:
        named = f"specbench list {_LISTS[kind]} shows all {len(valid)}"
        hint = f"{hint} {named}" if near else named
    if "," in name and kind == "metric":
        hint = "repeat the option: --metric A --metric B"
    return SpecbenchError(f"unknown {kind} '{name}'", hint)


Name = TypeVar("Name", bound=str)


def read_name(
    kind: str,
    name: str,
    valid: Iterable[Name],
    also: Mapping[str, Iterable[str]] | None = None,
    fallback: Sequence[str] = (),
) -> Name:
    """Resolve a typed name to the valid name that `names.fitting` finds, or else to the only name in `fallback`."""
    valid = list(valid)
    if len(fitting := names.fitting(name, valid, kind, also) or list(fallback)) > 1:
        raise SpecbenchError(f"{kind} '{name}' is ambiguous", f"name one of: {', '.join(fitting)}")
    if not fitting:
        raise unknown_name(kind, name, valid)
    return next(entry for entry in valid if entry == fitting[0])


def place(error: BaseException) -> str:
    """Format the location where an unexpected error was raised: " at file.py:12"."""
    frames = traceback.extract_tb(error.__traceback__)
    return f" at {os.path.basename(frames[-1].filename)}:{frames[-1].lineno}" if frames else ""
