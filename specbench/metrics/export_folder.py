"""Export a folder of files for another program: written to a temporary folder, then moved. No file is outside it."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from specbench.errors import FAILURE, SpecbenchError
from specbench.system.files import MAX_NAME_BYTES, replacing


class ExportFolder:
    """Files that are being exported below `root`."""

    def __init__(self, root: Path):
        self._root = root

    def write(self, data: bytes, *parts: str) -> None:
        """Write a new file. Its path is given as the names of its folders and its file name."""
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
    """Fill a folder that becomes `target` when the block ends. `target` must be absent or empty; it does not change if
    the block fails or the process is killed."""
    place = Path(os.path.realpath(target))  # Path.resolve raises a RuntimeError at links that lead in a circle
    try:
        if place.exists() and (not place.is_dir() or any(place.iterdir())):
            raise SpecbenchError(f"{target} is not an empty folder", "other programs would also read the files in it")
        if place == Path.cwd():
            raise SpecbenchError(f"{target} is the current folder", "name another")
        place.parent.mkdir(parents=True, exist_ok=True)
        with replacing(place, f"{target} is being exported to by another process") as aside:
            aside.mkdir()
            yield ExportFolder(aside)
    except OSError as error:
        raise SpecbenchError(f"cannot write {target}: {error.strerror or error}", "", FAILURE) from error
