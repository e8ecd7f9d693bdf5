"""Identity of plug-in code: the syntax trees of a plug-in's module and of all user modules that it imports, and the
versions of the packages that it imports.

Two texts are the same code if they differ only in comments, white space and docstrings. Imports are found in the syntax
trees, so that other loaded modules do not matter. A text is read when its module is imported: this version runs.
"""

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
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from datetime import UTC, datetime
from importlib import metadata
from importlib.machinery import ModuleSpec, PathFinder
from pathlib import Path
from types import CodeType, ModuleType
from typing import Any, NamedTuple

from specbench.errors import SpecbenchError
from specbench.system.environment import DISTRIBUTION, requirements

_OURS = __name__.partition(".")[0]


@dataclass(frozen=True)
class Code:
    """Code of one plug-in, as stored in `run.json`.

    Attributes:
        modules: digest of each module, by module name, and of each data file.
        packages: versions of packages that the modules are in or import, except specbench's requirements.
        edited: time of the last change of a file, UTC; None if there are no files.
    """

    modules: Mapping[str, str] = field(default_factory=dict)
    packages: Mapping[str, str] = field(default_factory=dict)
    edited: str | None = None

    @property
    def digest(self) -> str:
        return _sha256(json.dumps([dict(self.modules), dict(self.packages)], sort_keys=True))

    def to_json(self) -> dict[str, object]:
        return asdict(self)


class _Source(NamedTuple):
    """Text of a module: its digest, the names that it imports, and its file."""

    digest: str
    imports: tuple[str, ...]
    path: str


_seen: dict[str, tuple[object, _Source]] = {}
"""{imported module: (its `__spec__`, which a reload replaces, its text when first read)}."""


def code_of(targets: Iterable[str | None], files: Iterable[Path] = ()) -> Code | None:
    """Return the code behind references "package.module:NAME"; None if all references are to specbench. Nothing is
    imported, because the code must be compared before it runs: a reference may come from another person's results
    folder. `files`: data files whose content counts as code."""
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
        if target.partition(":")[0] not in modules:  # object of a notebook or an interactive session
            modules[target] = _in_memory(target)
    times = [os.stat(path).st_mtime for path in paths if os.path.isfile(path)]
    edited = datetime.fromtimestamp(max(times), UTC).isoformat(timespec="seconds") if times else None
    return Code(dict(sorted(modules.items())), dict(_versions(frozenset(packages))), edited)


def refuse_edited(code: Code | None) -> None:
    """Raise an error if code was edited after this process imported it, because it is unknown which version ran."""
    for name in code.modules if code else ():
        if name in _seen and os.path.isfile(path := _seen[name][1].path) and _read(name, path) != _seen[name][1]:
            what = f"{path} was edited after this process had imported it; the process still runs the old code"
            raise SpecbenchError(what, f"restart Python, or importlib.reload({name})")


def require_code(who: str, planned: str | None, here: Code | None) -> None:
    """Raise an error if a plug-in's code here differs from the `planned` code, for example on another machine."""
    if planned != (here and here.digest):
        what = f"{who}: its code on this worker differs from its code in the process of the command"
        raise SpecbenchError(what, "install the same files and packages on all machines")


def changed_modules(old: Mapping[str, Any], new: Mapping[str, Any]) -> list[str]:
    """List modules, files and packages in which two results of `Code.to_json` differ."""
    pairs = [(dict(old.get(part) or {}), dict(new.get(part) or {})) for part in ("modules", "packages")]
    return [name for a, b in pairs for name in sorted(a.keys() | b.keys()) if a.get(name) != b.get(name)]


def edited_text(edited: str) -> str:
    """Format `Code.edited` in the local time zone: "edited 26 Nov 14:02"."""
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
    spec = _spec(name)
    return os.path.abspath(spec.origin) if spec and spec.origin else None


def _spec(name: str) -> ModuleSpec | None:
    """Find a module without importing its packages, which may have no files."""
    package, _, last = name.rpartition(".")
    parent: Any = sys.modules.get(package) or (_spec(package) if package else None)
    folders = getattr(parent, "__path__", None) or getattr(parent, "submodule_search_locations", None) or ()
    return PathFinder.find_spec(last, [*folders] if package else None)


def _source(name: str, path: str) -> _Source:
    if (module := sys.modules.get(name)) is None:
        return _read(name, path)
    spec = getattr(module, "__spec__", None) or module
    if name not in _seen or _seen[name][0] is not spec:
        _seen[name] = spec, _read(name, path)
    return _seen[name][1]


def _read(name: str, path: str) -> _Source:
    if os.path.isfile(path):
        text: bytes | str = Path(path).read_bytes()
    else:  # in a zip file
        text = "".join(linecache.getlines(path, vars(sys.modules.get(name, ModuleType(name)))))
    try:
        tree = ast.parse(text)
    except (ValueError, SyntaxError, RecursionError, MemoryError):  # also of compiled modules
        return _Source(_sha256(text), (), path)
    package = name if os.path.basename(path) == "__init__.py" else name.rpartition(".")[0]
    return _Source(_sha256("\n".join(_tokens(tree))), tuple(_imports(tree, name, package)), path)


def _tokens(tree: ast.AST) -> Iterator[str]:
    """Yield the nodes of a syntax tree level by level, without positions, docstrings and fields of newer Pythons."""
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
    """Yield names that may be modules: a module's parent packages, and all names in its import statements."""
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
    """Return the versions of the distributions that contain the imported packages, without specbench's requirements."""
    if not tops:
        return {}
    needed = {re.split(r"[ ;<>=\[]", line)[0].replace("_", "-").lower() for line in requirements()}
    required = {_OURS, DISTRIBUTION, *needed}
    owners = metadata.packages_distributions()
    names = sorted({owner for top in tops for owner in owners.get(top, ())})
    return {name: metadata.version(name) for name in names if name.replace("_", "-").lower() not in required}


def _in_memory(target: str) -> str:
    """Digest an object without a file, as in a notebook: its source or bytecode, and the objects that it refers to."""
    module, _, names = target.partition(":")
    value = functools.reduce(lambda part, name: getattr(part, name, None), names.split("."), sys.modules.get(module))
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
        source: list[str] = []
        with suppress(OSError, TypeError, SyntaxError):  # interactive sessions may keep the source
            source += _tokens(ast.parse(textwrap.dedent(inspect.getsource(value))))
        yield from source
        codes = [code]
        while codes:
            part = codes.pop(0)
            constants = [constant for constant in part.co_consts if not isinstance(constant, CodeType)]
            codes[:0] = [constant for constant in part.co_consts if isinstance(constant, CodeType)]
            yield "" if source else repr((part.co_code, constants))
            yield repr(part.co_names)
            for name in part.co_names:
                if name in value.__globals__:
                    yield from _parts(value.__globals__[name], module, seen)
    elif not isinstance(value, type | ModuleType) and " at 0x" not in (text := repr(value)):
        yield text


def _sha256(content: str | bytes) -> str:
    data = content.encode("utf-8", "surrogatepass") if isinstance(content, str) else content
    return hashlib.sha256(data).hexdigest()
