"""Resolve the decoders and options of the command line to checked `DecoderSpec`s. Imports no torch."""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import chain
from typing import Any

from specbench.errors import SpecbenchError, read_name
from specbench.runs.settings import RunSettings, decoder_settings
from specbench.specs.components import CHOICES, DRAFTERS
from specbench.specs.options import Options, SettingOrigin, SettingSource, split_list
from specbench.specs.presets import (
    PRESETS,
    DecoderSpec,
    Preset,
    choices_of,
    decoder_name,
    named_ar,
    options_of,
    published,
    resolve,
)
from specbench.system import plugins

BASELINE_PROMPTS = 8  # Prompts of an added AR baseline; the minimum for an interval


@dataclass(frozen=True)
class PlannedDecoder:
    """A decoder of a plan."""

    spec: DecoderSpec  # the decoder to run; with `auto_window`, its window is a placeholder
    auto_window: bool  # whether the window is chosen by measurements after the model is loaded
    origins: Mapping[str, SettingOrigin]  # source of each option or choice, by name
    # with `auto_window`, the windows to measure: all that fit in memory and are not wider than an image
    windows: tuple[int, ...] = ()
    # only for an added baseline: number of first prompts, of which it decodes one image each
    first: int | None = None

    @property
    def chosen(self) -> dict[str, str]:
        """{kind: component} for the components that the user or a paper chose instead of the preset's."""
        return {kind: getattr(self.spec, kind) for kind in CHOICES if kind in self.origins}

    @property
    def widest(self) -> DecoderSpec:
        """The decoder with the widest window to be measured, for the memory estimate."""
        return with_window(self.spec, max(self.windows)) if self.windows else self.spec


def with_window(decoder: DecoderSpec, window: int) -> DecoderSpec:
    return replace(decoder, options=Options(decoder.options | {"window": window}))


def plan_decoders(settings: RunSettings) -> list[PlannedDecoder]:
    """Read decoders such as "gsd:G=50", "window=16", "ar", and apply options that are set by flags. A flag applies to
    every decoder with this option, but to `ar` only if no other decoder has the option. Options that are not given have
    the value published for the decoder on the model, or else the preset's."""
    if not (requests := parse_decoders(settings.decoder)):
        raise SpecbenchError("no decoder given", f"valid: --decoder with one of {', '.join(sorted(PRESETS))}")
    planned: dict[tuple[DecoderSpec, bool], PlannedDecoder] = {}
    for reference, inline in requests:
        decoder = _plan_decoder(reference, inline, settings)
        planned.setdefault((decoder.spec, decoder.auto_window), decoder)
    origins = chain.from_iterable(decoder.origins.items() for decoder in planned.values())
    used = {name for name, origin in origins if origin.source is not SettingSource.INLINE}
    for name in settings.options:
        if name not in used and not any(name in inline for _, inline in requests):
            decoders = [decoder.spec.name for decoder in planned.values()]
            valid = sorted({option for decoder in decoders for option in options_of(PRESETS[decoder])})
            takes = f"options: {', '.join(f'--{option}' for option in valid)}" if valid else "they have no options"
            owners = sorted(owner for owner, preset in PRESETS.items() if name in options_of(preset))
            hint = f"; --{name} belongs to {', '.join(owners)}" if owners else ""
            what = f"--{name}: not an option of the chosen decoders ({', '.join(decoders)})"
            raise SpecbenchError(what, takes + hint)
    return list(planned.values())


def with_ar(decoders: Sequence[PlannedDecoder], settings: RunSettings) -> list[PlannedDecoder]:
    """Return the decoders of a run. If AR is missing, add AR on the first prompts, as baseline of speed-ups."""
    untimed = settings.batch != 1 or settings.mode == "throughput" or settings.workers or settings.ray
    timed = settings.mode == "latency" or not untimed
    prompts = settings.baseline if settings.baseline is not None else BASELINE_PROMPTS * timed
    if not prompts or not all(planned.spec.drafts for planned in decoders):
        return list(decoders)
    return [*decoders, replace(_plan_decoder("ar", {}, RunSettings(model=settings.model)), first=prompts)]


def parse_decoders(pieces: Sequence[str]) -> list[tuple[str, dict[str, str]]]:
    """Parse ["ar", "gsd:G=50", "window=16"] to [("ar", {}), ("gsd", {"G": "50", "window": "16"})]."""
    requests: list[tuple[str, dict[str, str]]] = []
    for piece in pieces:
        head, equals, value = piece.partition("=")
        name, colon, option = head.rpartition(":")
        if not equals and name in PRESETS and option in options_of(PRESETS[name]):
            raise SpecbenchError(f"--decoder {piece}: an option without a value", "write it as in gsd:G=50,window=16")
        if not equals or colon:
            requests.append((decoder_name(name) if equals else piece, {}))
        elif not requests:
            raise SpecbenchError(f"--decoder {piece}: an option without a decoder", "write it as in gsd:G=50,window=16")
        if equals:
            decoder, options = requests[-1]
            run_on = re.search(r":([\w-]+)=", value)
            if run_on and run_on[1] in (setting.name for setting in decoder_settings()):
                meant = run_on[0].replace(":", ",")
                raise SpecbenchError(f"--decoder {piece}: a colon between options", f"use commas: {meant}...")
            if option in options:
                raise SpecbenchError(f"--decoder {piece}: '{decoder}' has two values of {option}", "set it once")
            options[option] = value
    return requests


def labelled_decoders(names: Sequence[str]) -> list[tuple[str, Any]]:
    """Read decoders to audit or check: names with inline options, or a user's "module:Name". Return (label, decoder)
    pairs: labels such as "gsd:G=50", and a `DecoderSpec`, or the reference if it does not name a preset."""
    decoders: list[tuple[str, Any]] = []
    for name, inline in parse_decoders([piece for text in names for piece in split_list(text)]):
        label = ",".join([name, *(f"{key}={value}" for key, value in inline.items())]).replace(",", ":", 1)
        target = plugins.load_user_object(name, "decoder") if ":" in name else None
        if target is not None and not isinstance(target, Preset):
            decoders.append((label, name))
        else:
            decoders.append((label, resolve(decoder_name(name), inline)))
    return decoders


def _plan_decoder(reference: str, inline: Mapping[str, str], settings: RunSettings) -> PlannedDecoder:
    name, asked = decoder_name(reference), settings.options
    preset, stated = PRESETS[read_name("decoder", name, PRESETS)], published(name, settings.model)
    plain = {key: value for key, (value, _) in stated.items()} | dict(asked)
    sources = {key: SettingOrigin(SettingSource.PUBLISHED, place) for key, (_, place) in stated.items()}
    sources |= {key: settings.origins[key] for key in asked}
    chosen = {kind: plain[kind] for kind in _open_choices(preset, inline, plain)} | dict(inline)
    auto_window = chosen.get("window") == "auto" and bool(chosen.pop("window"))
    valid = options_of(preset, choices_of(preset, chosen))
    for option in valid.keys() & asked.keys() & inline.keys():  # the inline value replaces a value that must be valid
        if (option, asked[option]) != ("window", "auto"):
            valid[option].parse(asked[option])
    usual = options_of(preset)
    meant = {  # a published value applies to the preset's component, not to another component's option of the same name
        option for option in valid if option in asked or (option in usual and usual[option].help == valid[option].help)
    }
    options = {option: plain[option] for option in valid if option in meant & plain.keys() - inline.keys()}
    origins = {option: sources[option] for option in [*chosen, *options] if option in plain}
    origins |= dict.fromkeys(inline, SettingOrigin(SettingSource.INLINE))
    if options.get("window") == "auto":
        auto_window = bool(options.pop("window"))
    return PlannedDecoder(resolve(name, chosen | options), auto_window, origins)


def _open_choices(preset: Preset, inline: Mapping[str, str], plain: Mapping[str, Any]) -> list[str]:
    """List the kinds of components that flags may choose for a decoder: the kinds its drafter uses; none for AR."""
    if named_ar(preset.name):
        return []
    drafter = inline.get("drafter") or plain.get("drafter") or preset.choices["drafter"]
    ignored = DRAFTERS[drafter].ignores if drafter in DRAFTERS else ()
    return [kind for kind in CHOICES if kind in plain and kind not in ignored]
