"""Model folders on the Hugging Face hub that metrics need, by safetensors only."""

from __future__ import annotations

import hashlib
from pathlib import Path

from specbench.errors import FAILURE, MISSING_PREREQUISITE, SpecbenchError
from specbench.models.hub_pins import DIGESTS, REVISIONS, how_to_pin, revision_of
from specbench.system.downloads import offline
from specbench.system.file_digests import sha256_of

_FILES = ("config.json", "model.safetensors")


def hub_folder(repository: str, forbidden: bool = False) -> Path:
    """Find or download the configuration and weights of a repository in the hub's cache.

    Raises:
        SpecbenchError: not there and offline, no revision of it is known, or the download failed.
    """
    from huggingface_hub import snapshot_download  # slow to import: not for `list metrics`
    from huggingface_hub.errors import HfHubHTTPError, LocalEntryNotFoundError

    revision = revision_of(repository)
    local = forbidden or offline() or revision is None
    try:
        folder = Path(snapshot_download(repository, revision=revision, allow_patterns=_FILES, local_files_only=local))
    except LocalEntryNotFoundError:
        unpinned = "" if revision else ", and without a revision it is not downloaded"
        what = f"{repository} is not on this disk{unpinned}"
        raise SpecbenchError(what, _hint(repository), MISSING_PREREQUISITE) from None
    except (HfHubHTTPError, OSError) as error:
        raise SpecbenchError(f"{repository}: {type(error).__name__}: {error}", _hint(repository), FAILURE) from error
    if any(not (folder / name).is_file() for name in _FILES):
        raise SpecbenchError(f"{repository} is not complete on this disk", _hint(repository), MISSING_PREREQUISITE)
    digests = DIGESTS.get(repository, {}) if revision == REVISIONS.get(repository) else {}
    for name, digest in digests.items():
        if sha256_of(folder / name) != digest:
            raise SpecbenchError(f"{folder / name} is not the published file", _hint(repository), MISSING_PREREQUISITE)
    return folder


def hub_problem(repository: str) -> tuple[str, str] | None:
    """What is missing of a repository on this disk and how to get it; None if nothing."""
    try:
        hub_folder(repository, forbidden=True)
    except SpecbenchError as error:
        return error.what, error.try_this
    return None


def folder_identity(folder: Path) -> str:
    """Digest the files of a model folder, and name its commit in the hub's cache."""
    digests = hashlib.sha256("".join(sha256_of(folder / name) for name in _FILES).encode()).hexdigest()
    return f"sha256:{digests} at {folder.name}"


def _hint(repository: str) -> str:
    revision = revision_of(repository)
    get = f"hf download {repository} {' '.join(_FILES)}"
    return f"{get} --revision {revision}" if revision else f"{how_to_pin(repository)}, or type '{get}'"
