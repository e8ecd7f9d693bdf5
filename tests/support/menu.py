"""Every decoder the components can be combined to, with the extremes of every option."""

from collections.abc import Iterator
from itertools import product

from specbench.errors import SpecbenchError
from specbench.specs.components import CHOICES, DRAFTERS
from specbench.specs.options import Option
from specbench.specs.presets import DecoderSpec, resolve

TREES = ("chain", "0", "0 1 2 00 01 10 000")
EXTREME_NUMBER = 16
"""The largest value to try of an option without an upper bound."""
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
            options = [option for part in parts for option in part.options if option.name not in ELSEWHERE]
            varied_options = [{option.name: value} for option in options for value in extremes(option)]
            yield from _allowed(start, chosen, [{}, *varied_options])


def _allowed(start: str, chosen: dict, options: list[dict]) -> Iterator[DecoderSpec]:
    """The lossless ones among the combination's decoders; some components refuse or bias others."""
    for values in options:
        try:
            spec = resolve(start, chosen | values)
        except SpecbenchError:
            continue
        if spec.lossless:
            yield spec


def extremes(option: Option) -> list[object]:
    """Values of an option to try in addition to its default."""
    if option.name == "tree":
        values = list(TREES)
    elif option.choices:
        values = list(option.choices)
    elif option.type is bool:
        values = [False, True]
    else:
        lowest = -EXTREME_NUMBER if option.minimum is None else option.minimum
        values = [lowest, min(option.maximum or EXTREME_NUMBER, EXTREME_NUMBER)]
    return [value for value in values if value != option.default]


def described(spec: DecoderSpec) -> str:
    """Components and options in one line."""
    ignored = DRAFTERS[spec.drafter].ignores
    kinds = [getattr(spec, kind) for kind in CHOICES if kind not in ignored]
    options = [f"{name}={value}" for name, value in spec.options.items() if name not in ELSEWHERE]
    return " ".join([*kinds, *options])
