"""Published weights of metrics (single files, and model folders of the hub): addresses, digests, downloads. The digest
of a file is checked before each loading. Of model folders, only safetensors weights are read."""

import hashlib
import tomllib
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

from specbench.errors import MISSING_PREREQUISITE, SpecbenchError
from specbench.models.checkpoint_files import Source, WantedFiles, read_json
from specbench.models.hub_downloads import REVISIONS, is_pinned_only, on_hub_endpoint
from specbench.system.digests import cache_folder, digest_of, sha256_of
from specbench.system.downloads import HUB, Download, Remote, fetch_all, fetch_file, matches, offline, size_of

NETWORK_FILES = ("config.json", "model.safetensors")  # Files of a model folder; no pickles
_OPTIONAL = ("generation_config.json", "*processor_config.json")


@dataclass(frozen=True)
class Checkpoint:
    """Published weights or vocabulary file with its address, digest and licence."""

    file: str
    remote: Remote
    licence: str

    @property
    def path(self) -> Path:
        return cache_folder() / "weights" / self.file

    @property
    def digest(self) -> str:
        return self.remote.digest

    @property
    def here(self) -> bool:
        """Whether the published file is on this disk."""
        return self.path.is_file() and matches(self.path, self.remote)

    @property
    def hint(self) -> str:
        return f"specbench fetch {self.file}"


def _published() -> dict[str, Checkpoint]:
    """Read `published_weights.toml` as {name: checkpoint}."""
    checkpoints = {}
    for name, entry in tomllib.loads(Path(__file__).with_suffix(".toml").read_text(encoding="utf-8")).items():
        repository, digest = entry.get("repository"), f"sha256:{entry['sha256']}" if "sha256" in entry else ""
        url = entry.get("url") or f"{HUB}/{repository}/resolve/{REVISIONS[repository]}/{entry['file']}"
        checkpoints[name] = Checkpoint(entry["file"], Remote(url, digest, entry.get("size")), entry["licence"])
    return checkpoints


CHECKPOINTS = _published()


def missing_file(name: str, forbidden: bool = False) -> Download | None:
    """Return the download of a checkpoint's file; None if the file is on this disk."""
    checkpoint = CHECKPOINTS[name]
    if checkpoint.here:
        return None
    if forbidden or offline():
        raise SpecbenchError(f"{checkpoint.file} is not on this disk", checkpoint.hint, MISSING_PREREQUISITE)
    if not checkpoint.digest and is_pinned_only():
        what = f"{checkpoint.file} has no published digest, and --pinned-only downloads only pinned files"
        raise SpecbenchError(what, f"put it into {checkpoint.path.parent}", MISSING_PREREQUISITE)
    remote = replace(on_hub_endpoint(checkpoint.remote), by_hand=f"or put it into {checkpoint.path.parent}")
    part, size = checkpoint.path.with_name(f"{checkpoint.file}.part"), size_of(remote)
    if size is not None and part.is_file():
        size = max(0, size - part.stat().st_size)
    get = partial(fetch_file, remote, checkpoint.path)
    return Download(checkpoint.file, (checkpoint.file,), size, checkpoint.licence, checkpoint.path.parent, get)


def require_weights_file(name: str, forbidden: bool = False) -> Path:
    """Return a checkpoint's file after checking its digest; download the file first if it is missing."""
    if lacking := missing_file(name, forbidden):
        fetch_all([lacking])
    return CHECKPOINTS[name].path


def file_digest(name: str) -> str:
    """Digest a checkpoint's file on this disk, because the publisher may state no digest."""
    return digest_of(require_weights_file(name, forbidden=True))


def problem(name: str) -> tuple[str, str] | None:
    """Describe why a checkpoint's file cannot be used, and how to get the file; None if it can be used."""
    checkpoint = CHECKPOINTS[name]
    if checkpoint.here:
        return None
    there = checkpoint.path.is_file()
    what = f"{checkpoint.path} is not the published file" if there else f"{checkpoint.file} is not on this disk"
    return what, checkpoint.hint


def network_files(repository: str, files: Sequence[str] = NETWORK_FILES) -> WantedFiles:
    """The files of a metric's network in a repository of the hub; `files`: glob patterns of the required files."""
    return WantedFiles(Source("the metric's network", repository, tuple(files), "see its card", optional=_OPTIONAL))


def hub_folder(repository: str, files: Sequence[str] = NETWORK_FILES, forbidden: bool = False) -> Path:
    """Return the folder of a repository in the hub's cache; download required files first if missing."""
    wanted = network_files(repository, files)
    folder = (wanted.find() if forbidden else wanted.fetch()).paths[0].parent
    for path in folder.glob("*config.json"):
        read_json(wanted.source, path)  # raises an error if the repository contains code
    return folder


def hub_problem(repository: str, files: Sequence[str] = NETWORK_FILES) -> tuple[str, str] | None:
    """Return an error text for missing files of a repository, and a hint; None if no file is missing."""
    try:
        hub_folder(repository, files, forbidden=True)
    except SpecbenchError as error:
        return error.what, error.try_this
    return None


def folder_identity(folder: Path, files: Sequence[str] = NETWORK_FILES) -> str:
    """Digest the files of a model folder; for a folder in the hub's cache, with its commit."""
    patterns = ("*.json", "*.jinja", "*.safetensors", *"|".join(files).split("|"))
    several = sorted(path for path in folder.glob("*") if any(map(path.match, patterns)))
    paths = [folder / name for name in files] if tuple(files) == NETWORK_FILES else several
    digests = hashlib.sha256("".join(map(sha256_of, paths)).encode()).hexdigest()
    return f"sha256:{digests} at {folder.name}"
