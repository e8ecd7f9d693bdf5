"""SHA-256 of large files, computed once: remembered by what changes with the content, never by a file's name."""

from __future__ import annotations

import json
from contextlib import suppress
from pathlib import Path

from specbench.errors import SpecbenchError
from specbench.system.downloads import cache_folder, digest_of
from specbench.system.files import write_atomically

SMALL = 2**24
"""Bytes up to which remembering costs more than it saves."""


def sha256_of(path: Path) -> str:
    """SHA-256 of a file's content; of a large one from the cache folder where neither its inode nor its times have
    changed since it was computed."""
    key = _state(path)
    if path.stat().st_size <= SMALL:
        return digest_of(path).partition(":")[2]
    if digest := _remembered().get(key):
        return digest
    digest = digest_of(path).partition(":")[2]
    if _state(path) == key:
        with suppress(SpecbenchError, OSError):  # it is computed again then
            write_atomically(_place(), json.dumps(_remembered() | {key: digest}, indent=0).encode())
    return digest


def _state(path: Path) -> str:
    found = path.stat()
    return f"{found.st_dev} {found.st_ino} {found.st_size} {found.st_mtime_ns} {found.st_ctime_ns}"


def _place() -> Path:
    return cache_folder() / "digests.json"


def _remembered() -> dict[str, str]:
    try:
        held = json.loads(_place().read_text())
    except (OSError, ValueError):
        return {}
    return held if isinstance(held, dict) else {}
