"""Export files for another program to a new folder."""

import os
from collections.abc import Iterable
from pathlib import Path

from specbench.errors import FAILURE, SpecbenchError
from specbench.system.files import MAX_NAME_BYTES, replacing


def export_files(target: Path, files: Iterable[tuple[bytes, *tuple[str, ...]]]) -> None:
    """Write files to a temporary folder, then rename it to `target`, which must be absent or empty. If this fails or
    the process is killed, `target` does not change. `files`: (content, folder names..., file name)."""
    place = Path(os.path.realpath(target))  # not Path.resolve, which raises a RuntimeError for circular links
    try:
        if place.exists() and (not place.is_dir() or any(place.iterdir())):
            raise SpecbenchError(f"{target} is not an empty folder", "name a new folder: programs read all its files")
        if place == Path.cwd():
            raise SpecbenchError(f"{target} is the current folder", "name another folder")
        place.parent.mkdir(parents=True, exist_ok=True)
        with replacing(place, f"another process is exporting to {target}") as aside:
            aside.mkdir()
            for data, *names in files:
                _check_names(names)
                path = aside.joinpath(*names)
                path.parent.mkdir(parents=True, exist_ok=True)
                try:
                    with open(path, "xb") as file:
                        file.write(data)
                except FileExistsError:
                    raise SpecbenchError(f"two exported files would have the name {'/'.join(names)}") from None
    except OSError as error:
        raise SpecbenchError(f"cannot write {target}: {error.strerror or error}", "", FAILURE) from error


def _check_names(names: Iterable[str]) -> None:
    """Reject names of files outside the folder."""
    for name in names:
        if name in ("", ".", "..") or "/" in name or "\0" in name:
            raise SpecbenchError(f"'{name[:80]}' is a path and cannot be the name of an exported file")
        if len(name.encode("utf-8", "surrogatepass")) > MAX_NAME_BYTES:
            what = f"'{name[:40]}...' cannot be the name of an exported file"
            raise SpecbenchError(what, f"it has more than {MAX_NAME_BYTES} bytes")
