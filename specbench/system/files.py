"""Atomic file writes, and locks between processes.

File systems of the network or of user space may lack locks or the syncing of folders; work goes on there, after one
warning per process that says what is not guaranteed.
"""

from __future__ import annotations

import errno
import fcntl
import os
from contextlib import suppress
from pathlib import Path

from specbench.errors import FAILURE, SpecbenchError
from specbench.system.console import warn

_LACKING = {errno.ENOLCK, errno.EOPNOTSUPP, errno.ENOTSUP, errno.ENOSYS, errno.EINVAL}
"""What a file system answers that does not know a call; everything else is a failure of the call."""
_FRESH = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
_warned = False


def write_atomically(path: Path, data: bytes) -> None:
    """Write `data` to `path` atomically and sync it to disk; creates the folder.

    Raises:
        SpecbenchError: the file cannot be written, for example because the disk is full; no partial file remains.
    """
    aside = path.with_name(f".{path.name[:200]}.tmp")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        aside.unlink(missing_ok=True)  # of a killed writer, or a link that somebody planted
        try:
            with open(aside, "wb", opener=_open_fresh) as file:
                file.write(data)
                file.flush()
                _sync(file.fileno(), path.parent)
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


def _open_fresh(path: str, _flags: int) -> int:
    return os.open(path, _FRESH, 0o666)


def sync_folder(folder: Path) -> None:
    """Sync a folder to disk, so that renames and removals in it survive a power failure."""
    handle = os.open(folder, os.O_RDONLY)
    try:
        _sync(handle, folder)
    finally:
        os.close(handle)


def _sync(handle: int, folder: Path) -> None:
    try:
        os.fsync(handle)
    except OSError as error:
        if error.errno not in _LACKING:
            raise
        _warn(folder, "the last results may be lost in a power failure")


def take_lock(path: Path, busy: str) -> int:
    """Lock the file `path` for as long as the returned handle is open.

    Raises:
        SpecbenchError: another process holds the lock; the message is `busy`.
    """
    while True:
        handle = os.open(
            path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_NONBLOCK, 0o644
        )  # a pipe is not waited for
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            owner = _owner(handle)
            os.close(handle)
            raise SpecbenchError(f"{busy}{f' ({owner})' if owner else ''}", "wait until it is done") from None
        except OSError as error:
            if error.errno not in _LACKING:
                os.close(handle)
                raise
            power = [] if _syncs(path.parent) else ["the last results may be lost in a power failure"]
            _warn(path.parent, "two commands that write here at once are not kept apart", *power)
        if path.exists() and os.path.samestat(os.fstat(handle), path.stat()):
            break
        os.close(handle)  # the previous owner removed the file between open and lock
    with suppress(OSError):  # the owner's number only helps people
        os.ftruncate(handle, 0)
        os.write(handle, f"pid {os.getpid()}".encode())
    return handle


def _owner(handle: int) -> str:
    try:
        return os.read(handle, 32).decode(errors="replace").strip()
    except OSError:
        return ""


def _syncs(folder: Path) -> bool:
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    except OSError:
        return False
    finally:
        os.close(handle)
    return True


def _warn(folder: Path, *missing: str) -> None:
    global _warned
    if not _warned:
        _warned = True
        warn(f"the file system of {folder} lacks file locks or syncing: {', and '.join(missing)}")
