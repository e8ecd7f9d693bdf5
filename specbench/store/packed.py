"""Packed runs: run folders in one zip file with the SHA-256 of each member. The file is untrusted: a member is read
only if a run folder can contain a file with its name, and its size is within bounds. Members are stored uncompressed,
so that a small file cannot unpack to a large file. Reading unpacks into the cache folder once per content."""

import hashlib
import json
import os
import re
import shutil
import struct
import tempfile
import zipfile
from collections.abc import Iterable, Iterator
from pathlib import Path, PurePosixPath
from typing import Any

from specbench.errors import SpecbenchError, chosen
from specbench.store.run_info import RUN_JSON
from specbench.system.digests import cache_folder, sha256_of
from specbench.system.files import MAX_NAME_BYTES, STDOUT, check_regular, replacing
from specbench.system.json_values import parse_json

MANIFEST = "pack.json"
PACK_VERSION = 1
_MEMBER = re.compile(
    r"(?:[^\W_][\w+.-]{0,150}/)(?:(?:run|audit)\.json|(?:samples|traces)/[\w-]+\.parquet|images/[^./\\\x00][^/\\\x00]*"
    r"|scores/[\w.+ \[\]-]+(?:/[\w-]+)?\.parquet|image_scores/[\w.+ \[\]-]+/[\w-]+\.parquet)"
)
_MOST_MEMBERS, _MOST_BYTES = 2_000_000, 2**32
_CHUNK = 2**20
_DAMAGED = (zipfile.BadZipFile, OSError, EOFError, ValueError, RuntimeError, struct.error)
"""Errors of zipfile on damaged files. RuntimeError: encrypted or patched members."""


def pack(folders: str | Path | Iterable[str | Path], target: str | Path, pictures: bool = True) -> int:
    """Write runs to one file.

    Args:
        folders: a run's folder, or several.
        pictures: whether to pack the images as well.

    Returns:
        The number of files in the pack.

    Raises:
        SpecbenchError: two runs with the same id, a run that cannot be packed, or a file that cannot be written.
    """
    from specbench.store.run_store import RunStore  # imports pandas, which unpacking does not need

    runs = [Path(folder) for folder in chosen("run", folders)]
    names = [run.name for run in runs]
    if repeated := [name for name in names if names.count(name) > 1]:
        raise SpecbenchError(f"two runs have the name {repeated[0]}", "pack only one of them")
    if str(target) in STDOUT:
        raise SpecbenchError(f"--to {target}: a packed file is not written to stdout", "name a file")
    place, digests = Path(os.path.realpath(target)), {}
    try:
        if os.path.lexists(place):  # it may be a pipe or a device
            check_regular(place)
        busy = f"{place} is being packed by another process"
        with (
            replacing(place, busy) as aside,  # times before 1980 or after 2107 become the nearest that zip has
            zipfile.ZipFile(aside, "w", zipfile.ZIP_STORED, strict_timestamps=False) as archive,
        ):
            for folder in runs:
                RunStore(folder).samples(["status"])  # raises an error if the run is damaged
                for path in sorted(p for p in folder.rglob("*") if p.is_file() and not p.is_symlink()):
                    name = f"{folder.name}/{path.relative_to(folder).as_posix()}"
                    if _MEMBER.fullmatch(name) and (pictures or path.parent.name != "images"):
                        archive.write(path, name)
                        digests[name] = hashlib.sha256(path.read_bytes()).hexdigest()
            about = {"specbench_pack": PACK_VERSION, "pictures": "png" if pictures else "none", "files": digests}
            member = zipfile.ZipInfo(MANIFEST)  # dated 1980, the earliest date in the zip format
            member.external_attr = 0o644 << 16
            archive.writestr(member, json.dumps(about, indent=1))
    except OSError as error:
        raise SpecbenchError(f"cannot write {target}: {error.strerror}") from error
    return len(digests)


def unpacked(path: Path) -> Path:
    """Return a results folder with the runs of a packed file; unpack the file first if necessary."""
    folder = cache_folder() / "packs" / sha256_of(path)[:32]
    if folder.is_dir():
        return folder
    if problems := list(changed_members(path)):
        raise SpecbenchError(f"{path}: {problems[0]}", "changed after it was packed; for details: specbench verify")
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=folder.parent) as aside:
            extract(path, Path(aside, "runs"))
            Path(aside, "runs").replace(folder)
    except OSError as error:
        if folder.is_dir():  # another process has unpacked the file
            return folder
        what = f"{path} cannot be unpacked into {folder.parent}: {error.strerror or error}"
        raise SpecbenchError(what, "name another folder: SPECBENCH_CACHE=DIR") from error
    return folder


def extract(path: Path, folder: Path) -> None:
    """Verify the digests of a packed file, and write its runs to a new folder."""
    with _opened(path) as archive:
        for name in _manifest(path, archive)["files"]:
            place = folder / name
            place.parent.mkdir(parents=True, exist_ok=True)
            with archive.open(name) as source, place.open("wb") as file:
                shutil.copyfileobj(source, file)


def changed_members(path: Path) -> Iterator[str]:
    """Describe members of a packed file that changed since it was written."""
    with _opened(path) as archive:
        for name, expected in _manifest(path, archive)["files"].items():
            try:
                with archive.open(name) as member:
                    digest = hashlib.sha256()
                    while piece := member.read(_CHUNK):
                        digest.update(piece)
                if digest.hexdigest() != expected:
                    yield f"{name} was changed: its SHA-256 differs from {MANIFEST}"
            except KeyError:
                yield f"{name} is missing"
            except _DAMAGED:
                yield f"{name} was changed: its checksum is wrong"


def _opened(path: Path) -> zipfile.ZipFile:
    try:
        return zipfile.ZipFile(path)
    except _DAMAGED as error:
        why = getattr(error, "strerror", None) or error
        raise SpecbenchError(f"{path} is not a packed file: {why}", "make it with specbench pack") from None


def _manifest(path: Path, archive: zipfile.ZipFile) -> dict[str, Any]:
    """Read the manifest, and check the names, sizes and kinds of all members against it."""
    members = archive.infolist()
    if len(members) > _MOST_MEMBERS or sum(member.file_size for member in members) > path.stat().st_size:
        raise SpecbenchError(f"{path}: its members are too many, or overlap", "do not trust this file")
    for member in members:
        name = member.filename
        if name != MANIFEST and not _MEMBER.fullmatch(name):
            raise SpecbenchError(f"{path}: member '{name:.80}' is not a file of a run", "do not trust this file")
        compressed = member.compress_type != zipfile.ZIP_STORED or member.compress_size != member.file_size
        encrypted = member.flag_bits & 1
        if compressed or encrypted or member.file_size > _MOST_BYTES:
            how = "encrypted" if encrypted else "compressed or too large"
            raise SpecbenchError(f"{path}: member '{name}' is {how}", "do not trust this file")
    try:
        about = parse_json(archive.read(MANIFEST))
        if not isinstance(about, dict) or about.get("specbench_pack") != PACK_VERSION:
            raise ValueError(f"not of version {PACK_VERSION}")
        files = about.get("files")
        if not isinstance(files, dict) or not all(isinstance(digest, str) for digest in files.values()):
            raise ValueError("'files' must map file names to digests")
    except (*_DAMAGED, KeyError) as error:
        raise SpecbenchError(f"{path} is not a packed file: {MANIFEST}: {error}", "use specbench pack") from None
    names = [member.filename for member in members if member.filename != MANIFEST]
    if len(set(names)) != len(names) or set(names) - set(files):
        raise SpecbenchError(f"{path} has members that {MANIFEST} does not list", "do not trust this file")
    parents = {str(parent) for name in files for parent in PurePosixPath(name).parents}
    for name in files:
        too_long = any(len(part.encode("utf-8", "surrogatepass")) > MAX_NAME_BYTES for part in name.split("/"))
        if not _MEMBER.fullmatch(name) or name in parents or too_long:
            what = "not a file of a run" if name not in parents else "a file and a folder at once"
            raise SpecbenchError(f"{path}: {MANIFEST} names '{name:.80}', {what}", "do not trust this file")
    if not any(name.endswith(f"/{RUN_JSON}") for name in files):
        raise SpecbenchError(f"{path} contains no run: it has no member {RUN_JSON}", "make it with specbench pack")
    return about
