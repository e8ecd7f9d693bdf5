"""Digests of files, and small JSON files in this machine's cache folder. Imports no torch."""

import functools
import hashlib
import json
import os
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from specbench.errors import SpecbenchError

# Imports inside functions: specbench.system.files imports rich, which only writing needs.

_DIGESTS = "digests.json"
_SMALL_BYTES = 2**24  # For files up to this size, caching a digest costs more than it saves
_LARGE_BYTES = 2**30  # From this size on, users notice the time of a digest


def digest_of(path: Path, kind: str = "sha256") -> str:
    """Compute the digest of a file as "kind:hex". `kind`: an algorithm of hashlib, or "git" for git's id of a blob."""
    with path.open("rb") as file:
        if kind == "git":
            header = b"blob %d\0" % os.fstat(file.fileno()).st_size
            return f"git:{hashlib.file_digest(file, lambda: hashlib.sha1(header)).hexdigest()}"
        return f"{kind}:{hashlib.file_digest(file, kind).hexdigest()}"


def sha256_of(path: Path) -> str:
    """Return the SHA-256 of a file's content. The digests of large files are cached in the cache folder.

    The cache key contains the file's inode and times, which change with the content, but not the file's name.
    """
    from specbench.system.console import say

    key = _file_state(path)
    if path.stat().st_size <= _SMALL_BYTES:
        return digest_of(path).partition(":")[2]
    if digest := remembered(_DIGESTS).get(key):
        return digest
    if path.stat().st_size >= _LARGE_BYTES:
        say(f"computing the digest of {path} ({path.stat().st_size / 1e9:.1f} GB), once on this machine")
    digest = digest_of(path).partition(":")[2]
    if _file_state(path) == key:
        with suppress(SpecbenchError, OSError):  # if not stored, the next call computes the digest again
            remember(_DIGESTS, {key: digest})
    return digest


@functools.cache
def own_code() -> str:
    """Digest of specbench's own files."""
    digest, folder = hashlib.sha256(), Path(__file__).parents[1]
    for path in sorted(path for kind in ("py", "toml", "json") for path in folder.rglob(f"*.{kind}")):
        digest.update(path.read_bytes())
    return digest.hexdigest()


def _file_state(path: Path) -> str:
    status = path.stat()
    return f"{status.st_dev} {status.st_ino} {status.st_size} {status.st_mtime_ns} {status.st_ctime_ns}"


def cache_folder() -> Path:
    """Return the cache folder: SPECBENCH_CACHE if set, else `specbench` in the user's cache folder."""
    from specbench.system.surroundings import settle_home

    if named := os.environ.get("SPECBENCH_CACHE"):
        return Path(os.path.expanduser(named))
    settle_home()
    named = os.environ.get("XDG_CACHE_HOME", "")
    return Path(named if named.startswith("/") else Path.home() / ".cache") / "specbench"


def remembered(name: str) -> dict[str, Any]:
    """Read the JSON object in the file `name` of the cache folder; empty if it cannot be read."""
    try:
        content = json.loads((cache_folder() / name).read_text())
    except (OSError, ValueError):
        return {}
    return content if isinstance(content, dict) else {}


def remember(name: str, entries: Mapping[str, object]) -> None:
    """Add `entries` to the object that `remembered` returns; raise a SpecbenchError if the cache is not writable."""
    from specbench.system.files import write_atomically

    write_atomically(cache_folder() / name, json.dumps({**remembered(name), **entries}, indent=1).encode())
