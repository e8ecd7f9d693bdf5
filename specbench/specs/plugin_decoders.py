"""Decoders of installed plug-ins and of a user's own modules, put beside the built-in presets."""

from __future__ import annotations

import functools

from specbench.errors import SpecbenchError
from specbench.specs.presets import PRESETS, Preset
from specbench.system.plugins import load_plugin, load_user_object, plugins


@functools.cache
def add_plugin_decoders() -> None:
    """Put the presets of installed plug-ins beside the built-in ones. A built-in name always wins."""
    for name in plugins("decoders"):
        preset = load_plugin("decoders", name, lambda found: isinstance(found, Preset), "a Preset")
        if preset is not None:
            PRESETS.setdefault(preset.name, preset)


def decoder_name(reference: str) -> str:
    """A decoder's name as `resolve` knows it; "package.module:NAME" first imports and adds that preset."""
    if ":" not in reference:
        return reference
    preset = load_user_object(reference, "decoder")
    if not isinstance(preset, Preset):
        raise SpecbenchError(f"decoder '{reference}' is a {type(preset).__name__}, not a specbench Preset")
    if PRESETS.setdefault(preset.name, preset) is not preset:
        raise SpecbenchError(f"decoder '{reference}' is called '{preset.name}', a name already taken")
    return preset.name
