"""Plug-ins: entry points of installed packages, and imports by reference.

A plug-in is any installed package with an entry point in `specbench.decoders`, `specbench.models`,
`specbench.metrics` or `specbench.prompts`. The entry point is a `Preset` for a decoder, a `ModelInfo` for a model, a
subclass of `specbench.metrics.base.Metric` for a metric, and for a prompt set the path of its file or a function that
returns the path. A broken plug-in is skipped with a warning. Without an installation, the same objects can be named as
"package.module:NAME".
"""

import functools
import importlib
import os
import re
import sys
import traceback
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from importlib.metadata import EntryPoint, entry_points
from typing import Any

from specbench.errors import PARTIAL, SpecbenchError
from specbench.system.console import one_line

_NAME = re.compile(r"\w[\w.+ \[\]-]{0,99}")
PLUGIN_KINDS = ("decoders", "models", "metrics", "prompts")
_loaded: set[str] = set()  # Top-level packages of the loaded plug-ins


class PluginWarning(UserWarning):
    """A plug-in could not be loaded and is skipped."""


class PluginError(SpecbenchError):
    """Failure of plug-in code. `who`: kind and name of the plug-in, as in "metric 'mine'"; `owner`: only its name."""

    def __init__(self, who: str, error: BaseException, owner: str = ""):
        where = f" ({place})" if (place := foreign_place(error)) else ""
        error_text = ": ".join(filter(None, (type(error).__name__, one_line(str(error), 200))))
        what = "ended the program" if isinstance(error, SystemExit) else f"raised {error_text}"
        super().__init__(f"{who}{where} {what}", "the error is in the plug-in; fix it there", PARTIAL)
        self.owner = owner

    def __reduce__(self) -> tuple[type[SpecbenchError], tuple[str, str, int]]:
        return SpecbenchError, (self.what, self.try_this, self.exit_code)


def foreign_place(error: BaseException) -> str | None:
    """Return the last line of plug-in code in an error's traceback, "mine.py:12"; None if there is none."""
    place = None
    for frame, line in traceback.walk_tb(error.__traceback__):
        if str(frame.f_globals.get("__name__")).partition(".")[0] in _loaded:
            place = f"{os.path.basename(frame.f_code.co_filename)}:{line}"
    return place


@contextmanager
def naming_plugin(kind: str, owner: str, module: str) -> Iterator[None]:
    """Convert errors of the block to a PluginError that names `owner`, unless `module` belongs to specbench.
    SpecbenchError and Ctrl-C are not converted."""
    try:
        yield
    except (SpecbenchError, KeyboardInterrupt):
        raise
    except BaseException as error:
        if _is_ours(module):
            raise
        raise PluginError(f"{kind} '{owner}'", error, owner) from error


def _is_ours(module: str) -> bool:
    return module.partition(".")[0] == __name__.partition(".")[0]


def load_object(target: str, kind: str = "object") -> Any:
    """Import "package.module:name"."""
    module_name, _, attribute = target.partition(":")
    if not _is_ours(module_name):
        _loaded.add(module_name.partition(".")[0])
    try:
        return functools.reduce(getattr, attribute.split("."), importlib.import_module(module_name))
    except SpecbenchError:
        raise
    except AttributeError:
        raise SpecbenchError(f"{kind} '{target}': module '{module_name}' has no '{attribute}'") from None
    except (Exception, SystemExit) as error:  # third-party code may raise any error on import
        if isinstance(error, ModuleNotFoundError) and error.name:
            what = f"{kind} '{target}': no module named '{error.name}'"
            itself = error.name == module_name.partition(".")[0]
            advice = f"there is no {error.name}.py in this folder" if itself else "install it in this environment"
            raise SpecbenchError(what, advice) from None
        what = f"{kind} '{target}' cannot be imported: {type(error).__name__}: {error}"
        raise SpecbenchError(what, "see: specbench doctor") from error


@functools.cache
def plugins(kind: str) -> Mapping[str, EntryPoint]:
    """List the entry points of installed plug-ins of one kind, by name, without importing them."""
    return {point.name: point for point in entry_points(group=f"specbench.{kind}")}


def load_plugin(kind: str, name: str, check: Callable[[object], bool], expected: str) -> Any:
    """Load the object of an entry point; None, after a `PluginWarning`, if it is broken or `check` rejects it."""
    point = plugins(kind)[name]
    try:
        loaded = load_object(point.value, f"plug-in {name}")
    except SpecbenchError as error:
        warnings.warn(f"{error.what}; left out", PluginWarning, stacklevel=2)
        return None
    if not check(loaded):
        warnings.warn(f"plug-in {name} ({point.value}) is not {expected}; left out", PluginWarning, stacklevel=2)
        return None
    return loaded


def load_user_object(reference: str, kind: str) -> object:
    """Import a reference typed by a user. Unlike `load_object`, it also finds modules in the current folder."""
    search_current_folder()
    return load_object(reference, kind)


def search_current_folder() -> None:
    if "" not in sys.path and os.getcwd() not in sys.path:
        sys.path.insert(0, os.getcwd())


def path_component(name: object) -> bool:
    """Return whether a plug-in's name can be a file name on every system."""
    return isinstance(name, str) and _NAME.fullmatch(name) is not None


def is_reference(name: str) -> bool:
    """Return whether a name has the form of a reference, "package.module:NAME"."""
    return re.fullmatch(r"[^\W\d][\w.]*:[^\W\d][\w.]*", name) is not None
