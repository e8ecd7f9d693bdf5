"""Every decoder the components can be combined to, with the extremes of every option."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import product

from specbench.errors import SpecbenchError
from specbench.specs.components import CHOICES, DRAFTERS
from specbench.specs.options import Option
from specbench.specs.presets import DecoderSpec, resolve

TREES = ("chain", "0", "0 1 2 00 01 10 000")
EXTREME_NUMBER = 16
"""Stands for "as large as you like" where an option has no upper bound of its own."""
ELSEWHERE = {"window", "head"}
"""Options that are not varied here: audit settings have windows, and the models have their own draft head."""


def lossless_decoders() -> Iterator[DecoderSpec]:
    """Combinations of lossless components, each with default options and with every option at its extremes."""
    for drafter in DRAFTERS:
        start = "ar" if drafter == "none" else "sjd"
        varied = [kind for kind in CHOICES if kind != "drafter" and kind not in DRAFTERS[drafter].ignores]
        for values in product(*(CHOICES[kind] for kind in varied)):
            chosen = {"drafter": drafter, **dict(zip(varied, values, strict=True))}
            parts = [CHOICES[kind][value] for kind, value in chosen.items()]
            if not all(part.lossless for part in parts):
                continue
            try:
                yield resolve(start, chosen)
            except SpecbenchError:
                continue  # components that require another one
            for option in (option for part in parts for option in part.options if option.name not in ELSEWHERE):
                yield from (resolve(start, chosen | {option.name: value}) for value in extremes(option))


def extremes(option: Option) -> list[object]:
    """Values of an option to try besides its default."""
    if option.name == "tree":
        values = list(TREES)
    elif option.choices:
        values = list(option.choices)
    elif option.type is bool:
        values = [False, True]
    else:
        values = [option.minimum, min(option.maximum or EXTREME_NUMBER, EXTREME_NUMBER)]
    return [value for value in values if value is not None and value != option.default]


def described(spec: DecoderSpec) -> str:
    """Components and options in one line."""
    ignored = DRAFTERS[spec.drafter].ignores
    kinds = [getattr(spec, kind) for kind in CHOICES if kind not in ignored]
    options = [f"{name}={value}" for name, value in spec.options if name not in ELSEWHERE]
    return " ".join([*kinds, *options])
