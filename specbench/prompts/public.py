"""Public prompt sets: manifest (`prompts/manifest.toml`), download and reading.

Files are stored as published in `<cache>/prompts/<set>`; digests are verified after the download and before each read.
"""

import os
import re
import shutil
import tomllib
import zipfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import cache, partial
from pathlib import Path
from typing import Any
from urllib.parse import quote

from specbench.errors import FAILURE, MISSING_PREREQUISITE, SpecbenchError
from specbench.prompts.prompt_set import Prompt
from specbench.prompts.public_files import READERS
from specbench.system.digests import cache_folder
from specbench.system.downloads import Download, Progress, Remote, fetch_file, matches, mismatch
from specbench.system.files import check_regular, data_folder

MIRROR = "SPECBENCH_PROMPTS_MIRROR"
"""Environment variable: address of a mirror of the public sets, with one folder per set."""


@dataclass(frozen=True)
class PublishedImages:
    """Reference images of a set: an archive of `count` images under `licence`."""

    archive: Remote
    count: int
    licence: str


@dataclass(frozen=True)
class PublicSet:
    """Manifest entry of a public set, also before its download. `prompts`: number of prompts. `files`: {name: file}; in
    an `archive`, `url` is a path. `categories`: number of prompts of each category that is itself a set."""

    name: str
    summary: str
    prompts: int
    licence: str
    page: str
    files: Mapping[str, Remote]
    archive: Remote | None = None
    images: PublishedImages | None = None
    categories: Mapping[str, int] = field(default_factory=dict)

    @property
    def folder(self) -> Path:
        """Folder of the downloaded files."""
        return cache_folder() / "prompts" / self.name

    @property
    def missing(self) -> list[str]:
        """Names of the files not yet downloaded."""
        return [name for name in self.files if not (self.folder / name).is_file()]

    @property
    def download_size(self) -> int | None:
        """Bytes to download, if the publisher states sizes."""
        if self.archive and not os.environ.get(MIRROR):
            return self.archive.size
        sizes = [remote.size for remote in self.files.values() if remote.size is not None]
        return sum(sizes) if len(sizes) == len(self.files) else None


@cache
def public_sets() -> dict[str, PublicSet]:
    """Read the shipped manifest: sets by name."""
    manifest = tomllib.loads((data_folder("prompts") / "manifest.toml").read_text(encoding="utf-8"))
    return {name: _entry(name, entry) for name, entry in manifest.items()}


def _entry(name: str, entry: dict[str, Any]) -> PublicSet:
    def remote(part: dict[str, Any] | str, file: str = "") -> Remote:
        if isinstance(part, str):
            part = {"url": f"{entry['base']}/{quote(file)}", "digest": part}
        by_hand = f"or: specbench fetch {name} --from COPY"
        return Remote(part.get("url") or part["member"], part["digest"], part.get("size"), by_hand)

    images = entry.get("images")
    return PublicSet(
        name, entry["summary"], entry["prompts"], entry["licence"], entry["page"],
        {file: remote(part, file) for file, part in entry["files"].items()},
        remote(entry["archive"]) if "archive" in entry else None,
        PublishedImages(remote(images), images["count"], images["licence"]) if images else None,
        entry.get("categories", {}),
    )  # fmt: skip


def public_names() -> list[str]:
    """List the names of the public sets, and of their categories that can be used as sets."""
    sets = public_sets().values()
    return [name for entry in sets for name in (entry.name, *(f"{entry.name}/{part}" for part in entry.categories))]


def find(name: str) -> tuple[PublicSet, str | None]:
    """Return the set that a name of `public_names()` means, and the category if the name includes a category."""
    base, _, category = name.partition("/")
    return public_sets()[base], category or None


def read(name: str) -> list[Prompt]:
    """Read the prompts of a public set, or of one of its categories."""
    entry, category = find(name)
    if entry.missing:
        what = f"the prompts of '{entry.name}' are not on this disk"
        raise SpecbenchError(what, f"specbench fetch {entry.name}", MISSING_PREREQUISITE)
    return [prompt for prompt in read_set(entry) if category in (None, prompt.category)]


def read_set(entry: PublicSet) -> list[Prompt]:
    """Read all prompts of a downloaded set."""
    for file, remote in entry.files.items():
        if not matches(entry.folder / file, remote):
            what = f"{entry.folder / file} differs from the published file"
            raise SpecbenchError(what, f"delete it and run: specbench fetch {entry.name}")
    prompts = READERS[entry.name](entry.folder)
    if len(prompts) != entry.prompts:
        raise SpecbenchError(f"prompts '{entry.name}': {len(prompts)} prompts instead of {entry.prompts}")
    return prompts


def missing_set(name: str, images: bool = False) -> list[Download]:
    """List the download of a public set, or of its images; empty if already on this disk, or for other names."""
    if name not in public_names():
        return []
    entry, _ = find(name)
    if images:
        published = _images_of(entry)
        if _count(entry.folder / "images") == published.count:
            return []
        what, get = f"{published.count} images of {entry.name}", partial(fetch_images, entry)
        return [Download(what, ("images",), published.archive.size, published.licence, entry.folder, get)]
    what, files, get = f"prompts of {entry.name}", tuple(entry.missing), partial(fetch_set, entry)
    return [Download(what, files, entry.download_size, entry.licence, entry.folder, get)] if files else []


def fetch_set(entry: PublicSet, progress: Progress | None = None, forbidden: bool = False) -> Path:
    """Download the missing or damaged files of a set."""
    if entry.archive is None or os.environ.get(MIRROR):
        for name, remote in entry.files.items():
            fetch_file(_mirrored(entry, remote, name), entry.folder / name, progress, forbidden)
    elif any(not _is_right(entry, name) for name in entry.files):
        local = fetch_file(entry.archive, entry.folder / "archive.zip", progress, forbidden)
        _unpack(entry, local)
        local.unlink()
    return entry.folder


def _mirrored(entry: PublicSet, remote: Remote, name: str) -> Remote:
    """Return a file with the address to download it from: the publisher's, or `<mirror>/<set>/<name>`."""
    mirror = os.environ.get(MIRROR)
    return replace(remote, url=f"{mirror.rstrip('/')}/{entry.name}/{quote(name)}") if mirror else remote


def adopt_set(entry: PublicSet, source: Path) -> Path:
    """Import a set from a local copy (archive, file, or folder with the files), and verify the digests."""
    if source.exists() and not source.is_dir():
        check_regular(source)  # rejects pipes, whose opening would block
    candidates = [path for path in sorted(source.rglob("*")) if path.is_file()] if source.is_dir() else [source]
    if entry.archive is not None and len(candidates) == 1 and zipfile.is_zipfile(candidates[0]):
        _require_right(entry.archive, candidates[0])
        _unpack(entry, candidates[0])
        return entry.folder
    by_path = {f"/{path.as_posix()}".lower(): path for path in candidates}
    for name, remote in entry.files.items():
        fitting = (path for place, path in by_path.items() if place.endswith(f"/{name}".lower()))
        path = source if len(entry.files) == 1 and not source.is_dir() else next(fitting, None)
        if path is not None:
            _require_right(remote, path)
            with _writing((entry.folder / name).parent):
                part = shutil.copyfile(path, entry.folder / f"{name}.part")
                os.replace(part, entry.folder / name)
        elif not _is_right(entry, name):
            raise SpecbenchError(f"{source} does not contain {name}", f"'{entry.name}' needs {', '.join(entry.files)}")
    return entry.folder


def _images_of(public_set: PublicSet) -> PublishedImages:
    if public_set.images is None:
        having = ", ".join(name for name, entry in public_sets().items() if entry.images)
        what = f"prompts '{public_set.name}' have no reference images"
        raise SpecbenchError(what, f"sets with reference images: {having}")
    return public_set.images


def fetch_images(
    entry: PublicSet, progress: Progress | None = None, forbidden: bool = False, source: Path | None = None
) -> Path:
    """Download the reference images of a set, or import them from `source`."""
    folder, published, archive = entry.folder / "images", _images_of(entry), source
    if _count(folder) == published.count:
        return folder
    if archive is None:
        remote = _mirrored(entry, published.archive, published.archive.url.rpartition("/")[2])
        archive = fetch_file(remote, entry.folder / "images.zip", progress, forbidden)
    else:
        _require_right(published.archive, archive)
    _unpack_images(archive, folder)
    if _count(folder) != published.count:
        what = f"{folder} contains {_count(folder)} images instead of {published.count}"
        raise SpecbenchError(what, "delete the folder and fetch again")
    if source is None:
        archive.unlink()
    return folder


def _is_right(entry: PublicSet, name: str) -> bool:
    path = entry.folder / name
    return path.is_file() and matches(path, entry.files[name])


def _require_right(remote: Remote, source: Path) -> None:
    if not source.is_file():
        raise SpecbenchError(f"{source} is not a file")
    if not matches(source, remote):
        raise SpecbenchError(f"{source} is not the file published at {remote.url}: {mismatch(source, remote)}")


@contextmanager
def _writing(folder: Path) -> Iterator[None]:
    try:
        folder.mkdir(parents=True, exist_ok=True)
        yield
    except OSError as error:
        raise SpecbenchError(f"cannot write to {folder}: {error.strerror or error}", "", FAILURE) from error


def _unpack(entry: PublicSet, archive: Path) -> None:
    """Extract the files of a set. zipfile checks each file's CRC, and `matches` the digest of the manifest."""
    with _writing(entry.folder), zipfile.ZipFile(archive) as content:
        for name, remote in entry.files.items():
            part = entry.folder / f"{name}.part"
            as_long = remote.size in (None, content.getinfo(remote.url).file_size)
            part.write_bytes(content.read(remote.url) if as_long else b"")
            if not matches(part, remote):
                part.unlink()
                raise SpecbenchError(f"{archive}: {remote.url} in it is not the expected file")
            os.replace(part, entry.folder / name)


def _unpack_images(archive: Path, folder: Path) -> None:
    """Extract the images of the archive; files that already have their full size are kept."""
    with _writing(folder), zipfile.ZipFile(archive) as content:
        for item in content.infolist():
            name = item.filename.rpartition("/")[2]
            if not re.fullmatch(r"[\w-]+\.(jpg|jpeg|png)", name):
                continue
            target = folder / name
            if target.is_file() and target.stat().st_size == item.file_size:
                continue
            part = folder / f".{name}.part"
            part.write_bytes(content.read(item))
            os.replace(part, target)


def _count(folder: Path) -> int:
    return sum(1 for path in folder.iterdir() if not path.name.startswith(".")) if folder.is_dir() else 0
