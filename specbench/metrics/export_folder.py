"""A folder of files for another program: written aside, put in place whole, and never outside itself."""

from __future__ import annotations

import errno
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from specbench.errors import FAILURE, SpecbenchError
from specbench.system.files import MAX_NAME_BYTES, take_lock


class ExportFolder:
    """Files that are being exported below `root`."""

    def __init__(self, root: Path):
        self._root = root

    def write(self, data: bytes, *parts: str) -> None:
        """Write one new file, given as names of folders and its own."""
        for name in parts:
            if name in ("", ".", "..") or "/" in name or "\0" in name:
                raise SpecbenchError(f"'{name[:80]}' cannot be the name of an exported file", "it would be a path")
            if len(name.encode("utf-8", "surrogatepass")) > MAX_NAME_BYTES:
                what = f"'{name[:40]}...' cannot be the name of an exported file"
                raise SpecbenchError(what, f"it has more than {MAX_NAME_BYTES} bytes")
        path = self._root.joinpath(*parts)
        path.parent.mkdir(parents=True, exist_ok=True)
        try:
            with open(path, "xb") as file:
                file.write(data)
        except FileExistsError:
            raise SpecbenchError(f"two exported files would have the name {'/'.join(parts)}") from None


@contextmanager
def export_folder(target: Path) -> Iterator[ExportFolder]:
    """Fill a folder that appears as `target`, absent or empty before, when the block ends; after an error, or a kill,
    `target` is as it was."""
    place = Path(os.path.realpath(target))  # Path.resolve raises a RuntimeError at links that lead in a circle
    names = f".{place.name[:200]}.tmp", f".{place.name[:200]}.lock"
    try:
        if place.exists() and (not place.is_dir() or any(child.name not in names for child in place.iterdir())):
            raise SpecbenchError(f"{target} is not an empty folder", "other programs would take in what is there")
        if place == Path.cwd():
            raise SpecbenchError(f"{target} is the current folder", "name another")
        place.parent.mkdir(parents=True, exist_ok=True)
        inside = place.is_dir() and _is_mount(place)
        aside, lock_path = ((place if inside else place.parent) / name for name in names)
        lock = take_lock(lock_path, f"{target} is being exported to by another process")
        try:
            _remove(aside)  # of a killed export
            aside.mkdir()
            yield ExportFolder(aside)
            for made in aside.iterdir() if inside else ():
                os.rename(made, place / made.name)
            if not inside:
                os.rename(aside, place)
        finally:
            _remove(aside)
            lock_path.unlink(missing_ok=True)
            os.close(lock)
    except OSError as error:
        raise SpecbenchError(f"cannot write {target}: {error.strerror or error}", "", FAILURE) from error


def _is_mount(place: Path) -> bool:
    """Whether a folder cannot be replaced by another, as a volume of a container: found by trying."""
    trial = place.with_name(f".{place.name[:200]}.trial")
    try:
        trial.mkdir(exist_ok=True)
        os.rename(trial, place)
    except OSError as error:
        return error.errno in (errno.EBUSY, errno.EACCES, errno.EPERM, errno.EROFS, errno.EXDEV)
    finally:
        _remove(trial)
    return False


def _remove(folder: Path) -> None:
    if folder.is_symlink():
        folder.unlink()
    else:
        shutil.rmtree(folder, ignore_errors=True)
