"""Repositories of the Hugging Face hub: at which commit they are used, which of their files this disk lacks, and why
they cannot be had.

huggingface_hub does the receiving: `HF_HOME`, `HF_ENDPOINT` and a login mean what they mean everywhere. No torch here.
"""

from __future__ import annotations

import errno
import glob
import os
import threading
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from fnmatch import filter as matching
from pathlib import Path

from specbench.errors import FAILURE, MISSING_PREREQUISITE, SpecbenchError
from specbench.models import first_use
from specbench.system.downloads import Download, Progress, offline

# Imports inside functions: huggingface_hub is slow to import, which `list models` would do for nothing.

REVISIONS: Mapping[str, str] = {
    "Alpha-VLLM/Lumina-mGPT-7B-768": "9624463a82ea5ce814af9b561dcd08a31082c3af",
    "deepseek-ai/Janus-Pro-1B": "960ab33191f61342a4c60ae74d8dc356a39fafcb",
    "deepseek-ai/Janus-Pro-7B": "5c3eb3fb2a3b61094328465ba61fcd4272090d67",
    "depth-anything/Depth-Anything-V2-Small-hf": "5426e4f0f36572d16453bbda7a8389317b1bef99",
    "google/flan-t5-xl": "7d6315df2c2fb742f0f5b556879d730926ca9001",
    "google/owlv2-base-patch16-ensemble": "cfd3195ba4ea9592eec887ded089f4c08eff231d",
    "leloy/Anole-7b-v0.1-hf": "96df52301e844d8a624a13953051ead4c008343b",
    "xswu/HPSv2": "697403c78157020a1ae59d23f111aa58ced35b0a",
    "zai-org/ImageReward": "5736be03b2652728fb87788c9797b0570450ab72",
}
"""Pinned commits of hub repositories: a branch may change under a benchmark, a commit names the digest of every file in
it. They are those that several public projects use and state. Other repositories are used at the revision that the user
names with `--revision` or SPECBENCH_REVISIONS, else at the commit of their first use, see `first_use`."""
DIGESTS: Mapping[str, Mapping[str, str]] = {
    "depth-anything/Depth-Anything-V2-Small-hf": {
        "config.json": "c56698d3643dde1f83ea2212759e6b31a22b8f827246a36dd007ee8a22b3ff75",
        "model.safetensors": "3152477ce0d8d6978d76b995120de97cb5b928701fd0f817769f59e249a16b70",
    },
    "google/owlv2-base-patch16-ensemble": {
        "model.safetensors": "e1e130b9e404cf91a75ad45644c1da9d7fa5284085eecc864266a6923efb99e7"
    },
}
"""SHA-256 of files at those revisions, by repository and name, where one is published."""
_VARIABLE = "SPECBENCH_REVISIONS"
"""Environment variable with revisions chosen by the user: "owner/name@revision", separated by commas."""
_LOOK_EVERY_S = 0.5
_MOST_SAID = 90
"""Characters of a foreign message that are repeated."""


def revision_of(repo: str) -> str | None:
    """Revision of a repository that SPECBENCH_REVISIONS names, else the pinned one, else that of its first use here.

    Raises:
        SpecbenchError: the variable is not a list of owner/name@revision.
    """
    chosen = {}
    for entry in filter(None, os.environ.get(_VARIABLE, "").split(",")):
        name, _, revision = entry.strip().partition("@")
        if not revision or name.count("/") != 1:
            raise SpecbenchError(f"{_VARIABLE}: '{entry}' is not owner/name@revision", "separate several by commas")
        chosen[name] = revision
    return chosen.get(repo) or REVISIONS.get(repo) or first_use.kept_commit(repo)


def cached_snapshot(repo: str, revision: str | None, patterns: Sequence[str]) -> Path | None:
    """Folder of a repository in the hub cache, with the files of `patterns`; None where it is not there."""
    from huggingface_hub import constants

    if not Path(constants.HF_HUB_CACHE, f"models--{repo.replace('/', '--')}").is_dir():
        return None
    from huggingface_hub import snapshot_download

    revision = revision or revision_of(repo)
    with suppress(OSError):
        return Path(snapshot_download(repo, revision=revision, allow_patterns=[*patterns], local_files_only=True))
    return None


def repository_download(
    repo: str, revision: str | None, groups: Iterable[str], licence: str, optional: Sequence[str] = ()
) -> Download:
    """What is to be received of a repository, at the commit and of the sizes that the hub states now.

    Args:
        revision: named by the user; None for the one of `revision_of`, else the newest commit of `main`.
        groups: glob patterns, each of which must match a file; "a|b" takes b where nothing matches a.
        optional: patterns of files that are received where they exist.

    Raises:
        SpecbenchError: exit code 5: offline, not named under --pinned-only, no such repository, revision or file, or no
            access; exit code 1: no answer.
    """
    named = revision or revision_of(repo)
    require_permission(repo, named)
    from huggingface_hub import HfApi, constants, try_to_load_from_cache

    with _explained(repo, named):
        info = HfApi().model_info(repo, revision=named, files_metadata=True)
    sizes = {one.rfilename: one.size or 0 for one in info.siblings or ()}
    files = [name for pattern in optional for name in _named(sizes, pattern)]
    for group in groups:
        found = next((found for pattern in group.split("|") if (found := _named(sizes, pattern))), [])
        if not found:
            raise SpecbenchError(f"{repo} at {info.sha[:12]} has no {group.replace('|', ' or ')}", "", FAILURE)
        files += found
    lacking = [name for name in files if not isinstance(try_to_load_from_cache(repo, name, revision=info.sha), str)]
    cache = Path(constants.HF_HUB_CACHE)
    storage = cache / f"models--{repo.replace('/', '--')}"
    partial = sum(path.stat().st_size for path in storage.glob("blobs/*.incomplete"))
    size = max(0, sum(sizes[name] for name in lacking) - partial)

    def get(progress: Progress) -> None:
        from huggingface_hub import snapshot_download

        patterns = [glob.escape(name) for name in files]
        with _explained(repo, named), _watched(storage, size, progress):
            folder = Path(snapshot_download(repo, revision=named or "main", allow_patterns=patterns))
        if named is None:
            first_use.keep(repo, folder.name, folder, [folder / name for name in files])

    return Download(repo, tuple(files), size, licence, cache, get, info.sha)


def _named(names: Iterable[str], pattern: str) -> list[str]:
    """The names of a pattern, in its own folder alone."""
    return [name for name in matching(names, pattern) if name.count("/") == pattern.count("/")]


def require_permission(repo: str, revision: str | None) -> None:
    """Refuse a download offline, and one at a commit that nobody has named where only named ones are allowed."""
    if offline():
        raise SpecbenchError(
            f"{repo} is not on this disk, and downloads are disabled",
            f"with a network: specbench fetch {repo}",
            MISSING_PREREQUISITE,
        )
    if first_use.is_pinned_only() and (revision or revision_of(repo)) is None:
        raise SpecbenchError(
            f"{repo} is not on this disk, and --pinned-only allows no commit that nobody has named",
            f"name one: {_VARIABLE}={repo}@COMMIT",
            MISSING_PREREQUISITE,
        )


@contextmanager
def _explained(repo: str, revision: str | None) -> Iterator[None]:
    """Turn the errors of huggingface_hub, and of what it uses, into one line and one command."""
    from huggingface_hub import constants, errors

    try:
        yield
    except SpecbenchError:
        raise
    except Exception as error:
        place = constants.ENDPOINT.partition("://")[2]
        again, code = "run the same command again", FAILURE
        status = getattr(getattr(error, "response", None), "status_code", None)
        if isinstance(error, errors.HFValidationError):
            what, again, code = f"--weights {repo}: neither a folder nor a hub id", "", 2
        elif isinstance(error, errors.GatedRepoError):
            what = f"{repo} is gated: accept its terms on {place}/{repo}, then log in"
            again, code = "hf auth login", MISSING_PREREQUISITE
        elif isinstance(error, errors.RevisionNotFoundError):
            what, again, code = f"{repo} has no revision '{revision}'", "omit --revision", MISSING_PREREQUISITE
        elif isinstance(error, errors.RepositoryNotFoundError):
            what = f"{repo} is not on {place}, or private"
            again, code = "check the name, or: hf auth login", MISSING_PREREQUISITE
        elif status in (401, 403):
            what, again = f"{repo}: {place} refuses access ({status})", "hf auth login"
        elif status == 429:
            wait = error.response.headers.get("Retry-After")  # type: ignore[attr-defined]
            what = f"{repo}: too many requests to {place} (429)" + (f"; it asks to wait {wait} s" if wait else "")
            again = "run the same command again then; 'hf auth login' raises the limit"
        elif status:
            what = f"{repo}: {place} answers {status}"
        elif isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT):
            what, again = f"{repo}: {constants.HF_HUB_CACHE} is full", "free space, and run the same command again"
        elif "CERTIFICATE_VERIFY_FAILED" in (cause := _innermost(error)):
            what = f"{repo}: the certificate of {place} cannot be verified"
            again = "set SSL_CERT_FILE to your CA bundle; 'python -m certifi' prints one"
        else:
            what = f"{repo}: no answer from {place}: {cause}"
        raise SpecbenchError(what, again, code) from error


def _innermost(error: BaseException) -> str:
    """First line of the error that all the others are about."""
    while (inner := error.__cause__ or error.__context__) and not isinstance(inner, SpecbenchError):
        error = inner
    return (str(error).splitlines() or [""])[0][:_MOST_SAID] or type(error).__name__


@contextmanager
def _watched(storage: Path, size: int, progress: Progress) -> Iterator[None]:
    """Tell how many bytes have arrived in a repository's folder, whichever process receives them; the client's own bars
    are hidden meanwhile.
    """
    from huggingface_hub.utils import are_progress_bars_disabled, disable_progress_bars, enable_progress_bars

    def held() -> int:
        total = 0
        for path in storage.glob("blobs/*"):
            with suppress(OSError):  # renamed meanwhile
                total += path.stat().st_size
        return total

    before, done, hidden = held(), threading.Event(), are_progress_bars_disabled()

    def look() -> None:
        while not done.wait(_LOOK_EVERY_S):
            progress(min(size, held() - before), size)

    disable_progress_bars()
    threading.Thread(target=look, daemon=True).start()
    try:
        yield
        progress(size, size)
    finally:
        done.set()
        if not hidden:
            enable_progress_bars()
