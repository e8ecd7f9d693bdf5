"""Files that are whole or absent, and locks between processes."""

from __future__ import annotations

import fcntl
import os
from pathlib import Path

from specbench.errors import FAILURE, SpecbenchError


def write_atomically(path: Path, data: bytes) -> None:
    """Write `data` so that `path` is either absent (or its old self) or complete and on disk; makes its folder.

    Raises:
        SpecbenchError: the disk refused, for example because it is full; nothing is left behind.
    """
    aside = path.with_name(f".{path.name[:200]}.tmp")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        try:
            with open(aside, "wb") as file:
                file.write(data)
                file.flush()
                os.fsync(file.fileno())
            os.replace(aside, path)
        except OSError:
            aside.unlink(missing_ok=True)
            raise
        sync_folder(path.parent)
    except OSError as error:
        raise SpecbenchError(
            f"cannot write {path}: {error.strerror}",
            "what was written before is complete; make room and run the same command again to resume",
            FAILURE,
        ) from error


def sync_folder(folder: Path) -> None:
    """Make renames and removals in `folder` survive a power cut."""
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def take_lock(path: Path, busy: str) -> int:
    """Lock the file `path` for as long as the returned handle stays open or this process lives.

    Raises:
        SpecbenchError: another process holds it; `busy` says what that means.
    """
    while True:
        handle = os.open(path, os.O_RDWR | os.O_CREAT, 0o644)
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            owner = os.read(handle, 32).decode(errors="replace").strip()
            os.close(handle)
            raise SpecbenchError(f"{busy}{f' ({owner})' if owner else ''}", "wait until it is done") from None
        if path.exists() and os.path.samestat(os.fstat(handle), path.stat()):
            break
        os.close(handle)  # its owner took the file away between our opening and locking it
    os.ftruncate(handle, 0)
    os.write(handle, f"pid {os.getpid()}".encode())
    return handle
