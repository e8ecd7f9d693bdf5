"""Decoder presets of installed plug-ins and of user modules."""

from __future__ import annotations

import functools

from specbench.errors import SpecbenchError
from specbench.specs.presets import PRESETS, Preset
from specbench.system.plugins import load_plugin, load_user_object, plugins


@functools.cache
def add_plugin_decoders() -> None:
    """Register the presets of installed plug-ins; built-in names take precedence."""
    for name in plugins("decoders"):
        preset = load_plugin("decoders", name, lambda found: isinstance(found, Preset), "a Preset")
        if preset is not None:
            PRESETS.setdefault(preset.name, preset)


def decoder_name(reference: str) -> str:
    """Name of a decoder for `resolve`; "package.module:NAME" imports and registers that preset first."""
    if ":" not in reference:
        return reference
    preset = load_user_object(reference, "decoder")
    if not isinstance(preset, Preset):
        raise SpecbenchError(f"decoder '{reference}' is a {type(preset).__name__}, not a specbench Preset")
    if PRESETS.setdefault(preset.name, preset) is not preset:
        raise SpecbenchError(f"decoder '{reference}' is called '{preset.name}', a name already taken")
    return preset.name
