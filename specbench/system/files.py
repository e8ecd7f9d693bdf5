"""Files on disk: atomic writes, locks between processes, reads of foreign or damaged files, and where data files lie.

File systems of the network or of user space may lack locks or the syncing of folders; work goes on there, after a
warning, once per process, that says what is not guaranteed.
"""

from __future__ import annotations

import codecs
import errno
import fcntl
import os
import shutil
import stat
import sys
import time
import uuid
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from fnmatch import fnmatchcase
from pathlib import Path

from specbench.errors import BAD_INPUT, FAILURE, SpecbenchError
from specbench.system.console import one_line, say, warn

PACKAGE = Path(__file__).parents[1]
_LACKING = {errno.ENOLCK, errno.EOPNOTSUPP, errno.ENOTSUP, errno.ENOSYS, errno.EINVAL}
"""Errors of a file system that does not support a call; every other error is a failure of the call."""
FULL = {errno.ENOSPC, errno.EDQUOT}  # Errors of a full disk, or of a quota that is used up
MAX_NAME_BYTES = 255  # Of a file or folder, by the file systems of Linux
STDOUT = ("-", "/dev/stdout")  # Paths of output that mean stdout
_FRESH = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
_PROBE = os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC  # opening a pipe must not wait for a writer
_MARKS = {
    codecs.BOM_UTF8: "utf-8-sig",
    codecs.BOM_UTF32_LE: "utf-32",  # begins as UTF-16's does
    codecs.BOM_UTF32_BE: "utf-32",
    codecs.BOM_UTF16_LE: "utf-16",
    codecs.BOM_UTF16_BE: "utf-16",
}
_warned: set[str] = set()  # What was said to be missing


def write_atomically(path: Path, data: bytes) -> None:
    """Write `data` to `path` atomically and sync it to disk; creates the folder, and replaces a symbolic link. Of
    several writers at once the last one to finish wins, and nobody reads a part; a failed write leaves none."""
    aside = _hidden(path, f"{uuid.uuid4().hex}.tmp")  # no other writer's
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        try:
            with open(aside, "wb", opener=lambda name, _: os.open(name, _FRESH, 0o666)) as file:
                file.write(data)
                file.flush()
                _sync(file.fileno(), path.parent)
            os.replace(aside, path)
        except OSError:
            aside.unlink(missing_ok=True)
            raise
        sync_folder(path.parent)
    except OSError as error:
        helps = "free some space and " if error.errno in FULL else ""
        raise SpecbenchError(
            f"cannot write {path}: {error.strerror}",
            f"earlier results are complete; {helps}run the same command again to resume",
            FAILURE,
        ) from error


def write_output(path: Path, data: bytes) -> None:
    """Write `data` to the user's path: atomically to a file, also through a symbolic link; directly into a device, a
    pipe or a mounted file; for "-" to stdout. A SpecbenchError if it cannot be written."""
    if str(path) in STDOUT:  # opened by its name, a redirected stdout would be cut and overwritten
        sys.stdout.flush()
        sys.stdout.buffer.write(data)
        return
    place = Path(os.path.realpath(path))
    if place.is_file() or not os.path.lexists(place):  # links in a circle are there, and cannot be opened
        try:
            return write_atomically(place, data)
        except SpecbenchError as error:  # a mounted file cannot be replaced by another
            if error.__cause__.errno != errno.EBUSY:
                raise
    try:
        with open(path, "wb") as file:
            file.write(data)
    except OSError as error:
        raise SpecbenchError(f"cannot write {path}: {error.strerror}", exit_code=FAILURE) from error


def sync_folder(folder: Path) -> None:
    """Sync a folder to disk, so that renames and removals in it survive a power failure."""
    handle = os.open(folder, os.O_RDONLY)
    try:
        _sync(handle, folder)
    finally:
        os.close(handle)


def take_lock(path: Path, busy: str, advice: str = "wait until it is done") -> int:
    """Lock the file `path` for as long as the returned handle is open; a SpecbenchError, `busy` with `advice`, if
    another process holds the lock."""
    while True:
        # The umask decides who else may lock: folders are shared by groups.
        handle = os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW, 0o666)
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            owner = ""
            with suppress(OSError):  # it only helps people
                owner = os.read(handle, 32).decode(errors="replace").strip()
            os.close(handle)
            raise SpecbenchError(f"{busy}{f' ({owner})' if owner else ''}", advice) from None
        except OSError as error:
            if error.errno not in _LACKING:
                os.close(handle)
                raise
            _warn(path.parent, "file locks: two commands that write here at once are not kept apart")
        if path.exists() and os.path.samestat(os.fstat(handle), path.stat()):
            break
        os.close(handle)  # the previous owner removed the file between open and lock
    with suppress(OSError):  # the owner's number only helps people
        os.ftruncate(handle, 0)
        os.write(handle, f"pid {os.getpid()}".encode())
    return handle


@contextmanager
def replacing(place: Path, busy: str) -> Iterator[Path]:
    """A path that becomes `place` at the end, for one writer at a time; other writers get the error `busy`. Its name is
    fixed, so that a file or folder left by a killed process is found and removed."""
    aside, lock_path = _hidden(place, "tmp"), _hidden(place, "lock")
    lock = take_lock(lock_path, busy)
    try:
        _remove(aside)
        yield aside
        os.replace(aside, place)
    finally:
        _remove(aside)
        lock_path.unlink(missing_ok=True)
        os.close(lock)


def _hidden(path: Path, ending: str) -> Path:
    """The path of a file next to `path` while `path` is written; its name is short enough if `path`'s name is."""
    name = path.name.encode(errors="ignore")[:160].decode(errors="ignore")
    return path.with_name(f".{name}.{ending}")


def _remove(path: Path) -> None:
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path, ignore_errors=True)
    else:
        path.unlink(missing_ok=True)


def lock_when_free(path: Path, name: str) -> int:
    """Lock a file, after the process that holds it is done; `name` is what to say it waits for, nothing if empty."""
    while True:
        try:
            return take_lock(path, "")
        except SpecbenchError:
            if name:
                say(f"{name} is being downloaded by another process; waiting for it")
            name = ""
            time.sleep(0.5)


def read_regular(path: Path, limit: int, inside: Path | None = None) -> bytes:
    """All bytes of a regular file of at most `limit` bytes; a pipe or a device is refused instead of waited for.
    `inside`: folder that no symbolic link may leave; None allows links anywhere."""
    # realpath and not Path.resolve, which raises a RuntimeError at links that lead in a circle.
    place = Path(os.path.realpath(path)) if inside is not None else path
    if inside is not None and not place.is_relative_to(os.path.realpath(inside)):
        raise SpecbenchError(f"{path} is a link that leads out of {inside}", "put the file itself there")
    check_regular(place)
    with open(os.open(place, _PROBE), "rb") as file:
        if os.fstat(file.fileno()).st_size > limit or len(data := file.read(limit + 1)) > limit:
            raise SpecbenchError(f"{path} is larger than {limit:,} bytes")
    return data


def check_regular(path: Path) -> None:
    """Refuse a pipe or a device, which would be waited for; an OSError if it cannot be examined."""
    if not stat.S_ISREG(os.stat(path).st_mode):
        raise SpecbenchError(f"{path} is not a regular file")


def text_of(data: bytes) -> str:
    """Text of a file: UTF-8, or what its byte-order mark says, as programs on Windows write it; else a
    UnicodeDecodeError."""
    marked = (encoding for mark, encoding in _MARKS.items() if data.startswith(mark) and data != mark)
    return data.decode(next(marked, "utf-8"))


def files_named(folder: Path, pattern: str) -> list[Path]:
    """Paths in `folder` whose names match `pattern`, sorted; empty if there is no such folder.

    `Path.glob` would do, but since Python 3.12 it takes a folder that the operating system refuses for an empty one.
    """
    try:
        names = os.listdir(folder)
    except (FileNotFoundError, NotADirectoryError):
        return []
    except OSError as error:
        raise SpecbenchError(f"{folder} cannot be read: {os.strerror(error.errno)}") from error
    return sorted(folder / name for name in names if fnmatchcase(name, pattern))


@contextmanager
def blaming(path: Path, damaged: str, try_this: str = "", exit_code: int = BAD_INPUT) -> Iterator[None]:
    """Name `path` in whatever the block raises while it reads that file, a SpecbenchError for every error, see
    `read_error`; "{}" in `damaged` is replaced by the reader's message."""
    try:
        yield
    except SpecbenchError:
        raise
    except Exception as error:  # readers promise nothing about damaged content
        reason = one_line(str(error).partition("\n")[0], 120) or type(error).__name__
        raise read_error(path, error, damaged.replace("{}", reason), try_this, exit_code) from error


def is_lfs_pointer(path: Path) -> bool:
    """Whether Git LFS has left its placeholder instead of the file."""
    start = b"version https://git-lfs.github.com/spec/"
    try:
        with path.open("rb") as file:
            return file.read(len(start)) == start
    except OSError:
        return False


def read_error(
    path: Path, error: BaseException, damaged: str, try_this: str = "", exit_code: int = BAD_INPUT
) -> SpecbenchError:
    """The error of a failed read of `path`. A refusal by the operating system says nothing about the content, so only
    content is called `damaged` ("is damaged: not readable as scores"), and only then `try_this` is advised. Raises
    `error` itself if no content can be its cause."""
    if isinstance(error, ImportError | NameError):
        raise error
    if (reason := refusal(path, error)) is not None:
        return SpecbenchError(f"{path} cannot be read: {reason}", exit_code=exit_code)
    return SpecbenchError(f"{path} {damaged}", try_this, exit_code)


def refusal(path: Path, error: BaseException) -> str | None:
    """The operating system's reason behind `error`; None if the error is about the content of `path`.

    Libraries drop error numbers, so an error without one is settled by reading the file's first byte.
    """
    if isinstance(error, OSError) and error.errno and error.errno != errno.EINVAL:  # torch seeks before a cut file
        return os.strerror(error.errno)
    if isinstance(error, MemoryError) or "allocate memory" in str(error):
        return "not enough memory"
    try:
        handle = os.open(path, _PROBE)
        try:
            os.read(handle, 1)
        finally:
            os.close(handle)
    except OSError as refused:
        return os.strerror(refused.errno)
    except ValueError:  # a NUL character in the path
        return None
    return None


def data_folder(name: str) -> Path:
    """Path of the data folder `name` ("prompts", ...): outside the package in a checkout, inside it once installed."""
    installed = PACKAGE / "_data" / name
    return installed if installed.is_dir() else PACKAGE.parent / name


def _sync(handle: int, folder: Path) -> None:
    try:
        os.fsync(handle)
    except OSError as error:
        if error.errno not in _LACKING:
            raise
        _warn(folder, "syncing: the last results may be lost in a power failure")


def _warn(folder: Path, missing: str) -> None:
    if missing not in _warned:
        _warned.add(missing)
        warn(f"the file system of {folder} lacks {missing}")
