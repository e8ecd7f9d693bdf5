"""Repositories of the Hugging Face hub: the commit to use, files missing on this disk, explanations of failures.

huggingface_hub downloads the files, so `HF_HOME`, `HF_ENDPOINT` and a login have their usual meaning. Imports no torch.
"""

from __future__ import annotations

import fcntl
import glob
import logging
import os
import re
import threading
import tomllib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, wait
from contextlib import contextmanager, suppress
from dataclasses import replace
from fnmatch import filter as matching
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from specbench.errors import BAD_INPUT, FAILURE, MISSING_PREREQUISITE, SpecbenchError
from specbench.system import console
from specbench.system.downloads import (
    HUB,
    Download,
    Progress,
    Remote,
    asked_wait,
    is_on,
    matches,
    mismatch,
    offline,
    require_certificates,
)
from specbench.system.files import FULL, write_atomically

if TYPE_CHECKING:
    from huggingface_hub.hf_api import ModelInfo

# Imports inside functions: huggingface_hub is slow to import, and `list models` does not need it.

_PINNED = tomllib.loads(Path(__file__).with_suffix(".toml").read_text(encoding="utf-8"))
REVISIONS: Mapping[str, str] = _PINNED["revisions"]
"""Pinned commits; `--revision` and SPECBENCH_REVISIONS override them. Other repositories: `main` in the hub's cache."""
_VARIABLE = "SPECBENCH_REVISIONS"
"""Environment variable with revisions chosen by the user: "owner/name@revision", separated by commas."""
_LOOK_EVERY_S = 0.5
_COMMIT = re.compile("[0-9a-f]{40}")
_ADDRESS = re.compile(r"https?://([^\s/@]+@)?(\w[\w.-]*|\[[\da-fA-F:.]+\])(:\d{1,5})?(/\S*)?")


def on_hub_endpoint(remote: Remote) -> Remote:
    """Redirect a file of the Hugging Face hub to the mirror that HF_ENDPOINT names."""
    hub = remote.url.startswith(f"{HUB}/")
    return replace(remote, url=remote.url.replace(HUB, hub_endpoint(), 1)) if hub else remote


def hub_endpoint() -> str:
    """Return the address of the Hugging Face hub or of its mirror HF_ENDPOINT; a SpecbenchError if it is no address."""
    address = (os.environ.get("HF_ENDPOINT") or HUB).rstrip("/")
    if _ADDRESS.fullmatch(address) and address.isprintable():
        return address
    raise SpecbenchError(f"HF_ENDPOINT={address}: not an address", "write it as https://HOST, or unset it")


def is_pinned_only() -> bool:
    """Return whether only commits that this project or the user has named may be downloaded."""
    return is_on("SPECBENCH_PINNED_ONLY")


def _chosen(repo: str) -> str | None:
    """Return the revision of a repository in SPECBENCH_REVISIONS."""
    chosen = {}
    for entry in filter(None, os.environ.get(_VARIABLE, "").split(",")):
        name, _, revision = entry.strip().partition("@")
        if not revision or name.count("/") != 1:
            raise SpecbenchError(f"{_VARIABLE}: '{entry}' is not owner/name@revision", "separate entries by commas")
        chosen[name] = revision
    return chosen.get(repo)


def cached_snapshot(repo: str, revision: str | None) -> Path | None:
    """Return the folder of a repository's commit in the hub's cache, perhaps incomplete; None if absent."""
    commit = _commit_here(repo, revision or _chosen(repo) or REVISIONS.get(repo, "main"))
    folder = _storage(repo) / "snapshots" / commit
    return folder if _COMMIT.fullmatch(commit) and folder.is_dir() else None


def _storage(repo: str) -> Path:
    try:
        from huggingface_hub import constants
    except ValueError as error:  # a variable that must be a number
        raise SpecbenchError(f"an HF_ variable of the environment: {error}", "correct or unset it") from None
    return Path(constants.HF_HUB_CACHE, f"models--{repo.replace('/', '--')}")


def _commit_here(repo: str, revision: str) -> str:
    """Return the commit that the hub's cache has stored for a revision, else the revision."""
    with suppress(OSError, ValueError):
        kept = (_storage(repo) / "refs" / revision).read_text().strip()
        return kept if _COMMIT.fullmatch(kept) else revision
    return revision


def repository_download(
    repo: str, revision: str | None, groups: Iterable[str], licence: str, optional: Sequence[str] = ()
) -> Download:
    """Return the files of a repository to download, with the commit, sizes and digests that the hub states now.

    `revision`: chosen by the user; if None, from SPECBENCH_REVISIONS, else the pinned revision, else `main`. A commit
    that the user has not named and the hub does not have is replaced by `main`. `groups`: glob patterns, each of which
    must match a file; "a|b" takes b if nothing matches a. Files of `optional` are downloaded if they exist. An error
    has exit code 1 if the hub did not answer, else 5.
    """
    require_permission(repo, revision)
    named = revision or _chosen(repo)
    branch = named or REVISIONS.get(repo, "main")
    asked = named or _commit_here(repo, branch)
    with _explained(repo, branch):
        commit, stated, note = _ask_hub(repo, asked, required=named is not None)
    files = [name for pattern in optional for name in _named(stated, pattern)]
    for group in groups:
        names = next((names for pattern in group.split("|") if (names := _named(stated, pattern))), [])
        if not names:
            raise SpecbenchError(f"{repo} at {commit[:12]} has no {group.replace('|', ' or ')}", "", FAILURE)
        files += names
    from huggingface_hub import constants, try_to_load_from_cache

    lacking = [name for name in files if not isinstance(try_to_load_from_cache(repo, name, revision=commit), str)]
    storage = _storage(repo)
    size = sum(stated[name].size or 0 for name in lacking)

    def get(progress: Progress) -> None:
        from huggingface_hub import snapshot_download

        if note:
            console.say(note)
        _remove_abandoned(storage)
        patterns = [glob.escape(name) for name in files]
        receive = partial(snapshot_download, repo, revision=commit, allow_patterns=patterns)
        with _explained(repo, branch):
            folder = Path(_watched(storage, size, progress, receive))
            _refuse_altered(repo, folder, {name: stated[name] for name in files})
            if branch != commit:  # the client also stores a branch's commit, but before the files are checked
                (ref := storage / "refs" / branch).parent.mkdir(parents=True, exist_ok=True)
                write_atomically(ref, commit.encode())

    return Download(repo, tuple(files), size, licence, Path(constants.HF_HUB_CACHE), get, commit)


def _ask_hub(repo: str, revision: str, required: bool) -> tuple[str, dict[str, Remote], str]:
    """Return the current commit of a revision, its files, and a note. If the hub does not have a revision that is not
    `required`, `main` replaces it, and the note says so."""
    from huggingface_hub import HfApi, errors

    ask = partial(HfApi().model_info, repo, files_metadata=True)
    try:
        info = ask(revision=revision)
        return str(info.sha), _stated(info, revision), ""
    except errors.RevisionNotFoundError:
        if required or revision == "main":
            raise
    unknown = f"{repo}: the hub does not know commit {revision[:12]}"
    if is_pinned_only():
        fix = f"name a commit that it knows: {_VARIABLE}={repo}@COMMIT"
        raise SpecbenchError(f"{unknown}, and --pinned-only allows no other commit", fix, MISSING_PREREQUISITE)
    info = ask(revision="main")
    return str(info.sha), _stated(info, ""), f"{unknown}; main is used, at {str(info.sha)[:12]}"


def _stated(info: ModelInfo, asked: str) -> dict[str, Remote]:
    """Return size and digest of each file from the hub's answer, which is checked. `asked`: requested revision."""
    if not _COMMIT.fullmatch(str(info.sha)) or (_COMMIT.fullmatch(asked) and info.sha != asked):
        raise ValueError(f"a commit {info.sha!r:.24}")
    stated = {}
    for file in info.siblings or ():
        if not (isinstance(file.rfilename, str) and isinstance(file.size or 0, int)):
            raise ValueError(f"a file {file.rfilename!r:.40} of {file.size!r:.24} bytes")
        git = f"git:{file.blob_id}" if file.blob_id else ""
        stated[file.rfilename] = Remote("", f"sha256:{file.lfs.sha256}" if file.lfs else git, file.size or None)
    return stated


def _refuse_altered(repo: str, folder: Path, stated: Mapping[str, Remote]) -> None:
    """Remove files that differ from what the hub states, because the client would use them; then raise an error."""
    problems = []
    for name, remote in stated.items():
        if not matches(path := folder / name, remote):
            problems.append(f"{repo}: {name} differs from what the hub states: {mismatch(path, remote)}")
            for file in (path.resolve(), path):
                file.unlink(missing_ok=True)
    if problems:
        raise SpecbenchError(problems[0], "a proxy may alter it; run the same command again", FAILURE)


def refuse_changed(paths: Iterable[Path]) -> None:
    """Raise if a file in the hub's cache no longer has the digest that the hub stated, which is its name there."""
    for path in paths:
        blob = path.readlink() if path.is_symlink() else Path()
        kinds = {64: ["sha256"], 40: ["git", "sha1"]}.get(len(blob.name), []) if blob.parent.name == "blobs" else []
        if kinds and not any(matches(path, Remote("", f"{kind}:{blob.name}")) for kind in kinds):
            again = f"to download it again: rm '{path.resolve()}' '{path}'"
            raise SpecbenchError(f"{path} does not have the digest that the hub states", again, MISSING_PREREQUISITE)


def _named(names: Iterable[str], pattern: str) -> list[str]:
    """Return the names that match a pattern, without names in subfolders."""
    return [name for name in matching(names, pattern) if name.count("/") == pattern.count("/")]


def _remove_abandoned(storage: Path) -> None:
    """Remove partial files of killed processes. Files of processes that hold the client's lock stay."""
    for path in storage.glob("blobs/*.incomplete"):
        lock = storage.parent / ".locks" / storage.name / f"{path.name.partition('.')[0]}.lock"
        with suppress(OSError), lock.open("a") as opened:
            fcntl.flock(opened, fcntl.LOCK_EX | fcntl.LOCK_NB)
            path.unlink()


def require_permission(repo: str, revision: str | None) -> None:
    """Refuse a download if offline. If only named commits are allowed, also refuse an unnamed commit."""
    hub_endpoint()
    require_certificates()
    if offline():
        what = f"{repo} is not on this disk, and downloads are disabled"
        raise SpecbenchError(what, f"connect to a network, then: specbench fetch {repo}", MISSING_PREREQUISITE)
    if is_pinned_only() and not (revision or _chosen(repo) or repo in REVISIONS):
        what = f"{repo} is not on this disk, and --pinned-only downloads only pinned commits"
        raise SpecbenchError(what, f"name a commit: {_VARIABLE}={repo}@COMMIT", MISSING_PREREQUISITE)


@contextmanager
def _explained(repo: str, revision: str) -> Iterator[None]:
    """Turn errors of huggingface_hub and its dependencies into a one-line error with a command to type."""
    from huggingface_hub import constants, get_session

    try:
        hooks = get_session().event_hooks["response"]
    except Exception as error:  # the client may raise errors of several types
        raise SpecbenchError(f"HTTP_PROXY, HTTPS_PROXY or ALL_PROXY: {error}"[:160], "correct or unset it") from None
    if _refuse_long_waits not in hooks:
        hooks.append(_refuse_long_waits)
    logger = logging.getLogger("huggingface_hub")
    level = logger.level
    logger.setLevel(logging.CRITICAL)  # each retry would be logged
    try:
        yield
    except SpecbenchError:
        raise
    except Exception as error:
        raise SpecbenchError(*_explanation(error, repo, revision, constants.ENDPOINT.partition("://")[2])) from error
    finally:
        logger.setLevel(level)


def _refuse_long_waits(response: Any) -> None:
    """Raise if a hub asks for a long wait; the client would wait silently."""
    if response.status_code in (429, 503) and asked_wait(response.headers)[1]:
        from huggingface_hub import errors

        raise errors.HfHubHTTPError("", response=response)


def _explanation(error: BaseException, repo: str, revision: str, place: str) -> tuple[str, str, int]:
    """Return message, advice and exit code for a failure of the client."""
    from huggingface_hub import constants, errors

    causes = _behind(error)

    def of_kind(*kinds: type) -> bool:
        return any(isinstance(reason, kinds) for reason in causes)

    answers = [response for reason in causes if (response := getattr(reason, "response", None)) is not None]
    login, again = "hf auth login", "run the same command again"
    if of_kind(errors.HFValidationError):
        return f"--weights {repo}: neither a folder nor a hub id", "", BAD_INPUT
    if of_kind(errors.GatedRepoError):
        return f"{repo} is gated: accept its terms on {place}/{repo}, then log in", login, MISSING_PREREQUISITE
    if of_kind(errors.RevisionNotFoundError):
        return f"{repo} has no revision '{revision}'", "name another revision", MISSING_PREREQUISITE
    if answers and (status := answers[0].status_code) in (401, 403, 404):
        what = f"{repo} does not exist on {place}, or you have no access ({status})"
        return what, f"check the name, or: {login}", MISSING_PREREQUISITE
    if answers:
        what = f"{repo}: {place} answers {status}{asked_wait(answers[0].headers)[0]}"
        return what, f"{again} later" + f"; '{login}' raises the limit" * (status == 429), FAILURE
    for reason in causes:
        if getattr(reason, "errno", None) in FULL or (isinstance(reason, OSError) and reason.filename):
            what = f"{repo}: cannot use {reason.filename or constants.HF_HUB_CACHE}: {reason.strerror}"
            return what, "free space, or name another folder: HF_HOME", MISSING_PREREQUISITE
    cause = (str(causes[-1]).splitlines() or [""])[0][:90] or type(causes[-1]).__name__
    return (
        f"{repo}: {place} does not answer like a hub: {cause}",
        f"{again}; behind a proxy, set HF_ENDPOINT or SSL_CERT_FILE",
        FAILURE,
    )


def _behind(error: BaseException) -> list[Any]:
    """Return an error and its chain of causes; the first cause is last."""
    causes: list[Any] = [error]
    while True:
        last = causes[-1]
        inner = last.__cause__ or (None if last.__suppress_context__ else last.__context__)
        if inner is None or inner in causes or isinstance(inner, SpecbenchError):
            return causes
        causes.append(inner)


def _watched(storage: Path, size: int, progress: Progress, receive: Callable[[], str]) -> str:
    """Call `receive` in a thread, so that Ctrl-C works at once, and report the bytes in a repository's folder."""
    import huggingface_hub

    bars: Any = huggingface_hub.utils

    def received() -> int:
        total = 0
        for path in storage.glob("blobs/*"):
            with suppress(OSError):  # the file was renamed in the meantime
                total += path.stat().st_size
        return total

    before, hidden, done = received(), bars.are_progress_bars_disabled(), Future[str]()

    def work() -> None:
        try:
            done.set_result(receive())
        except BaseException as error:  # raised again with the result
            done.set_exception(error)

    bars.disable_progress_bars()
    try:
        threading.Thread(target=work, daemon=True).start()
        while wait([done], _LOOK_EVERY_S).not_done:
            progress(min(size, received() - before), size)
        folder = done.result()
        progress(size, size)
        return folder
    finally:
        if not hidden:
            bars.enable_progress_bars()
