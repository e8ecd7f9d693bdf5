"""Published weights of metrics, single files and model folders of the hub: addresses, digests, downloads. A file's
digest is checked every time before it is loaded. In folders only weights in safetensors are read."""

from __future__ import annotations

import hashlib
import tomllib
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

from specbench.errors import MISSING_PREREQUISITE, SpecbenchError
from specbench.models.checkpoint_files import Source, WantedFiles, read_json
from specbench.models.hub_downloads import REVISIONS, is_pinned_only, on_hub_endpoint
from specbench.system.digests import cache_folder, digest_of, sha256_of
from specbench.system.downloads import HUB, Download, Remote, fetch_all, fetch_file, matches, offline, size_of

_FILES = ("config.json", "model.safetensors")  # Of a model folder: no pickles
GENEVAL2_JUDGE = "Qwen/Qwen3-VL-8B-Instruct"
_JUDGE_FILES = ("config.json", "*.safetensors*", "tokenizer.json", "tokenizer_config.json", "preprocessor_config.json",
                "chat_template*")  # fmt: skip


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
    """The files of `published_weights.toml` by name."""
    checkpoints = {}
    for name, entry in tomllib.loads(Path(__file__).with_suffix(".toml").read_text(encoding="utf-8")).items():
        repository, digest = entry.get("repository"), f"sha256:{entry['sha256']}" if "sha256" in entry else ""
        url = entry.get("url") or f"{HUB}/{repository}/resolve/{REVISIONS[repository]}/{entry['file']}"
        checkpoints[name] = Checkpoint(entry["file"], Remote(url, digest, entry.get("size")), entry["licence"])
    return checkpoints


CHECKPOINTS = _published()


def missing_file(name: str, forbidden: bool = False) -> Download | None:
    """The download of a checkpoint's file; None if it is on this disk."""
    checkpoint = CHECKPOINTS[name]
    if checkpoint.here:
        return None
    if forbidden or offline():
        raise SpecbenchError(f"{checkpoint.file} is not on this disk", checkpoint.hint, MISSING_PREREQUISITE)
    if not checkpoint.digest and is_pinned_only():
        what = f"{checkpoint.file} has no published digest, which --pinned-only requires"
        raise SpecbenchError(what, f"put it into {checkpoint.path.parent}", MISSING_PREREQUISITE)
    remote = replace(on_hub_endpoint(checkpoint.remote), by_hand=f"or put it into {checkpoint.path.parent}")
    part, size = checkpoint.path.with_name(f"{checkpoint.file}.part"), size_of(remote)
    if size is not None and part.is_file():
        size = max(0, size - part.stat().st_size)
    get = partial(fetch_file, remote, checkpoint.path)
    return Download(checkpoint.file, (checkpoint.file,), size, checkpoint.licence, checkpoint.path.parent, get)


def require_weights_file(name: str, forbidden: bool = False) -> Path:
    """Check the digest of a checkpoint's file. Download the file first if it is absent."""
    if lacking := missing_file(name, forbidden):
        fetch_all([lacking])
    return CHECKPOINTS[name].path


def file_digest(name: str) -> str:
    """Digest a checkpoint's file on this disk, for files whose publisher names no digest."""
    return digest_of(require_weights_file(name, forbidden=True))


def problem(name: str) -> tuple[str, str] | None:
    """Describe why a checkpoint's file cannot be used, and how to get it; None if it can."""
    checkpoint = CHECKPOINTS[name]
    if checkpoint.here:
        return None
    there = checkpoint.path.is_file()
    what = f"{checkpoint.path} is not the published file" if there else f"{checkpoint.file} is not on this disk"
    return what, checkpoint.hint


def missing_folder(repository: str) -> Download | None:
    """The download of a repository's configuration and weights; None if they are on this disk."""
    return WantedFiles(_source(repository)).missing()


def hub_folder(repository: str, forbidden: bool = False) -> Path:
    """Find or download the configuration and weights of a repository in the hub's cache."""
    files = WantedFiles(_source(repository))
    folder = (files.find() if forbidden else files.fetch()).paths[0].parent
    for path in folder.glob("*config.json"):
        read_json(_source(repository), path)  # raises an error if the repository contains code
    return folder


def hub_problem(repository: str) -> tuple[str, str] | None:
    """Describe what is missing of a repository on this disk and how to get it; None if complete."""
    try:
        hub_folder(repository, forbidden=True)
    except SpecbenchError as error:
        return error.what, error.try_this
    return None


def folder_identity(folder: Path) -> str:
    """Digest the files of a model folder, and name its commit in the hub's cache."""
    several = sorted(path.name for path in folder.glob("*") if path.suffix in (".json", ".jinja", ".safetensors"))
    names = _FILES if (folder / _FILES[1]).is_file() else several
    digests = hashlib.sha256("".join(sha256_of(folder / name) for name in names).encode()).hexdigest()
    return f"sha256:{digests} at {folder.name}"


def _source(repository: str) -> Source:
    if repository != GENEVAL2_JUDGE:
        return Source("the metric's network", repository, _FILES, "see its card")
    optional = ("generation_config.json", "*processor_config.json")
    return Source("the metric's network", repository, _JUDGE_FILES, "see its card", optional=optional)
