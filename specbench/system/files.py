"""Atomic file writes, and locks between processes."""

from __future__ import annotations

import fcntl
import os
from pathlib import Path

from specbench.errors import FAILURE, SpecbenchError


def write_atomically(path: Path, data: bytes) -> None:
    """Write `data` to `path` atomically and sync it to disk; creates the folder.

    Raises:
        SpecbenchError: the file cannot be written, for example because the disk is full; no partial file remains.
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
            "earlier results are complete; free some space and run the same command again to resume",
            FAILURE,
        ) from error


def sync_folder(folder: Path) -> None:
    """Sync a folder to disk, so that renames and removals in it survive a power failure."""
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def take_lock(path: Path, busy: str) -> int:
    """Lock the file `path` for as long as the returned handle is open.

    Raises:
        SpecbenchError: another process holds the lock; the message is `busy`.
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
        os.close(handle)  # the previous owner removed the file between open and lock
    os.ftruncate(handle, 0)
    os.write(handle, f"pid {os.getpid()}".encode())
    return handle
