"""Repositories of the Hugging Face hub: at which commit they are used, which of their files this disk lacks, and why
they cannot be had.

huggingface_hub does the receiving: `HF_HOME`, `HF_ENDPOINT` and a login mean what they mean everywhere. No torch here.
"""

from __future__ import annotations

import errno
import fcntl
import glob
import logging
import os
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, wait
from contextlib import contextmanager, suppress
from fnmatch import filter as matching
from functools import partial
from pathlib import Path

from specbench.errors import BAD_INPUT, FAILURE, MISSING_PREREQUISITE, SpecbenchError
from specbench.models import first_use
from specbench.system.downloads import Download, Progress, hub_endpoint, offline

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
    size = sum(sizes[name] for name in lacking)

    def get(progress: Progress) -> None:
        from huggingface_hub import snapshot_download

        patterns = [glob.escape(name) for name in files]
        _remove_abandoned(storage)
        receive = partial(snapshot_download, repo, revision=named or "main", allow_patterns=patterns)
        with _explained(repo, named):
            folder = Path(_watched(storage, size, progress, receive))
        _refuse_other_sizes(repo, folder, {name: sizes[name] for name in files if sizes[name]})
        if named is None:
            first_use.keep(repo, folder.name, folder, [folder / name for name in files])

    return Download(repo, tuple(files), size, licence, cache, get, info.sha)


def _refuse_other_sizes(repo: str, folder: Path, sizes: Mapping[str, int]) -> None:
    """Remove files of another size than the hub states, which the client takes for complete, and raise."""
    held = {name: (folder / name).stat().st_size for name in sizes}
    wrong = [name for name in sizes if held[name] != sizes[name]]
    for path in (folder / name for name in wrong):
        for one in (path.resolve(), path):
            one.unlink(missing_ok=True)
    if wrong:
        name = wrong[0]
        what = f"{repo}: {name} came with {held[name]:,} bytes instead of {sizes[name]:,}"
        raise SpecbenchError(what, "a proxy may alter it; run the same command again", FAILURE)


def _named(names: Iterable[str], pattern: str) -> list[str]:
    """The names of a pattern, in its own folder alone."""
    return [name for name in matching(names, pattern) if name.count("/") == pattern.count("/")]


def _remove_abandoned(storage: Path) -> None:
    """Remove the parts of files that killed processes left, with which the client does not go on; those of processes
    that still hold the client's lock stay.
    """
    for path in storage.glob("blobs/*.incomplete"):
        lock = storage.parent / ".locks" / storage.name / f"{path.name.partition('.')[0]}.lock"
        with suppress(OSError), lock.open("a") as held:
            fcntl.flock(held, fcntl.LOCK_EX | fcntl.LOCK_NB)
            path.unlink()


def require_permission(repo: str, revision: str | None) -> None:
    """Refuse a download offline, and one at a commit that nobody has named where only named ones are allowed."""
    hub_endpoint()
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
    from huggingface_hub import constants

    logger = logging.getLogger("huggingface_hub")
    level = logger.level
    logger.setLevel(logging.CRITICAL)  # each of its tries would be a line
    try:
        yield
    except SpecbenchError:
        raise
    except Exception as error:
        raise SpecbenchError(*_explanation(error, repo, revision, constants.ENDPOINT.partition("://")[2])) from error
    finally:
        logger.setLevel(level)


def _explanation(error: BaseException, repo: str, revision: str | None, place: str) -> tuple[str, str, int]:
    """What a failure of the client means, what to do, and the exit code."""
    from huggingface_hub import constants, errors

    found = _behind(error)

    def of_kind(*kinds: type) -> bool:
        return any(isinstance(one, kinds) for one in found)

    answers = [response for one in found if (response := getattr(one, "response", None)) is not None]
    status = answers[0].status_code if answers else None
    if of_kind(errors.HFValidationError):
        return f"--weights {repo}: neither a folder nor a hub id", "", BAD_INPUT
    if of_kind(errors.GatedRepoError):
        what = f"{repo} is gated: accept its terms on {place}/{repo}, then log in"
        return what, "hf auth login", MISSING_PREREQUISITE
    if of_kind(errors.RevisionNotFoundError):
        return f"{repo} has no revision '{revision or 'main'}'", "name another one", MISSING_PREREQUISITE
    if of_kind(errors.RepositoryNotFoundError) or status == 404:
        return f"{repo} is not on {place}, or private", "check the name, or: hf auth login", MISSING_PREREQUISITE
    if status in (401, 403):
        return f"{repo}: {place} refuses access ({status})", "hf auth login", MISSING_PREREQUISITE
    again = "run the same command again"
    if status == 429:
        wait = answers[0].headers.get("Retry-After")
        what = f"{repo}: too many requests to {place} (429)" + (f"; it asks to wait {wait} s" if wait else "")
        return what, f"{again} then; 'hf auth login' raises the limit", FAILURE
    if status:
        return f"{repo}: {place} answers {status}", again, FAILURE
    if any(getattr(one, "errno", None) in (errno.ENOSPC, errno.EDQUOT) for one in found):
        return f"{repo}: {constants.HF_HUB_CACHE} is full", f"free space, and {again}", FAILURE
    cause = (str(found[-1]).splitlines() or [""])[0][:_MOST_SAID] or type(found[-1]).__name__
    if "CERTIFICATE_VERIFY_FAILED" in cause:
        what = f"{repo}: the certificate of {place} cannot be verified"
        return what, "set SSL_CERT_FILE to your CA bundle; 'python -m certifi' prints one", FAILURE
    return f"{repo}: no answer from {place}: {cause}", again, FAILURE


def _behind(error: BaseException) -> list[BaseException]:
    """An error and those that it comes from, the innermost last."""
    found = [error]
    while (inner := found[-1].__cause__ or found[-1].__context__) and not isinstance(inner, SpecbenchError):
        if inner in found:
            break
        found.append(inner)
    return found


def _watched(storage: Path, size: int, progress: Progress, receive: Callable[[], str]) -> str:
    """Call `receive` in a thread of its own, so that Ctrl-C does not wait for it, and tell meanwhile how many bytes
    have arrived in a repository's folder, whichever process receives them; the client's own bars are hidden.
    """
    from huggingface_hub.utils import are_progress_bars_disabled, disable_progress_bars, enable_progress_bars

    def held() -> int:
        total = 0
        for path in storage.glob("blobs/*"):
            with suppress(OSError):  # renamed meanwhile
                total += path.stat().st_size
        return total

    before, hidden, done = held(), are_progress_bars_disabled(), Future()

    def work() -> None:
        try:
            done.set_result(receive())
        except BaseException as error:  # raised where the result is asked for
            done.set_exception(error)

    disable_progress_bars()
    try:
        threading.Thread(target=work, daemon=True).start()
        while wait([done], _LOOK_EVERY_S).not_done:
            progress(min(size, held() - before), size)
        folder = done.result()
        progress(size, size)
        return folder
    finally:
        if not hidden:
            enable_progress_bars()
