"""Sources of a checkpoint's files: a folder on this disk, or a hub repository at a known commit. Imports no torch.

`HF_HOME` and `HF_HUB_OFFLINE` have their usual meaning, because huggingface_hub fetches the files.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from specbench.errors import MISSING_PREREQUISITE, SpecbenchError
from specbench.models.hub_downloads import cached_snapshot, refuse_changed, repository_download
from specbench.system.digests import sha256_of
from specbench.system.downloads import Download, fetch_all
from specbench.system.files import files_named, is_lfs_pointer, read_error, read_regular
from specbench.system.json_values import parse_json

INDEX = "model.safetensors.index.json"
_MARKS = (
    "config.json",
    "adapter_config.json",
    "params.json",
    "models/7b/params.json",
    INDEX,
    "vision_language_encoder/config.json",
)
"""Small files that suffice to recognise a repository."""
MAX_JSON_BYTES = 2**28
MAX_LAYERS = 1000
"""Maximum number of layers in a configuration; building a network of 100,000 layers or more takes minutes."""
_WEIGHTS = (".safetensors", ".bin", ".pt", ".pth", ".ckpt", ".jit")  # Suffixes of files that hold tensors
_OF_A_HUB = {"auto_map": "--", "implementation": "/"}
"""Suffixes of configuration keys, and the text in their values that refers to code ("--") or a kernel on a hub."""
_SNAPSHOT = re.compile(r"models--([^/]+)--([^/]+)/snapshots/([^/]+)")
_SHARD = re.compile(r"(.+)-(\d{5})-of-(\d{5})(\.(?:safetensors|bin))")


@dataclass(frozen=True)
class Source:
    """Files of a hub repository."""

    what: str  # description for messages: "the language model"
    repo: str  # hub id, "owner/name"
    files: tuple[str, ...]  # glob patterns that must each match; "a|b" takes b if nothing matches a
    licence: str  # licence of the files
    beside: tuple[str, ...] = ()  # paths in a `--weights` folder; the first that exists replaces `files`
    note: str = ""  # further conditions of the download
    # further subfolders of a `--weights` folder in which the files are searched
    folders: tuple[str, ...] = ()
    optional: tuple[str, ...] = ()  # files that are read if they exist

    @property
    def folder_name(self) -> str:
        """Name of the subfolder of a `--weights` folder in which the source's files are searched."""
        return self.repo.rpartition("/")[2]

    def how_to_get(self, repo: str | None = None, revision: str | None = None) -> str:
        """Return the command that downloads the source's files, or the same files of another repository."""
        if repo in (None, self.repo) and not revision:
            return f"specbench fetch {self.repo}"
        return f"hf download {repo or self.repo}" + (f" --revision {revision}" if revision else "")

    @contextmanager
    def blaming(self, path: Path) -> Iterator[None]:
        """Turn any error of the block, which reads the file `path`, into a SpecbenchError that names the file."""
        try:
            yield
        except SpecbenchError:
            raise
        except Exception as error:  # readers may raise anything for damaged content
            error = ValueError(f"no {error} in it") if isinstance(error, KeyError) else error
            raise self.damaged(path, error) from error

    def damaged(self, path: Path, error: Exception) -> SpecbenchError:
        reason = str(error).splitlines()[0][:120] if str(error) else type(error).__name__
        if is_lfs_pointer(path):
            reason = "it is a Git LFS pointer, not the file itself"
        in_cache = _SNAPSHOT.search(path.absolute().as_posix())  # otherwise a user's folder
        fix = f"download it again: {self.how_to_get()}" if in_cache else f"repair or replace {path}"
        return read_error(path, error, f"is damaged: {reason}", fix, MISSING_PREREQUISITE)


@dataclass(frozen=True)
class CheckpointFiles:
    """The files of a source on this disk."""

    source: Source
    paths: tuple[Path, ...]

    def named(self, name: str) -> Path:
        return next(path for path in self.paths if path.name == name)

    def json(self, name: str) -> dict[str, Any]:
        """Read the file `name`, which holds one JSON object."""
        return read_json(self.source, self.named(name))

    def blaming(self, name: str) -> AbstractContextManager[None]:
        """See `Source.blaming`, for the file `name`."""
        return self.source.blaming(self.named(name))

    def holds(self, name: str) -> bool:
        return any(path.name == name for path in self.paths)

    def only(self, *names: str) -> CheckpointFiles:
        """Select the files whose name matches one of these glob patterns."""
        return CheckpointFiles(self.source, tuple(path for path in self.paths if any(map(path.match, names))))

    def ending(self, *suffixes: str) -> tuple[Path, ...]:
        return tuple(path for path in self.paths if path.suffix in suffixes)

    @property
    def where(self) -> str:
        """The weight file, or the folder of several weight files, for messages."""
        paths = self.ending(*_WEIGHTS) or self.paths
        return str(paths[0] if len(paths) == 1 else paths[0].parent)

    @property
    def commits(self) -> dict[str, str]:
        """Return the commits of the cached files, by hub repository."""
        places = (_SNAPSHOT.search(path.absolute().as_posix()) for path in self.paths)
        return {f"{place[1]}/{place[2]}": place[3] for place in places if place}

    def refusal(self, problem: str, path: Path | None = None) -> SpecbenchError:
        """Return the error for unusable weights, or for an unusable file `path`."""
        hint = f"check that this is {self.source.what}; to download the official files: {self.source.how_to_get()}"
        return SpecbenchError(f"{path or self.where}{problem}", hint)

    def sha256(self) -> str:
        """Digest over the names and contents of all files. File names are not trusted, although the hub's cache names
        large files by their digest."""
        digest = hashlib.sha256()
        for path in self.paths:
            digest.update(path.name.encode() + b"\0" + sha256_of(path).encode())
        return digest.hexdigest()


@dataclass(frozen=True)
class WantedFiles:
    """A user's request for the files of a source."""

    source: Source
    weights: str | None = None  # a folder or hub id that replaces the source; None for the source
    revision: str | None = None  # revision of the hub repository
    beside: Path | None = None  # the language model's folder: other parts' files are first searched in and next to it

    @property
    def repo(self) -> str:
        """Repository to look in, unless `weights` is a folder."""
        return self.weights or self.source.repo

    def folder(self, download: bool = False) -> Path | None:
        """Return the folder `weights`, or the repository's snapshot in the hub's cache; None if it is not on this disk.
        `download`: first fetch the small files that identify its layout."""
        if folder := local_folder(self.weights):
            return folder
        snapshot = cached_snapshot(self.repo, self.revision)
        if download and not (snapshot and any((snapshot / name).is_file() for name in _MARKS)):
            fetch_all([self._download((), _MARKS)])
            snapshot = cached_snapshot(self.repo, self.revision)
        return snapshot

    def find(self) -> CheckpointFiles:
        """Find the files on this disk. The error, with exit code 5, names a missing file, its source and licence."""
        source, beside = self.source, self.beside
        if beside:
            for name in source.beside:
                if (beside / name).is_file():
                    return CheckpointFiles(source, (beside / name,))
            if place := _companion_folder(source, beside):
                return _in_folder(source, place)
        if (folder := self.folder()) is None:
            nor = f", nor {source.beside[0]} in {beside}" if beside and source.beside else ""
            called = f"{self.repo} at {self.revision}" if self.revision else self.repo
            raise _missing(source, f"{called} is not on this disk{nor}", self.repo, self.revision)
        return _in_folder(source, folder, None if local_folder(self.weights) else self.repo)

    def fetch(self) -> CheckpointFiles:
        """Download missing files, then `find`. Raises a SpecbenchError also if a file in the hub's cache does not have
        the digest that the hub stated."""
        if lacking := self.missing():
            fetch_all([lacking])
        files = self.find()
        refuse_changed(files.paths)
        return files

    def missing(self) -> Download | None:
        """Return the files that `fetch` downloads; None if all are on this disk. Raise if they cannot be downloaded."""
        try:
            self.find()
        except SpecbenchError:
            if local_folder(self.weights) or (self.beside and _companion_folder(self.source, self.beside)):
                raise
            return self._download(self.source.files, self.source.optional)
        return None

    def _download(self, files: Sequence[str], optional: Sequence[str]) -> Download:
        licence = self.source.licence if self.repo == self.source.repo else "see its card"
        return repository_download(self.repo, self.revision, files, licence, optional)


def local_folder(weights: str | None) -> Path | None:
    """Return `weights` as a folder; None if it is a hub id or None."""
    if weights is None:
        return None
    folder = Path(weights).expanduser()
    if folder.is_dir():
        return _snapshot_in(folder)
    if folder.is_file():
        raise SpecbenchError(f"--weights {weights} is a file", f"name the folder with all files: {folder.parent}")
    if weights.count("/") == 1 and not weights.startswith((".", "/", "~")) and not weights.endswith("/"):
        return None
    raise SpecbenchError(f"--weights {weights}: no such folder", "name a folder, or a hub id such as owner/name")


def _snapshot_in(folder: Path) -> Path:
    """Return the snapshot of `main` in a repository's folder of the hub's cache ("models--OWNER--NAME")."""
    if not (snapshots := sorted((folder / "snapshots").glob("*"))):
        return folder
    with suppress(OSError, UnicodeDecodeError):
        snapshots = [folder / "snapshots" / (folder / "refs" / "main").read_text().strip()]
    if len(snapshots) == 1 and snapshots[0].is_dir():
        return snapshots[0]
    raise SpecbenchError(f"--weights {folder} has no snapshot, or several", f"name a folder in {folder / 'snapshots'}")


def json_object(path: Path) -> dict[str, Any]:
    """Read a file that holds one JSON object; otherwise raise an OSError, ValueError or SpecbenchError."""
    content = parse_json(read_regular(path, MAX_JSON_BYTES))
    if not isinstance(content, dict):
        raise ValueError(f"no JSON object in {path}")
    return content


def read_json(source: Source, path: Path) -> dict[str, Any]:
    """Read a file of the source that holds one JSON object."""
    with source.blaming(path):
        content = parse_json(read_regular(path, MAX_JSON_BYTES))
    if not isinstance(content, dict):
        raise source.damaged(path, ValueError("it contains no JSON object"))
    for part in (content, *(part for part in content.values() if isinstance(part, dict))):
        if any(isinstance(layers := part.get(name), int) and layers > MAX_LAYERS for name in part if "layers" in name):
            raise source.damaged(path, ValueError(f"more than {MAX_LAYERS:,} layers"))
        for name, value in part.items():
            if any(name.endswith(key) and mark in str(value) for key, mark in _OF_A_HUB.items()):
                what = f"{path} refers to code on a hub, which specbench never runs: {name} = {str(value)[:80]}"
                raise SpecbenchError(what, f"remove {name} from the file if the model works without it")
    return content


def _companion_folder(source: Source, folder: Path) -> Path | None:
    """Find the folder of `source` in or next to the `--weights` folder of the language model."""
    inside = (folder / name for name in (source.folder_name, *source.folders))
    return next((place for place in (*inside, folder.resolve().parent / source.folder_name) if place.is_dir()), None)


def _in_folder(source: Source, folder: Path, repo: str | None = None) -> CheckpointFiles:
    paths: list[Path] = []
    for group in source.files:
        alternatives = group.split("|")
        matching = next((matching for pattern in alternatives if (matching := _matching(folder, pattern))), None)
        if matching is None:
            raise _missing(source, f"{folder} has no {' or '.join(alternatives)}", repo)
        _check_shards(source, folder, matching, repo)
        paths += matching
    paths += [folder / name for name in source.optional if (folder / name).is_file()]
    return CheckpointFiles(source, tuple(paths))


def _matching(folder: Path, pattern: str) -> list[Path]:
    """Files that match a pattern, without the temporary files of downloads."""
    suffixes = (*_WEIGHTS, ".json", ".txt", ".tiktoken", ".jinja")
    place = folder / pattern
    return [path for path in files_named(place.parent, place.name) if path.is_file() and path.suffix in suffixes]


def _check_shards(source: Source, folder: Path, paths: Sequence[Path], repo: str | None) -> None:
    """Refuse an index if a shard is missing, and shards if the index is missing."""
    indices = [path for path in paths if path.name.endswith(".index.json")]
    for index in indices:
        files = read_json(source, index).get("weight_map")
        if not isinstance(files, dict) or not files:
            raise source.damaged(index, ValueError("no weight_map inside"))
        for name in sorted(set(map(str, files.values()))):
            if not (index.parent / name).is_file():
                raise _missing(source, f"{index.parent} has no {name}, which its {index.name} lists", repo)
    for path in paths:
        if (shard := _SHARD.fullmatch(path.name)) and not indices:
            raise _missing(source, f"{folder} has {path.name}, but no {shard[1]}{shard[4]}.index.json", repo)


def _missing(source: Source, problem: str, repo: str | None = None, revision: str | None = None) -> SpecbenchError:
    return SpecbenchError(f"{source.what}: {problem}", source.how_to_get(repo, revision), MISSING_PREREQUISITE)
