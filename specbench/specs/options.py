"""Options (typed and validated values with a default and a help text), and components, which add options to a decoder.

Importing this never imports torch.
"""

from __future__ import annotations

import csv
import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from enum import Flag, StrEnum, auto
from types import MappingProxyType
from typing import Any

from specbench import names
from specbench.errors import SpecbenchError

ENV_PREFIX = "SPECBENCH_"  # Prefix of the environment variables of settings


class SettingSource(StrEnum):
    """Source of a setting's value; `run.json` keeps it as the first words of the origin, such as "flag --top-k"."""

    FLAG, ENVIRONMENT, FILE = "flag", "environment", "file"
    INLINE, SWEEP = "inline", "sweep"
    DEFAULT, LEFT = "default", "left to"
    PUBLISHED = ""  # the origin is the place of the publication

    @classmethod
    def of(cls, origin: object) -> SettingSource:
        """The source of a stored origin."""
        return next((source for source in cls if source and f"{origin} ".startswith(f"{source} ")), cls.PUBLISHED)


@dataclass(frozen=True)
class SettingOrigin:
    """Origin of a setting's value. `detail`: the flag, variable, file, model or publication."""

    source: SettingSource
    detail: str = ""

    def __str__(self) -> str:
        return " ".join(filter(None, (self.source, self.detail)))

    @property
    def given(self) -> bool:
        return self.source not in (SettingSource.DEFAULT, SettingSource.LEFT)


@dataclass(frozen=True)
class Option:
    """One option of a decoder component or of a command: its flag `--name`, default value and accepted values."""

    name: str
    default: int | float | str | bool  # its type is the option's type
    help: str  # one line, without a full stop
    # minimum, maximum: inclusive bounds of a number
    minimum: float | None = None
    above: float | None = None  # exclusive lower bound of a number
    maximum: float | None = None
    choices: tuple[str, ...] = ()  # the accepted values; empty if there is no list
    check: Callable[[str], object] | None = None  # raises a SpecbenchError for an invalid value
    reads: Callable[[str], str] | None = None  # normalises the spelling of a value
    outside: str = ""  # hint for a number outside the bounds; if empty, the help is the hint
    # whether runs were stored before this option existed; specs omit its default value, so that run ids do not change
    later: bool = False
    # values that need no codebook of the model; None if no value needs a codebook
    without_codebook: tuple[object, ...] | None = None

    @property
    def type(self) -> type:
        return type(self.default)

    def parse(self, value: object) -> Any:
        """Parse `value`, text from the command line or already typed, into this option's type."""
        kind = self.type
        try:
            parsed = _read(kind, value)
        except (TypeError, ValueError, KeyError, OverflowError):
            raise SpecbenchError(f"--{self.name} {value!s}: expected {_NOUN[kind]}", self.help) from None
        if self.reads:
            parsed = self.reads(parsed)
        if self.choices and isinstance(parsed, str):
            parsed = next(iter(names.fitting(parsed.removeprefix("torch."), self.choices, "value")), parsed)
        if self.choices and parsed not in self.choices:
            raise SpecbenchError(f"--{self.name} {value!s}: not a valid choice", f"valid: {', '.join(self.choices)}")
        if self.check:
            self.check(parsed)
        if kind in (int, float):
            low = self.minimum is not None and parsed < self.minimum
            low = low or (self.above is not None and parsed <= self.above)
            not_a_number = parsed != parsed  # math.isnan overflows on huge ints
            if not_a_number or low or (self.maximum is not None and parsed > self.maximum):
                raise SpecbenchError(f"--{self.name} {parsed}: must be {self._range()}", self.outside or self.help)
        return parsed

    def _range(self) -> str:
        bounds = {"at least": self.minimum, "above": self.above, "at most": self.maximum}
        parts = (f"{name} {plain(bound)}" for name, bound in bounds.items() if bound is not None)
        return " and ".join(parts) or "a number"


class Use(Flag):
    """Further uses of a setting of `specbench run`."""

    NONE = 0
    RUN = auto()  # distinguishes runs; `run.json` keeps its origin, and it may be swept
    REPEAT = auto()  # `run.json` keeps its value, for the command that decodes the same images with another decoder
    DRAWING = auto()  # selects prompts of the set, see `specbench.prompts.prompt_set.Drawing`
    TABLES = auto()  # the command line of `specbench bench` has it, for papers' tables
    CELLS = auto()  # cells of papers' tables may state it
    TOKENS = auto()  # applies to imported tokens
    ENGINES = auto()  # applies to images that a serving engine draws
    IMAGES = auto()  # applies to images that are not stored
    OPTION = auto()  # option of a decoder
    SELECTION = DRAWING | REPEAT | TABLES
    DECODING = RUN | REPEAT | TABLES | IMAGES
    TARGET = DECODING | TOKENS | ENGINES


@dataclass(frozen=True)
class Setting(Option):
    """An option of `specbench run`, with its presentation in help texts."""

    panel: str = ""  # the help panel that lists the setting
    metavar: str = ""  # placeholder of its value in help screens; empty for switches
    unset: str = ""  # source of the value when it is not set, for example "the model"; empty when `default` applies
    uses: Use = Use.NONE
    many: bool = False  # may be repeated, and accepts lists separated by commas
    words: tuple[str, ...] = ()  # extra words accepted in addition to the type, for example "auto" for a number
    # options of other decoders with the same name; the value stays text until a decoder parses it
    others: tuple[Option, ...] = ()

    @property
    def env(self) -> str:
        """Name of the setting's environment variable."""
        return ENV_PREFIX + self.name.replace("-", "_").upper()

    @property
    def value_unset(self) -> object:
        if self.many:
            return tuple(split_list(str(self.default)))
        return None if self.unset else self.default

    @property
    def origin_unset(self) -> SettingOrigin:
        return SettingOrigin(SettingSource.LEFT if self.unset else SettingSource.DEFAULT, self.unset)

    def parse(self, value: object) -> Any:
        """Parse `value`, from any origin, into this setting's type."""
        if self.many:
            items = [value] if isinstance(value, str | dict) or not isinstance(value, Iterable) else value
            if not (parts := tuple(part for item in items for part in split_list(str(item)))):
                raise SpecbenchError(f"no {self.name} given", f"name some, or omit --{self.name}")
            return parts
        if isinstance(value, list | tuple | dict):
            raise SpecbenchError(f"--{self.name} {value!r}: expected one value", self.help)
        if value in self.words:
            return value
        return value if self.others else super().parse(value)


class Options(dict[str, Any]):
    """Values of a decoder's options by name, sorted; hashable, because they never change."""

    def __init__(self, values: Mapping[str, Any] = MappingProxyType({})):
        super().__init__(sorted(values.items()))

    def __hash__(self) -> int:  # type: ignore[override]
        return hash(tuple(self.items()))

    def __repr__(self) -> str:
        return repr(tuple(self.items()))  # part of the keys of stored compiled code


def split_list(text: str) -> list[str]:
    """Split at commas; quotes enclose a part that contains a comma."""
    parts = next(csv.reader([text], skipinitialspace=True)) if '"' in text and text.isprintable() else text.split(",")
    return [part.strip() for part in parts if part.strip()]


MEMORY = frozenset(
    ("tables", "slot_distributions", "slot_features", "slot_drafts", "kept", "temporary", "neighbours", "image_rows")
)
"""Kinds of memory that a component may need in addition to the target, see `decoders.toml`."""


@dataclass(frozen=True)
class Component:
    """One implementation of a component kind (drafter, init, verifier, residual or refine)."""

    target: str  # "module:attribute" of its implementation, imported only when a decoder is built
    summary: str  # one line for `specbench list`
    options: tuple[Option, ...] = ()  # options that the component adds to the decoder
    lossless: bool = True  # whether the joint distribution of the image tokens equals AR sampling
    only_with: tuple[str, ...] = ()  # components of other kinds it requires; empty if it combines with all
    ignores: tuple[str, ...] = ()  # kinds of components that have no effect together with this component
    loop: str = "specbench.decoding.loop:Loop"  # "module:attribute" of the decode loop that runs it; only for drafters
    head_kind: str = ""  # kind of draft head that a drafter uses, if it is not the drafter's name
    # whether the drafts form a chain with these option values; only for drafters
    is_chain: Callable[[Mapping[str, object]], bool] = lambda values: True
    # whether the number of accepted drafts depends on the drafts after them; only for verifiers
    looks_ahead: bool = False
    # whether every unverified draft is redrawn, independently of the slot's draft and noise; only for refinements. A
    # verifier that looks ahead is lossless only with such a refinement.
    redraws: bool = False
    # memory in addition to the target, see `decoders.toml`
    memory: Mapping[str, int] = field(default_factory=dict, hash=False)

    def __post_init__(self) -> None:
        if unknown := set(self.memory) - MEMORY:
            raise SpecbenchError(
                f"component '{self.target}': unknown kind of memory '{min(unknown)}'", ", ".join(sorted(MEMORY))
            )


def parse_size(text: str) -> tuple[int, int]:
    """Parse WIDTHxHEIGHT to height and width in pixels."""
    if not (sides := re.fullmatch(r"([1-9]\d{0,4})x([1-9]\d{0,4})", text)):
        raise SpecbenchError(f"--size {text}: not WIDTHxHEIGHT", "write for example --size 768x512")
    return int(sides[2]), int(sides[1])


def plain(value: object) -> str:
    """Format an option's value as it is typed on the command line: 2, not 2.0."""
    return f"{value:g}" if isinstance(value, float) else str(value)


_NOUN = {int: "a whole number", float: "a number", str: "a word", bool: "true or false"}


def _read(kind: type, value: object) -> Any:
    if kind is bool:
        if isinstance(value, bool):
            return value
        return {"true": True, "false": False, "yes": True, "no": False, "1": True, "0": False}[str(value).lower()]
    if isinstance(value, bool) and kind is not str:
        raise ValueError(value)
    if kind is int and isinstance(value, float) and not value.is_integer():
        raise ValueError(value)
    return kind(value)
