"""Names to code, without importing the code: the built-in tables, and what installed plug-ins add.

A plug-in is any installed package with an entry point in `specbench.decoders`, `specbench.models`,
`specbench.metrics` or `specbench.prompts`. A decoder entry point is a `Preset`, a model's a `ModelInfo`, a
metric's its class, and a prompt set's the path of its file or a function returning it. A broken plug-in is
named in a warning and left out.
"""

from __future__ import annotations

import functools
import importlib
import os
import sys
import warnings
from collections.abc import Callable
from importlib.metadata import EntryPoint, entry_points

from specbench.decoding.presets import PRESETS, Preset
from specbench.errors import SpecbenchError, unknown_name

KINDS = ("decoders", "models", "metrics", "prompts")

METRICS: dict[str, tuple[str, str]] = {
    "shapes-detector": (
        "specbench.metrics.shapes_detector:ShapesDetector",
        "share of images that satisfy their caption, mean over categories (prompts of the shapes world)",
    )
}
"""Metric name to "module:attribute" of its class, and one line for `list metrics`."""


class PluginWarning(UserWarning):
    """A plug-in could not be used; the tool goes on without it."""


def load_object(target: str, kind: str = "object") -> object:
    """Import "package.module:name".

    Raises:
        SpecbenchError: the module or the name does not exist, or importing it fails.
    """
    module_name, _, attribute = target.partition(":")
    try:
        return functools.reduce(getattr, attribute.split("."), importlib.import_module(module_name))
    except SpecbenchError:
        raise
    except AttributeError:
        raise SpecbenchError(f"{kind} '{target}': module '{module_name}' has no '{attribute}'") from None
    except Exception as error:  # importing runs a stranger's code, which may fail in any way
        if isinstance(error, ModuleNotFoundError) and error.name:
            what = f"{kind} '{target}': no module named '{error.name}'"
            raise SpecbenchError(what, "is it installed in this environment?") from None
        what = f"{kind} '{target}' cannot be imported: {type(error).__name__}: {error}"
        raise SpecbenchError(what, "'specbench doctor' looks for the cause") from error


def plugins(kind: str) -> dict[str, EntryPoint]:
    """Entry points of installed plug-ins of one kind, by name; nothing is imported."""
    return {point.name: point for point in _entry_points(kind)}


@functools.cache
def _entry_points(kind: str) -> tuple[EntryPoint, ...]:
    return tuple(entry_points(group=f"specbench.{kind}"))


def load_plugin(kind: str, name: str, check: Callable[[object], bool], wanted: str) -> object | None:
    """The object behind one entry point, or None with a `PluginWarning` when it is broken or not a `wanted`."""
    point = plugins(kind)[name]
    try:
        found = load_object(point.value, f"plug-in {name}")
    except SpecbenchError as error:
        warnings.warn(f"{error.what}; left out", PluginWarning, stacklevel=2)
        return None
    if not check(found):
        warnings.warn(f"plug-in {name} ({point.value}) is not {wanted}; left out", PluginWarning, stacklevel=2)
        return None
    return found


@functools.cache
def add_plugin_decoders() -> None:
    """Put the presets of installed plug-ins beside the built-in ones. A built-in name always wins."""
    for name in plugins("decoders"):
        preset = load_plugin("decoders", name, lambda found: isinstance(found, Preset), "a Preset")
        if preset is not None:
            PRESETS.setdefault(preset.name, preset)


def load_user_object(reference: str, kind: str) -> object:
    """Like `load_object`, for a reference typed by a user: modules in the current folder are found too."""
    if "" not in sys.path and os.getcwd() not in sys.path:
        sys.path.insert(0, os.getcwd())
    return load_object(reference, kind)


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


def metric_names() -> list[str]:
    return sorted({*METRICS, *plugins("metrics")})


def metric(name: str) -> object:
    """The class of a metric, see `specbench.metrics.base.Metric`.

    Raises:
        SpecbenchError: unknown name, or its code cannot be imported.
    """
    if name in METRICS:
        return load_object(METRICS[name][0], f"metric {name}")
    if name in plugins("metrics"):
        return load_object(plugins("metrics")[name].value, f"metric {name}")
    raise unknown_name("metric", name, metric_names())
