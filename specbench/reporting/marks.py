"""Labels, colours and shapes of decoders, in tables, on pages and in figures."""

import math
import re
import zlib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any

from specbench.specs.components import CHOICES, columns_fed
from specbench.specs.options import SettingSource, plain
from specbench.specs.presets import PRESETS, DecoderSpec, named_ar, published, resolve

PALETTE = ("#0096ff", "#874b0f", "#5a4bb4", "#d27869", "#c32d5a", "#00694b", "#788700", "#b469b4", "#645f82", "#cd8cb4")
"""Colours that are distinguishable on white and black, also with protanopia or deuteranopia (CIEDE2000 above 12)."""
_SYMBOLS = {"circle": "●", "square": "■", "triangle": "▲", "diamond": "◆", "star": "★", "cross": "✚"}
"""{shape in Observable Plot: character}. Each decoder has a distinct pair of colour and shape."""
_FIRST = ("sjd", "jacobi", "sjd-isp", "sjd++", "gsd", "scd-mc", "scd-gs", "predictive", "eagle", "vertical")
"""First decoders that get a mark; the other presets follow in order. Colour and shape both change at each decoder."""
_DASHES = (None, "9,3", "3,2", "9,3,2,3", "1,2", "14,4")
"""Line style of each shape, so that decoders of the same colour have different line styles."""


@dataclass(frozen=True)
class Mark:
    """Marks of a decoder in charts: colour and shape of points, the shape as a character, and dashes of lines."""

    colour: str
    symbol: str

    @property
    def glyph(self) -> str:
        return _SYMBOLS[self.symbol]

    @property
    def dash(self) -> str | None:
        return _DASHES[list(_SYMBOLS).index(self.symbol)]


Marks = Mapping[str, Mark]  # {name of a run: mark}, in the order of the runs


def mark_of(decoder: str) -> Mark:
    """Return the mark of a decoder, independent of other decoders (compare `marks_of`); AR is grey."""
    return Mark("#7d8087", "circle") if named_ar(decoder) else mark_at(_place(decoder))


def marks_of(decoders: Iterable[str]) -> dict[str, Mark]:
    """Return {decoder: mark} for the decoders of a page. A colour is repeated only if all colours are used."""
    marks: dict[str, Mark] = {}
    named = sorted({*decoders}, key=_place)
    for decoder in named:
        mark, taken = mark_of(decoder), [other.colour for other in marks.values()]
        free = [colour for colour in PALETTE if colour not in taken]
        few = len([name for name in named if not named_ar(name)]) <= len(PALETTE)
        marks[decoder] = replace(mark, colour=free[0]) if few and mark.colour in taken else mark
    return marks


def distinct(marks: Marks) -> dict[str, Mark]:
    """Give runs with the same mark, such as runs of the same decoder, other shapes, for charts without names of points.
    A mark is repeated only if all shapes are used."""
    found: dict[str, Mark] = {}
    for name, mark in marks.items():
        others = (replace(mark, symbol=symbol) for symbol in (mark.symbol, *_SYMBOLS))
        found[name] = next((other for other in others if other not in found.values()), mark)
    return found


def _place(decoder: str) -> int:
    names = [*_FIRST, *(name for name in PRESETS if name not in _FIRST)]
    return names.index(decoder) if decoder in names else zlib.crc32(decoder.encode())


def mark_at(place: int) -> Mark:
    """Return the mark with an index in the order of colours and shapes."""
    symbols, shift = list(_SYMBOLS), place // math.lcm(len(PALETTE), len(_SYMBOLS))
    return Mark(PALETTE[place % len(PALETTE)], symbols[(place + shift) % len(symbols)])


def label(decoder: DecoderSpec, origins: Mapping[str, object] | None = None, model: str = "") -> str:
    """Name the decoder, with the components and options that differ from its preset, except the window. `origins`:
    origins of the run's settings; they show which options are the preset's if the preset is not installed. `model`: the
    run's model; options published for the decoder on this model count as the preset's."""
    name, options = decoder.name, decoder.options
    usual = resolve(name) if name in PRESETS else None
    choices = {kind: getattr(decoder, kind) for kind in CHOICES}
    if usual is None and origins is not None:
        choices = {kind: value for kind, value in choices.items() if kind in origins}
        changed = {
            key: options[key] for key in options if SettingSource.of(origins.get(key)) is not SettingSource.DEFAULT
        }
    else:
        stated = {key: value.value for key, value in published(name, model.partition("+")[0]).items()}
        defaults = {kind: getattr(usual, kind) for kind in choices} | usual.options if usual else {}
        defaults |= stated
        choices = {kind: value for kind, value in choices.items() if value != defaults.get(kind)}
        changed = {key: value for key, value in options.items() if str(value) != str(defaults.get(key))}
    changed.pop("window", None)
    return " ".join([name, *(f"{key}={plain(value)}" for key, value in (choices | changed).items())])


def window_of(options: Mapping[str, Any]) -> int | None:
    """Return the number of tokens per target forward, without siblings and further paths; None if it varies."""
    if "tree" in options:
        return columns_fed(options)
    return None if {"rows-window", "rounds"} & options.keys() else options.get("window", 1)


def natural(text: str) -> list[str | float]:
    """Return a sort key that compares numbers in the text as numbers ("G=3" before "G=25")."""
    pieces = re.split(r"(\d+(?:\.\d+)?)", text)
    return [float(piece) if place % 2 else piece for place, piece in enumerate(pieces)]
