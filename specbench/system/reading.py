"""Read files that may be foreign, damaged, or refused by the operating system."""

from __future__ import annotations

import errno
import os
import stat
from fnmatch import fnmatchcase
from pathlib import Path

from specbench.errors import BAD_INPUT, SpecbenchError

_PROBE = os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC  # opening a pipe must not wait for a writer


def read_error(
    path: Path, error: BaseException, damaged: str, try_this: str = "", exit_code: int = BAD_INPUT
) -> SpecbenchError:
    """What the failed read of `path` means: a refusal of the operating system says nothing about the content, so only
    content is called `damaged` and only then `try_this` is advised.

    Args:
        error: as raised by the reader.
        damaged: what is wrong with the content, following the path: "is damaged: not readable as scores".
    """
    reason = refusal(path, error)
    if reason is not None:
        return SpecbenchError(f"{path} cannot be read: {reason}", exit_code=exit_code)
    return SpecbenchError(f"{path} {damaged}", try_this, exit_code)


def refusal(path: Path, error: BaseException) -> str | None:
    """The operating system's reason behind `error`, None where it is about the content of `path`.

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
    except OSError as found:
        return os.strerror(found.errno)
    except ValueError:  # a NUL character in the path
        return None
    return None


def files_named(folder: Path, pattern: str) -> list[Path]:
    """Paths in `folder` whose names match `pattern`, sorted; none where there is no such folder.

    `Path.glob` would do, but since Python 3.12 it takes a folder that the operating system refuses for an empty one.

    Raises:
        SpecbenchError: the folder cannot be listed.
    """
    try:
        names = os.listdir(folder)
    except (FileNotFoundError, NotADirectoryError):
        return []
    except OSError as error:
        raise SpecbenchError(f"{folder} cannot be read: {os.strerror(error.errno)}") from error
    return sorted(folder / name for name in names if fnmatchcase(name, pattern))


def check_regular(path: Path) -> None:
    """Refuse a pipe or a device, which would be waited for; an OSError for what cannot be looked at."""
    if not stat.S_ISREG(os.stat(path).st_mode):
        raise SpecbenchError(f"{path} is not a regular file")


def read_regular(path: Path, limit: int, inside: Path | None = None) -> bytes:
    """All bytes of a regular file of at most `limit` bytes; a pipe or a device is refused instead of waited for.

    Args:
        inside: folder that no symbolic link may lead out of; None where links may lead anywhere.

    Raises:
        OSError: refused by the operating system.
        SpecbenchError: not a regular file, too large, or outside.
    """
    # realpath and not Path.resolve, which raises a RuntimeError at links that lead in a circle.
    place = Path(os.path.realpath(path)) if inside is not None else path
    if inside is not None and not place.is_relative_to(os.path.realpath(inside)):
        raise SpecbenchError(f"{path} is a link that leads out of {inside}", "put the file itself there")
    check_regular(place)
    with open(os.open(place, _PROBE), "rb") as file:
        if os.fstat(file.fileno()).st_size > limit or len(data := file.read(limit + 1)) > limit:
            raise SpecbenchError(f"{path} is larger than {limit:,} bytes")
    return data
