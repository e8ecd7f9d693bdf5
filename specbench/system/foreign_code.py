"""Identity of code that is not specbench's: the syntax trees of a plug-in's module and of all user modules that it
imports, and the versions of the packages that it imports.

Two texts are the same code if they differ only in comments, white space and docstrings. Imports are found in the syntax
trees, so that other loaded modules do not matter. The identity is of the text that was imported, which is what runs.
"""

from __future__ import annotations

import ast
import functools
import hashlib
import inspect
import json
import linecache
import os
import re
import sys
import sysconfig
import textwrap
from collections import deque
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass, field
from datetime import UTC, datetime
from importlib import metadata
from pathlib import Path
from types import CodeType, ModuleType
from typing import Any

from specbench.errors import SpecbenchError
from specbench.system.environment import DISTRIBUTION, requirements

_OURS = __name__.partition(".")[0]
_SUFFIXES = (".py", "/__init__.py", ".so", ".abi3.so", sysconfig.get_config_var("EXT_SUFFIX") or ".so")


@dataclass(frozen=True)
class Code:
    """Code of one plug-in, as kept in `run.json`.

    Attributes:
        modules: digest of each module by name, and of each further file.
        packages: versions of the installed packages among the modules, and of the packages that they import, without
        specbench's requirements. edited: time of the last change of a file, UTC; None without a file.
    """

    modules: Mapping[str, str] = field(default_factory=dict)
    packages: Mapping[str, str] = field(default_factory=dict)
    edited: str | None = None

    @property
    def digest(self) -> str:
        return _sha256(json.dumps([dict(self.modules), dict(self.packages)], sort_keys=True))

    def to_json(self) -> dict[str, object]:
        return asdict(self)


@dataclass(frozen=True)
class _Source:
    """Text of a module: its digest, the names that it imports, and its file."""

    digest: str
    imports: tuple[str, ...]
    path: str


_seen: dict[str, tuple[object, _Source]] = {}
"""By name of an imported module: its `__spec__`, which a reload replaces, and its text as first read."""


def code_of(targets: Iterable[str | None], files: Iterable[Path] = ()) -> Code | None:
    """Code behind references "package.module:NAME"; None if all of them are specbench's. Nothing is imported, because
    references from another person's results folder must be compared before their code runs. `files`: data files whose
    content counts as code."""
    if not (foreign := sorted({target for target in targets if target and _top(target) != _OURS})):
        return None
    modules = {f"file {path.name}": _sha256(path.read_bytes()) for path in files if path.is_file()}
    paths, packages, tops = list(map(str, files)), set(), {_top(target) for target in foreign}
    todo, done = [target.partition(":")[0] for target in foreign], set()
    standard = tuple(sysconfig.get_paths()[name] + os.sep for name in ("stdlib", "platstdlib"))
    while todo:
        name = todo.pop()
        done.add(name)
        if (place := _locate(name)) is not None and _installed(place):
            packages.add(_top(name))
        if place is not None and (_top(name) in tops or not (_installed(place) or place.startswith(standard))):
            source = _source(name, place)
            modules[name], paths = source.digest, [*paths, place]
            todo += [imported for imported in source.imports if imported not in done and _top(imported) != _OURS]
    for target in foreign:
        if target.partition(":")[0] not in modules:  # from a notebook or an interactive session
            modules[target] = _in_memory(target)
    times = [os.stat(path).st_mtime for path in paths if os.path.isfile(path)]
    edited = datetime.fromtimestamp(max(times), UTC).isoformat(timespec="seconds") if times else None
    return Code(dict(sorted(modules.items())), dict(_versions(frozenset(packages))), edited)


def refuse_edited(code: Code | None) -> None:
    """Raise an error if files of code were edited after this process imported them: it is unknown which version ran."""
    for name in code.modules if code else ():
        if name in _seen and os.path.isfile(path := _seen[name][1].path) and _read(name, path) != _seen[name][1]:
            what = f"{path} was edited after this process had imported it; the process still runs the old code"
            raise SpecbenchError(what, f"restart Python, or importlib.reload({name})")


def require_code(who: str, planned: str | None, here: Code | None) -> None:
    """Raise an error if a plug-in's code in this process differs from the plan's, for example on another machine."""
    if planned != (here and here.digest):
        what = f"{who}: its code on this worker differs from its code in the process of the command"
        raise SpecbenchError(what, "install the same files and packages on all machines")


def changed_modules(old: Mapping[str, Any], new: Mapping[str, Any]) -> list[str]:
    """Modules, files and packages in which two stored codes (`Code.to_json`) differ."""
    pairs = [(dict(old.get(part) or {}), dict(new.get(part) or {})) for part in ("modules", "packages")]
    return [name for a, b in pairs for name in sorted(a.keys() | b.keys()) if a.get(name) != b.get(name)]


def edited_text(edited: str) -> str:
    """Format `edited` of a code in the local time zone: "edited 26 Nov 14:02"."""
    return f"edited {datetime.fromisoformat(edited).astimezone():%d %b %H:%M}"


def _top(name: str) -> str:
    return name.partition(":")[0].partition(".")[0]


def _installed(path: str) -> bool:
    return not {"site-packages", "dist-packages"}.isdisjoint(Path(path).parts)


def _locate(name: str) -> str | None:
    """File of a module, imported or not; None if it has no file."""
    if (module := sys.modules.get(name)) is not None:
        return os.path.abspath(path) if isinstance(path := getattr(module, "__file__", None), str) else None
    if name in sys.builtin_module_names or _top(name) in sys.stdlib_module_names:
        return None
    parent, _, last = name.rpartition(".")
    candidates = (os.path.join(folder, last) + suffix for folder in _folders(parent) for suffix in _SUFFIXES)
    path = next(filter(os.path.isfile, candidates), None)
    return path and os.path.abspath(path)


def _folders(package: str) -> list[str]:
    """Folders from which modules of a package are imported, "" for top-level modules. A package may have no file."""
    if package in sys.modules or not package:
        places = getattr(sys.modules[package], "__path__", ()) if package else sys.path
        return [folder or os.curdir for folder in places]
    if place := _locate(package):
        return [os.path.dirname(place)] if os.path.basename(place).startswith("__init__.") else []
    parent, _, last = package.rpartition(".")
    return list(filter(os.path.isdir, (os.path.join(folder, last) for folder in _folders(parent))))


def _source(name: str, path: str) -> _Source:
    module = sys.modules.get(name)
    spec = getattr(module, "__spec__", None) or module
    if module is not None and name in _seen and _seen[name][0] is spec:
        return _seen[name][1]
    source = _read(name, path)
    if module is not None:
        _seen[name] = spec, source
    return source


def _read(name: str, path: str) -> _Source:
    if path.endswith((".so", ".pyd", ".pyc")) and os.path.isfile(path):
        return _Source(_sha256(Path(path).read_bytes()), (), path)
    if os.path.isfile(path):
        text: bytes | str = Path(path).read_bytes()
    else:  # in a zip file
        text = "".join(linecache.getlines(path, vars(sys.modules.get(name, ModuleType(name)))))
    try:
        tree = ast.parse(text)
    except (ValueError, SyntaxError, RecursionError):
        return _Source(_sha256(text), (), path)
    package = name if os.path.basename(path) == "__init__.py" else name.rpartition(".")[0]
    return _Source(_sha256("\n".join(_tokens(tree))), tuple(_imports(tree, name, package)), path)


def _tokens(tree: ast.AST) -> Iterator[str]:
    """The nodes of a syntax tree level by level, without positions, docstrings and fields that Python versions add."""
    todo, documented = deque([tree]), ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef
    while todo:
        node = todo.popleft()
        parts = [type(node).__name__]
        for name, value in ast.iter_fields(node):
            if name in ("ctx", "kind", "type_comment", "type_ignores") or value is None or value == []:
                continue
            children = value if isinstance(value, list) else [value]
            if name == "body" and isinstance(node, documented) and ast.get_docstring(node, clean=False) is not None:
                children = children[1:]
            todo += [child for child in children if isinstance(child, ast.AST)]
            parts.append(f"{name}={['*' if isinstance(child, ast.AST) else repr(child) for child in children]}")
        yield " ".join(parts)


def _imports(tree: ast.AST, name: str, package: str) -> Iterator[str]:
    """Names that may be modules: the parent packages, and all names in the import statements of a module."""
    names = [name]
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            names += [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            above = package.split(".")[: len(package.split(".")) - node.level + 1] if node.level else []
            base = ".".join([*above, *filter(None, [node.module])])
            names += [base, *(f"{base}.{alias.name}" for alias in node.names)]
        elif isinstance(node, ast.Call) and ast.unparse(node.func).endswith(("import_module", "__import__")):
            texts = [first.value for first in node.args[:1] if isinstance(first, ast.Constant)]
            names += [f"{package}{text}" if text.startswith(".") else text for text in texts if isinstance(text, str)]
    for imported in dict.fromkeys(map(str, filter(None, names))):
        pieces = imported.split(".")
        yield from (".".join(pieces[: end + 1]) for end in range(len(pieces)))


@functools.cache
def _versions(tops: frozenset[str]) -> dict[str, str]:
    """Distribution and version of installed packages by imported name, without specbench's requirements."""
    if not tops:
        return {}
    needed = {re.split(r"[ ;<>=\[]", line)[0].replace("_", "-").lower() for line in requirements()}
    required = {_OURS, DISTRIBUTION, *needed}
    owners = metadata.packages_distributions()
    names = sorted({owner for top in tops for owner in owners.get(top, ())})
    return {name: metadata.version(name) for name in names if name.replace("_", "-").lower() not in required}


def _in_memory(target: str) -> str:
    """Digest of an object without a file, such as a notebook cell: its source or bytecode, and the objects it names."""
    module, _, names = target.partition(":")
    value = sys.modules.get(module)
    for name in names.split("."):
        value = getattr(value, name, None)
    return _sha256("\n".join(_parts(value, module, set())))


def _parts(value: Any, module: str, seen: set[int]) -> Iterator[str]:
    if id(value) in seen:
        return
    seen.add(id(value))
    value = getattr(value, "__func__", None) or getattr(value, "fget", None) or value
    if isinstance(value, type) and value.__module__ == module:
        for name, part in [*sorted(vars(value).items()), *(("base", base) for base in value.__bases__)]:
            if name not in ("__doc__", "__dict__", "__weakref__", "__firstlineno__", "__static_attributes__"):
                yield name
                yield from _parts(part, module, seen)
    elif isinstance(code := getattr(value, "__code__", None), CodeType) and value.__module__ == module:
        yield repr((value.__defaults__, value.__kwdefaults__))
        source = _source_of(value)
        yield from source
        for part in _nested(code):
            constants = [constant for constant in part.co_consts if not isinstance(constant, CodeType)]
            yield "" if source else repr((part.co_code, constants))
            yield repr(part.co_names)
            for name in part.co_names:
                if name in value.__globals__:
                    yield from _parts(value.__globals__[name], module, seen)
    elif not isinstance(value, type | ModuleType) and " at 0x" not in (text := repr(value)):
        yield text


def _source_of(function: Any) -> list[str]:
    """Tokens of a function's source, which interactive sessions keep; empty without a source."""
    try:
        return [*_tokens(ast.parse(textwrap.dedent(inspect.getsource(function))))]
    except (OSError, TypeError, SyntaxError):
        return []


def _nested(code: CodeType) -> Iterator[CodeType]:
    yield code
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield from _nested(constant)


def _sha256(content: str | bytes) -> str:
    data = content.encode("utf-8", "surrogatepass") if isinstance(content, str) else content
    return hashlib.sha256(data).hexdigest()
