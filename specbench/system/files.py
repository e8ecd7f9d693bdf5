"""Files on disk: atomic writes, locks between processes, reads of untrusted or damaged files, and data folders.

Network and user-space file systems may lack locks or the syncing of folders. Writes continue without this guarantee,
after one warning per process.
"""

import codecs
import errno
import fcntl
import os
import shutil
import stat
import sys
import time
import uuid
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from fnmatch import fnmatchcase
from pathlib import Path

from specbench.errors import BAD_INPUT, FAILURE, SpecbenchError
from specbench.system.console import one_line, say, warn

PACKAGE = Path(__file__).parents[1]
_LACKING = {errno.ENOLCK, errno.EOPNOTSUPP, errno.ENOTSUP, errno.ENOSYS, errno.EINVAL}
"""Error numbers of a file system that does not support a call; any other number is a failure of the call."""
FULL = {errno.ENOSPC, errno.EDQUOT}  # Errors of a full disk, or of a quota that is used up
MAX_NAME_BYTES = 255  # Longest name of a file or folder on Linux file systems
STDOUT = ("-", "/dev/stdout")  # Output paths that mean stdout
_FRESH = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
_PROBE = os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC  # O_NONBLOCK: opening a pipe does not wait for a writer
_MARKS = {
    codecs.BOM_UTF8: "utf-8-sig",
    codecs.BOM_UTF32_LE: "utf-32",  # before UTF-16, whose mark is a prefix of this mark
    codecs.BOM_UTF32_BE: "utf-32",
    codecs.BOM_UTF16_LE: "utf-16",
    codecs.BOM_UTF16_BE: "utf-16",
}
# Keys: for each of the first four bytes, 1 if it is not 0.
_UNMARKED: Mapping[tuple[int, ...], str] = {(1, 0, 1, 0): "utf-16-le", (0, 1, 0, 1): "utf-16-be"}
_warned: set[str] = set()  # Missing features that were already reported


def write_atomically(path: Path, data: bytes) -> None:
    """Write `data` to `path` atomically and sync it to disk. Creates the folder, and replaces a symbolic link. If
    several processes write at once, the last to finish wins. No reader sees a partial file, even if the write fails."""
    aside = _hidden(path, f"{uuid.uuid4().hex}.tmp")  # unique to this writer
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
            f"earlier results are kept; {helps}run the same command again to resume",
            FAILURE,
        ) from error


def write_output(path: Path, data: bytes) -> None:
    """Write `data` to the user's path: atomically to a file, or the target of a symbolic link; directly into a device,
    a pipe or a mounted file; to stdout for "-". Raise a SpecbenchError if writing fails."""
    if str(path) in STDOUT:  # opening it by name would truncate a redirected stdout
        sys.stdout.flush()
        sys.stdout.buffer.write(data)
        return
    place = Path(os.path.realpath(path))
    if place.is_file() or not os.path.lexists(place):  # false for circular links, whose opening fails below
        try:
            return write_atomically(place, data)
        except SpecbenchError as error:  # a mounted file cannot be replaced, only written
            if getattr(error.__cause__, "errno", None) != errno.EBUSY:
                raise
    try:
        with open(path, "wb") as file:
            file.write(data)
    except IsADirectoryError:
        raise SpecbenchError(f"cannot write {path}: it is a folder", "name a file") from None
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
    """Lock the file `path` until the returned handle is closed. If another process holds the lock, raise a
    SpecbenchError with the text `busy` and the hint `advice`."""
    while True:
        # O_NONBLOCK: do not wait for a pipe. 0o666: the umask decides who else may lock, because groups share folders.
        handle = os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_NONBLOCK, 0o666)
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            owner = ""
            with suppress(OSError):  # only needed for the message
                owner = os.read(handle, 32).decode(errors="replace").strip()
            os.close(handle)
            raise SpecbenchError(f"{busy}{f' ({owner})' if owner else ''}", advice) from None
        except OSError as error:
            if error.errno not in _LACKING:
                os.close(handle)
                raise
            _warn(path.parent, "file locks: two commands may write here at the same time")
        if path.exists() and os.path.samestat(os.fstat(handle), path.stat()):
            break
        os.close(handle)  # the previous owner removed the file between open and lock
    with suppress(OSError):  # the process id is only needed for messages
        os.ftruncate(handle, 0)
        os.write(handle, f"pid {os.getpid()}".encode())
    return handle


@contextmanager
def replacing(place: Path, busy: str) -> Iterator[Path]:
    """Yield a temporary path, which replaces `place` at the end of the block. Only one process may write at a time;
    other processes get the error `busy`. The temporary name is fixed, so that a later call removes a leftover file."""
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
    """Make the path of a temporary file next to `path`, with a name of at most `MAX_NAME_BYTES`."""
    name = path.name.encode(errors="ignore")[:160].decode(errors="ignore")
    return path.with_name(f".{name}.{ending}")


def _remove(path: Path) -> None:
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path, ignore_errors=True)
    else:
        path.unlink(missing_ok=True)


def lock_when_free(path: Path, name: str) -> int:
    """Lock a file; if another process holds the lock, wait. `name`: subject of the note on waiting; empty: no note."""
    while True:
        try:
            return take_lock(path, "")
        except SpecbenchError:
            if name:
                say(f"{name} is being downloaded by another process; waiting for it")
            name = ""
            time.sleep(0.5)


def read_regular(path: Path, limit: int, inside: Path | None = None) -> bytes:
    """Read a regular file of at most `limit` bytes. Raise an error for pipes and devices, on which a read may block.
    `inside`: folder that symbolic links must not leave; None allows all links."""
    # Not Path.resolve, which raises a RuntimeError for circular links.
    place = Path(os.path.realpath(path)) if inside is not None else path
    if inside is not None and not place.is_relative_to(os.path.realpath(inside)):
        raise SpecbenchError(f"{path} is a link that leads out of {inside}", "put the file itself there")
    check_regular(place)
    with open(os.open(place, _PROBE), "rb") as file:
        if os.fstat(file.fileno()).st_size > limit or len(data := file.read(limit + 1)) > limit:
            raise SpecbenchError(f"{path} is larger than {limit:,} bytes")
    return data


def check_regular(path: Path) -> None:
    """Raise a SpecbenchError for a pipe or a device, on which a read may block, or an OSError if `stat` fails."""
    if not stat.S_ISREG(os.stat(path).st_mode):
        raise SpecbenchError(f"{path} is not a regular file")


def text_of(data: bytes) -> str:
    """Decode a file from UTF-8, from the encoding of its byte-order mark (Windows programs write it), or from UTF-16
    that begins with ASCII characters. Raise a UnicodeDecodeError for other encodings."""
    marked = (encoding for mark, encoding in _MARKS.items() if data.startswith(mark) and data != mark)
    return data.decode(next(marked, _UNMARKED.get(tuple(map(bool, data[:4])), "utf-8")))


def files_named(folder: Path, pattern: str) -> list[Path]:
    """Paths in `folder` whose names match `pattern`, sorted; empty if there is no such folder.

    `Path.glob` is not used, because since Python 3.12 it returns nothing for a folder that cannot be read.
    """
    try:
        names = os.listdir(folder)
    except (FileNotFoundError, NotADirectoryError):
        return []
    except OSError as error:
        raise SpecbenchError(f"{folder} cannot be read: {error.strerror}") from error
    return sorted(folder / name for name in names if fnmatchcase(name, pattern))


@contextmanager
def blaming(path: Path, damaged: str, try_this: str = "", exit_code: int = BAD_INPUT) -> Iterator[None]:
    """Convert every error of the block, which reads `path`, to a SpecbenchError that names the file, see `read_error`.
    "{}" in `damaged` is replaced by the original message."""
    try:
        yield
    except SpecbenchError:
        raise
    except Exception as error:  # readers raise many types of errors for damaged files
        reason = one_line(str(error).partition("\n")[0], 120) or type(error).__name__
        raise read_error(path, error, damaged.replace("{}", reason), try_this, exit_code) from error


def is_lfs_pointer(path: Path) -> bool:
    """Return whether a file is a placeholder of Git LFS instead of the real content."""
    start = b"version https://git-lfs.github.com/spec/"
    try:
        with path.open("rb") as file:
            return file.read(len(start)) == start
    except OSError:
        return False


def read_error(
    path: Path, error: BaseException, damaged: str, try_this: str = "", exit_code: int = BAD_INPUT
) -> SpecbenchError:
    """Make the error of a failed read of `path`. If the content is the cause, the message calls the file `damaged` ("is
    damaged: not readable as scores") and advises `try_this`; otherwise it gives the system's reason. An ImportError or
    a NameError is raised again, because no content can be its cause."""
    if isinstance(error, ImportError | NameError):
        raise error
    if (reason := refusal(path, error)) is not None:
        return SpecbenchError(f"{path} cannot be read: {reason}", exit_code=exit_code)
    return SpecbenchError(f"{path} {damaged}", try_this, exit_code)


def refusal(path: Path, error: BaseException) -> str | None:
    """Return the operating system's reason for `error`; None if the content of `path` is the cause.

    Libraries may drop the error number. Then a read of the file's first byte reveals the cause.
    """
    if isinstance(error, OSError) and error.errno and error.errno != errno.EINVAL:  # EINVAL: torch in a truncated file
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
        return refused.strerror
    except ValueError:  # a NUL character in the path
        return None
    return None


def data_folder(name: str) -> Path:
    """Return the data folder `name` ("prompts", ...). A checkout has it next to the package, an installation inside."""
    installed = PACKAGE / "_data" / name
    return installed if installed.is_dir() else PACKAGE.parent / name


def _sync(handle: int, folder: Path) -> None:
    try:
        os.fsync(handle)
    except OSError as error:
        if error.errno not in _LACKING:
            raise
        _warn(folder, "syncing to disk: a power failure may destroy the latest results")


def _warn(folder: Path, missing: str) -> None:
    if missing not in _warned:
        _warned.add(missing)
        warn(f"the file system of {folder} lacks {missing}")
