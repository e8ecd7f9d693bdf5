"""Load a prompt set by name (shipped, public, plug-in) or from a file."""

from __future__ import annotations

from pathlib import Path

from specbench.errors import SpecbenchError, unknown_name
from specbench.prompts import public
from specbench.prompts.prompt_set import PromptSet, build
from specbench.prompts.readers import read_file
from specbench.system import plugins
from specbench.system.package_data import data_folder


def names() -> list[str]:
    """List the prompt sets known by name; public ones must be fetched once."""
    return sorted({*_shipped(), *plugins.plugins("prompts"), *public_names()})


def public_names() -> list[str]:
    """List the public prompt sets of the papers, see `specbench.prompts.public`."""
    return public.names()


def load_prompts(name_or_path: str | Path) -> PromptSet:
    """Load a prompt set by name, or from a file in the format of its suffix.

    Raises:
        SpecbenchError: no such set or file; empty, binary, not UTF-8, malformed, an over-long prompt,
            duplicate ids, or a public set that was not fetched.
    """
    name = str(name_or_path)
    if name in _shipped():
        return build(name, read_file(_shipped()[name]))
    if name in plugins.plugins("prompts"):
        return build(name, read_file(_plugin_path(name)))
    if name in public.names():
        return build(name, public.read(name))
    path = Path(name)
    if not _exists(path):
        if path.suffix or len(path.parts) > 1:
            raise SpecbenchError(f"prompt file '{name}' does not exist", f"or name a set: {', '.join(names())}")
        raise unknown_name("prompt set", name, names())
    return build(name, read_file(path))


def _shipped() -> dict[str, Path]:
    return {path.stem: path for path in sorted(data_folder("prompts").glob("*.jsonl"))}


def _plugin_path(name: str) -> Path:
    found = plugins.load_object(plugins.plugins("prompts")[name].value, f"prompt set {name}")
    return Path(found() if callable(found) else found)


def _exists(path: Path) -> bool:
    try:
        return path.exists()
    except (OSError, ValueError):  # name too long, or with a NUL character
        return False
