"""Importing libraries that name torchvision without torchvision.

torchvision's published wheels fit one build of torch each, and beside another one importing them fails. open_clip only
names its picture transforms, which specbench does not use, so stand-ins that do nothing are enough for the import.
"""

from __future__ import annotations

import importlib.abc
import importlib.machinery
import importlib.util
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from types import ModuleType

_NAME = "torchvision"


class _Placeholder(type):
    def __getattr__(cls, name: str) -> str:
        if name.startswith("__"):
            raise AttributeError(name)
        return name


class _StandIn(ModuleType):
    __path__ = ()

    def __getattr__(self, name: str) -> object:
        if name.startswith("__"):
            raise AttributeError(name)
        return _Placeholder(name, (), {})


class _Finder(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    def find_spec(self, fullname, path=None, target=None):
        ours = fullname.partition(".")[0] == _NAME
        return importlib.machinery.ModuleSpec(fullname, self, is_package=True) if ours else None

    def create_module(self, spec):
        return _StandIn(spec.name)

    def exec_module(self, module):
        pass


@contextmanager
def torchvision_if_it_loads() -> Iterator[bool]:
    """Context in which `import torchvision` works: the real package where it loads (True), else stand-ins that are
    removed afterwards."""
    if torchvision_loads():
        yield True
        return
    from transformers.utils import is_torchvision_available  # seconds, and open_clip imports it too

    is_torchvision_available()  # remembered by transformers, which must not find the stand-ins
    finder = _Finder()
    sys.meta_path.insert(0, finder)
    try:
        yield False
    finally:
        sys.meta_path.remove(finder)
        _forget()


def torchvision_loads() -> bool:
    """Tell whether torchvision is installed and fits this torch."""
    if _NAME not in sys.modules and importlib.util.find_spec(_NAME) is None:
        return False
    try:
        importlib.import_module(_NAME)
    except (ImportError, OSError, RuntimeError):
        _forget()
        return False
    return True


def _forget() -> None:
    for name in [name for name in sys.modules if name.partition(".")[0] == _NAME]:
        del sys.modules[name]
