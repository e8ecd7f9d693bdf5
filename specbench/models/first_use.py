"""Trust on first use: the commit at which a hub repository was first downloaded, and the digests of its files.

A repository of which this project knows no commit is taken at the newest commit of `main` when it is first needed. From
then on this machine uses that commit: `first-use.toml` in the cache folder keeps it, with the SHA-256 of every file
that was used, for people to read. A file that differs later is refused; where `main` has moved on, one line says so.
"""

from __future__ import annotations

import json
import os
import time
import tomllib
from collections.abc import Iterable
from pathlib import Path

from specbench.errors import MISSING_PREREQUISITE, SpecbenchError
from specbench.system import console
from specbench.system.digests import cache_folder, sha256_of
from specbench.system.downloads import is_on
from specbench.system.files import lock_when_free, write_atomically

PINNED_ONLY = "SPECBENCH_PINNED_ONLY"
"""Environment variable that forbids downloads at a commit that neither this project nor the user has named."""
_HEADER = """\
# Commits of Hugging Face repositories at their first use on this machine, and SHA-256 of the files, kept by specbench.
# Remove a repository's tables to take its newest commit at the next use.
"""
_ASKED_S = 3.0
"""How long to wait for the hub to say where `main` is now."""


def is_pinned_only() -> bool:
    return is_on(PINNED_ONLY)


def kept_file() -> Path:
    return cache_folder() / "first-use.toml"


def kept_commit(repo: str) -> str | None:
    """Commit of a repository at its first use here; None before it."""
    return _kept().get(repo, {}).get("commit")


def keep(repo: str, commit: str, root: Path, paths: Iterable[Path]) -> None:
    """Keep the commit of a first use, or compare later uses with it.

    Args:
        root: folder of the commit's files.
        paths: the files that are used.

    Raises:
        SpecbenchError: exit code 5 for a file that differs from its first use.
    """
    digests = {path.relative_to(root).as_posix(): sha256_of(path) for path in paths}
    known = _kept().get(repo, {"commit": commit, "files": {}})
    if known["commit"] != commit:
        return
    for name, digest in digests.items():
        if known["files"].get(name, digest) != digest:
            raise SpecbenchError(
                f"{repo}: {name} differs from its first use here",
                f"to download it again: rm '{(root / name).resolve()}'",
                MISSING_PREREQUISITE,
            )
    if digests.keys() <= known["files"].keys():
        return
    try:
        kept_file().parent.mkdir(parents=True, exist_ok=True)
        lock = lock_when_free(kept_file().with_suffix(".lock"), "")
        try:
            held = _kept()
            today = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())
            entry = held.setdefault(repo, {"commit": commit, "first_used": today, "files": {}})
            if entry["commit"] == commit:
                entry["files"] |= digests
                write_atomically(kept_file(), _toml(held).encode())
        finally:
            os.close(lock)
    except (OSError, SpecbenchError) as error:  # a cache that cannot be written stops nobody
        console.warn(f"the first use of {repo} cannot be kept: {error}")


def say_moved(repo: str, commit: str) -> None:
    """Say so where `main` of a repository is no longer at the commit of its first use; nothing where nobody answers."""
    from huggingface_hub import HfApi  # slow to import: not for `list models`

    try:
        newest = HfApi().model_info(repo, timeout=_ASKED_S).sha
    except Exception:  # no network, a hub that is down, a repository that is gone: nothing to say
        return
    if newest != commit:
        at, now = commit[:12], newest[:12]
        console.say(f"{repo}: used at {at}, its first use here; main is at {now} now (--revision main)")


def _kept() -> dict[str, dict]:
    try:
        held = tomllib.loads(kept_file().read_text(encoding="utf-8"))
        if not all(isinstance(one, dict) and isinstance(one.get("files"), dict) for one in held.values()):
            raise ValueError("a repository without its table of files")
        return held
    except (FileNotFoundError, NotADirectoryError):
        return {}
    except (OSError, ValueError) as error:
        raise SpecbenchError(
            f"{kept_file()} cannot be read: {error}", "mend or delete it", MISSING_PREREQUISITE
        ) from None


def _toml(held: dict[str, dict]) -> str:
    tables = []
    for repo, entry in sorted(held.items()):
        values = "".join(f"{name} = {json.dumps(entry[name])}\n" for name in ("commit", "first_used"))
        files = "".join(
            f"{json.dumps(name)} = {json.dumps(digest)}\n" for name, digest in sorted(entry["files"].items())
        )
        tables.append(f"\n[{json.dumps(repo)}]\n{values}[{json.dumps(repo)}.files]\n{files}")
    return _HEADER + "".join(tables)
