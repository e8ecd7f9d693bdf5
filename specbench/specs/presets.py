"""Presets of the papers' methods: one value per component kind, the paper, and option defaults.

`resolve("gsd", {"G": 50})` merges a preset with the caller's options into a frozen `DecoderSpec` and rejects unknown
options by name. `published` reads `published.toml`: values that papers and their code state for a decoder on a model.
Plug-ins and user modules add presets. Importing this never imports torch.
"""

from __future__ import annotations

import functools
import re
import sys
import tomllib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

from specbench import names
from specbench.errors import SpecbenchError, read_name, unknown_name
from specbench.specs.components import ANY_TAIL, CHOICES, DRAFTERS, WRITTEN
from specbench.specs.options import Component, Option, Options, plain
from specbench.system.foreign_code import Code, code_of
from specbench.system.plugins import load_plugin, load_user_object, plugins

_NO_DRAFTS = "none"  # The drafter of AR


@dataclass(frozen=True)
class Preset:
    """Named combination of components."""

    name: str
    summary: str
    # paper, equation: source of the method
    paper: str
    equation: str
    choices: Mapping[str, str]  # value of each choice (drafter, init, verifier, residual, refine)
    defaults: Mapping[str, object] = field(default_factory=dict)  # option defaults that differ from the components' own
    own: bool = False  # whether this project invented the method; `paper` then names only related papers
    released: bool = False  # whether it follows the authors' released code, which differs from their paper


@dataclass(frozen=True)
class DecoderSpec:
    """Fully resolved decoder with every option explicit.

    `lossless` is True if every chosen component is lossless.
    """

    name: str
    drafter: str
    init: str
    verifier: str
    residual: str
    refine: str
    options: Options
    lossless: bool

    @property
    def drafts(self) -> bool:
        """Whether the decoder drafts tokens; AR does not."""
        return self.drafter != _NO_DRAFTS

    @property
    def full_name(self) -> str:
        """The preset's name, followed by the components that replace its components: "sjd+grouped"."""
        usual = PRESETS[self.name].choices if self.name in PRESETS else vars(self)
        kinds = [kind for kind in usual if kind in CHOICES and getattr(self, kind) != usual[kind]]
        return "+".join([self.name, *(getattr(self, kind) for kind in kinds)])

    @property
    def head_kind(self) -> str:
        """Kind of the draft head that the decoder uses; empty if it uses no head."""
        return (DRAFTERS[self.drafter].head_kind or self.drafter) if "head" in self.options else ""

    @property
    def biased_elsewhere(self) -> bool:
        """Whether the decoder may be lossy for another reason than its acceptance probability, as with plug-ins."""
        if self.lossless:
            return False
        if unknown := [kind for kind in CHOICES if getattr(self, kind) not in CHOICES[kind]]:
            return unknown != ["verifier"]
        others = (CHOICES[kind][getattr(self, kind)] for kind in _kinds(vars(self)) if kind != "verifier")
        return _keeps_seen_drafts(vars(self)) or not all(part.lossless for part in others)

    @property
    def components(self) -> list[Component]:
        """The decoder's components that have an effect."""
        return _components(vars(self))

    def refuse_without_codebook(self, model: str) -> None:
        """Reject values of options that need a codebook, for a model that has none."""
        for option in (option for part in self.components for option in part.options):
            value = self.options.get(option.name, option.default)
            if option.without_codebook is not None and value not in option.without_codebook:
                what = f"decoder '{self.name}': --{option.name} {plain(value)} needs a codebook, which '{model}' lacks"
                valid = " or ".join(f"--{option.name} {plain(other)}" for other in option.without_codebook)
                raise SpecbenchError(what, f"use {valid}" if valid else "use another decoder or --verifier")


def _built_in() -> dict[str, Preset]:
    """Return the presets of `decoders.toml`; a component that a preset does not name is SJD's."""
    sjd = {"drafter": "jacobi", "init": "uniform", "verifier": "exact", "residual": "standard", "refine": "resample"}
    return {
        name: Preset(
            name,
            entry["summary"],
            WRITTEN["paper"].get(entry["paper"], entry["paper"]),
            entry["equation"],
            sjd | entry.get("components", {}),
            entry.get("defaults", {}),
            entry.get("own", False),
            entry.get("released", False),
        )
        for name, entry in WRITTEN["decoder"].items()
    }


PRESETS = _built_in()


def named_ar(decoder: str | None) -> bool:
    """Return whether a decoder's name belongs to AR or to another preset without drafts."""
    return decoder in PRESETS and PRESETS[decoder].choices["drafter"] == _NO_DRAFTS


def resolve(name: str, overrides: Mapping[str, object] | None = None) -> DecoderSpec:
    """Resolve the preset `name` with the caller's choices and options."""
    name = read_name("decoder", name, PRESETS, _cited())
    preset = PRESETS[name]
    # Spell options as they are defined: "g" of GSD becomes "G", if no other option matches.
    valid = [*CHOICES, *options_of(preset)]
    overrides = {next(iter(names.fitting(given, valid)), given): value for given, value in (overrides or {}).items()}
    choices = choices_of(preset, overrides)
    _check_fit(name, choices)
    options = options_of(preset, choices)
    for option in overrides:
        if option not in options and option not in _kinds(choices):
            raise unknown_name(f"{name} option", option, [*options, *_kinds(choices)])
    values = {option: options[option].parse(overrides.get(option, options[option].default)) for option in options}
    _check_look_ahead(name, choices, values)
    stored = {key: value for key, value in values.items() if not options[key].later or value != options[key].default}
    lossless = all(part.lossless for part in _components(choices)) and not _keeps_seen_drafts(choices)
    return DecoderSpec(name, **choices, options=Options(stored), lossless=lossless)


def choices_of(preset: Preset, overrides: Mapping[str, object]) -> dict[str, str]:
    """Return the preset's components, replaced by the components in `overrides`."""
    choices = dict(preset.choices)
    for kind in CHOICES.keys() & overrides.keys():
        choices[kind] = read_name(kind, str(overrides[kind]), CHOICES[kind])
    if preset.choices["drafter"] == _NO_DRAFTS != choices["drafter"]:
        what = f"--drafter {choices['drafter']}: decoder '{preset.name}' has no drafts to replace"
        raise SpecbenchError(what, "use a decoder with drafts, such as sjd")
    return choices


def options_of(preset: Preset, choices: Mapping[str, str] | None = None) -> dict[str, Option]:
    """Return the options of the preset (with `choices` applied) with their defaults."""
    options = {option.name: option for part in _components(choices or preset.choices) for option in part.options}
    return {
        name: Option(**{**vars(option), "default": preset.defaults.get(name, option.default)})
        for name, option in options.items()
    }


def define_decoder(
    name: str,
    like: str = "sjd",
    kind: str = "verifier",
    lossless: bool = False,
    summary: str = "defined in Python",
    **options: int | float | str | bool,
) -> Callable[[_Part], _Part]:
    """Decorate a component to make a decoder of it, for example in a cell of a notebook.

    Args:
        name: name of the decoder; decorating again, for example by running the cell again, replaces it.
        like: decoder that provides all other components and defaults.
        kind: "drafter", "init", "verifier", "residual" or "refine": kind of the component.
        lossless: your declaration; `specbench.audit(name)` tests it.
        summary: one line about it.
        options: arguments of the component after the context, with their defaults, for example `power=0.5`.

    Returns:
        A decorator that returns the class (or, for a residual, the function), which is identified by module and name.
        Runs store a digest of its source, so that a changed source makes another run.

    Raises:
        SpecbenchError: a name that is taken, an unknown kind or decoder, or an option of another type.
    """
    usual, table = PRESETS[read_name("decoder", like, PRESETS, _cited())], CHOICES[read_name("kind", kind, CHOICES)]
    if (name in PRESETS or name in table) and name not in _defined:
        raise SpecbenchError(f"decoder '{name}': the name is already taken", "choose another name")
    for key, value in options.items():
        if not isinstance(value, int | float | str):
            what = f"decoder '{name}': option {key}={value!r} is a {type(value).__name__}"
            raise SpecbenchError(what, "an option's default is a number, a text, True or False")

    def register(part: _Part) -> _Part:
        added = tuple(Option(key.replace("_", "-"), value, f"{key} of {name}") for key, value in options.items())
        table[name] = Component(f"{part.__module__}:{part.__qualname__}", summary, added, lossless=lossless)
        PRESETS[name] = Preset(name, summary, "-", "-", {**usual.choices, kind: name}, usual.defaults)
        _defined.add(name)
        return part

    return register


_Part = TypeVar("_Part", bound=Callable[..., object])
_defined: set[str] = set()  # Names of decoders that `define_decoder` made
_imported: dict[str, str] = {}
"""Decoder names of user modules, by reference; a module and its decoder may have the same name."""


def decoder_name(reference: str) -> str:
    """Return the catalogue's name of a decoder, or the typed name if it is unknown. "package.module:NAME" first imports
    and registers that preset."""
    if ":" not in reference:
        fitting = names.fitting(reference, PRESETS, "decoder", _cited())
        return fitting[0] if len(fitting) == 1 else reference
    name, _, rest = reference.partition(":")
    loaded = reference in _imported or name in sys.modules
    if name in PRESETS and not loaded and name not in _imported.values():  # a decoder may have the name of its file
        meant = f"did you mean {name}:{rest.replace(':', '=')}?" if ":" in rest else f"write {name}:window=16"
        raise SpecbenchError(f"decoder '{reference}': the option is not NAME=VALUE", meant)
    preset = load_user_object(reference, "decoder")
    if not isinstance(preset, Preset):
        raise SpecbenchError(f"decoder '{reference}' is a {type(preset).__name__}, not a specbench Preset")
    if unfit := _unfit(preset):
        raise SpecbenchError(f"decoder '{reference}': {unfit}", "specbench list components")
    again = _imported.get(reference) == preset.name  # the module may have been reloaded
    if not again and PRESETS.setdefault(preset.name, preset) is not preset:
        raise SpecbenchError(f"decoder '{reference}' is called '{preset.name}', which is already taken")
    PRESETS[preset.name], _imported[reference] = preset, preset.name
    return preset.name


def _unfit(preset: Preset) -> str:
    """Describe why a user's combination of components is invalid; return an empty string if it is valid."""
    missing = [f"its choices have no '{kind}'" for kind in CHOICES if kind not in preset.choices]
    unknown = (
        f"{kind} '{part}' does not exist" for kind, part in preset.choices.items() if part not in CHOICES.get(kind, ())
    )
    return next(iter([*missing, *unknown]), "")


def decoder_code(decoder: DecoderSpec) -> Code | None:
    """Return the code from outside specbench that defines the decoder's components and preset, if any."""
    parts = [CHOICES[kind][getattr(decoder, kind)] for kind in CHOICES]
    presets = [reference for reference, name in _imported.items() if name == decoder.name]
    return code_of([*(part.target for part in parts), DRAFTERS[decoder.drafter].loop, *presets])


def require_decoders(pieces: Sequence[str]) -> None:
    """Reject misspelt decoder names before anything else is loaded. Options are checked later."""
    for piece in pieces:
        name, colon, rest = piece.split(",")[0].partition(":")
        plain = not colon or ("=" in rest and ":" not in rest)  # else a plug-in, package.module:NAME
        if plain:
            read_name("decoder", name, PRESETS, _cited())
        if not plain:
            load_user_object(":".join([name, *rest.partition("=")[0].split(":")[:1]]), "decoder")


@functools.cache
def add_plugin_decoders() -> None:
    """Register the presets of installed plug-ins; built-in names take precedence."""
    for name in plugins("decoders"):
        expected = "a Preset with a known component of each kind"
        preset = load_plugin("decoders", name, lambda it: isinstance(it, Preset) and not _unfit(it), expected)
        if preset is not None and PRESETS.setdefault(preset.name, preset) is preset:
            _imported[plugins("decoders")[name].value] = preset.name


def _cited() -> dict[str, list[str]]:
    """Return names of each decoder's paper: title, short name, arXiv number."""
    return {name: _names_in(preset.paper) for name, preset in PRESETS.items()}


@functools.cache
def _names_in(paper: str) -> list[str]:
    return re.split(r"\s*[,:;()]\s*|arXiv ", paper)


def _kinds(choices: Mapping[str, str]) -> list[str]:
    """Return the component kinds that have an effect: some drafters ignore other kinds."""
    return [kind for kind in CHOICES if kind not in DRAFTERS[choices["drafter"]].ignores]


def _components(choices: Mapping[str, str]) -> list[Component]:
    return [CHOICES[kind][choices[kind]] for kind in _kinds(choices)]


def _check_fit(name: str, choices: Mapping[str, str]) -> None:
    """Reject a component if a component that it requires is missing."""
    for kind in _kinds(choices):
        needed = CHOICES[kind][choices[kind]].only_with
        others = {choices[other] for other in _kinds(choices) if other != kind}
        if needed and not others & set(needed):
            named = ", ".join(f"{kind} {value}" for kind, value in choices.items() if kind in ("drafter", "verifier"))
            what = f"decoder '{name}': --{kind} {choices[kind]} cannot be combined with {named}"
            raise SpecbenchError(what, f"it needs {' or '.join(needed)}")


def _check_look_ahead(name: str, choices: Mapping[str, str], values: Mapping[str, object]) -> None:
    """Reject a verifier that looks ahead if a later draft is kept after the step, or if drafts branch."""
    if not _looks_ahead(choices):
        return
    verifier, refine = choices["verifier"], choices["refine"]
    if not DRAFTERS[choices["drafter"]].is_chain(values):
        what = f"decoder '{name}': --verifier {verifier} needs a chain of drafts, but this drafter makes a tree"
        raise SpecbenchError(what, "use --drafter jacobi, or eagle with --tree chain")
    if not CHOICES["refine"][refine].redraws and not values.get(ANY_TAIL):
        raise SpecbenchError(
            f"decoder '{name}': --verifier {verifier} is biased by later drafts, which --refine {refine} keeps",
            f"use --refine {' or '.join(refine for refine, part in CHOICES['refine'].items() if part.redraws)}, or "
            "--any-tail to accept biased images (lossy)",
        )


def _keeps_seen_drafts(choices: Mapping[str, str]) -> bool:
    """Return whether later steps keep drafts that the verifier has looked at, which biases the images."""
    return _looks_ahead(choices) and not CHOICES["refine"][choices["refine"]].redraws


def _looks_ahead(choices: Mapping[str, str]) -> bool:
    return "verifier" in _kinds(choices) and CHOICES["verifier"][choices["verifier"]].looks_ahead


class Published(NamedTuple):
    """A value and the paper or code that states it."""

    value: Any
    source: str


@functools.cache
def _published_entries() -> dict[str, list[dict[str, Any]]]:
    return tomllib.loads(Path(__file__).with_name("published.toml").read_text(encoding="utf-8"))


def published(decoder: str, model: str, kind: str = "options") -> dict[str, Published]:
    """Return published values of a decoder on a model, by the name of the setting. `kind`: "options" (also components),
    which a run uses by default, or "shared", which a run does not use."""
    entries = _published_entries()["entry"]
    here = [entry for entry in entries if decoder in entry["decoders"] and model in entry["models"]]
    return {name: Published(value, entry["source"]) for entry in here for name, value in entry.get(kind, {}).items()}


def printed_acceptances(head: str) -> list[tuple[float, str, str]]:
    """Return published tokens per step of exact decoders with a kind of draft head ("eagle", or "vertical" for heads in
    two dimensions), each with its model and source."""
    entries = [entry for entry in _published_entries()["acceptance"] if entry["head"] == head]
    return [(entry["tokens_per_step"], entry["model"], entry["source"]) for entry in entries]
