"""Resumable downloads of published files, verified by digest.

A download uses TLS and is aborted if it exceeds the expected size. It is written to `<target>.part` and renamed after
its digest was verified, so that a file with its final name is complete and correct. Offline mode forbids downloads.
Imports no torch.
"""

import functools
import http.client
import os
import re
import shutil
import ssl
import time
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from itertools import chain
from pathlib import Path
from typing import Any, TypeVar

from specbench.errors import BAD_INPUT, FAILURE, MISSING_PREREQUISITE, SpecbenchError
from specbench.system.digests import digest_of, sha256_of
from specbench.system.version import __version__

# Imports inside functions: specbench.system.files imports rich, which only writing needs.


K = TypeVar("K")
Progress = Callable[[int, int | None], None]
"""Progress callback with (bytes received, total bytes or None)."""
TIMEOUT_S = 30.0
DOWNLOAD_ATTEMPTS = 4
"""A download fails after this number of consecutive requests without new bytes."""
PAUSE_S = 1.0
PATIENCE_S = 10
"""Longest wait in seconds that a server may request. If it requests more, the download fails with a message."""
HUB = "https://huggingface.co"
OFFLINE_VARIABLES = ("SPECBENCH_OFFLINE", "HF_HUB_OFFLINE", "TRANSFORMERS_OFFLINE")
_CHUNK = 1 << 20
_MAX_BYTES = 32 * 2**30
"""Size limit in bytes for files whose size is not known in advance."""
_HERE = ("127.0.0.1", "::1", "localhost")
TRANSIENT = (urllib.error.URLError, http.client.HTTPException, TimeoutError, ConnectionError)
"""Errors after which another request may succeed."""


@dataclass(frozen=True)
class Remote:
    """A published file.

    Attributes:
        url: address of the publication.
        digest: "sha256:...", "md5:..." or "git:..." (id of a file in a git repository), as recorded by the publisher or
            this project; empty if unknown.
        size: bytes, if known.
        by_hand: advice if the file cannot be downloaded automatically.
    """

    url: str
    digest: str
    size: int | None = None
    by_hand: str = "or put the file there yourself"

    @property
    def place(self) -> str:
        """Name and server of the file, for messages."""
        parts = urllib.parse.urlsplit(self.url)
        return f"{parts.path.rpartition('/')[2]} of {parts.netloc}"


@dataclass(frozen=True)
class Download:
    """Missing published files of a repository (at a `commit`), a prompt set or an address. `get`: function that stores
    them in `folder`; `size`: bytes to receive, None if the publisher does not state it."""

    name: str
    files: tuple[str, ...]
    size: int | None
    licence: str
    folder: Path
    get: Callable[[Progress], object] = field(compare=False)
    commit: str = ""


def fetch_all(downloads: Iterable[Download], failed: dict[Download, SpecbenchError] | None = None) -> list[Download]:
    """Print a line per download, then download with one progress bar; equal downloads are done once. If the files do
    not fit on the disk, download nothing (exit code 5). Errors are added to `failed`; if `failed` is None, the first
    error is raised."""
    from rich.filesize import decimal

    from specbench.system import console

    if not (parts := _that_fit(dict.fromkeys(downloads), failed)):
        return parts
    last = ""
    for part in parts if console.progress_shown() else ():
        at = f", commit {part.commit[:7]}" if part.commit else ""
        size = decimal(part.size) if part.size is not None else "size unknown"
        licence = "same licence" if part.licence == last else f"licence: {part.licence}"
        console.say(f"downloading {part.name}{at}: {size}; {licence}")
        last = part.licence
    total = sum(part.size or 0 for part in parts)
    received = 0
    with console.transfer(f"{len(parts)} downloads" if len(parts) > 1 else "download") as progress:

        def of_part(done: int, size: int | None) -> None:
            progress(received + done, max(total, received + (size or 0)))

        for part in parts:
            try:
                part.get(of_part)
            except SpecbenchError as error:
                if failed is None:
                    raise
                failed[part] = error
            received += part.size or 0
    return parts


def fetch_what_can_be_had(
    needs: Mapping[K, Callable[[], Sequence[Download]]],
    announce: Callable[[Mapping[K, Sequence[Download]]], None] = lambda needed: None,
) -> dict[K, SpecbenchError]:
    """Download the files of several items, such as metrics, together. `needs`: functions that list an item's downloads.
    `announce` is called with these lists before the downloads. Return the error of each item that failed."""
    problems: dict[K, SpecbenchError] = {}
    downloads: dict[K, Sequence[Download]] = {}
    for thing, ask in needs.items():
        try:
            downloads[thing] = ask()
        except SpecbenchError as error:
            problems[thing] = error
    announce(downloads)
    failed: dict[Download, SpecbenchError] = {}
    fetch_all(chain(*downloads.values()), failed)
    return problems | {thing: failed[part] for thing, parts in downloads.items() for part in parts if part in failed}


def _that_fit(downloads: Iterable[Download], failed: dict[Download, SpecbenchError] | None) -> list[Download]:
    """Return the downloads that fit on their disk. Add the others to `failed`; if `failed` is None, raise an error."""
    from rich.filesize import decimal

    needed: dict[int, int] = {}
    fitting = []
    for part in downloads:
        existing = next(place for place in (part.folder, *part.folder.absolute().parents) if place.exists())
        disk = existing.stat().st_dev
        size = needed.get(disk, 0) + (part.size or 0)
        if size <= (free := shutil.disk_usage(existing).free):
            needed[disk] = size
            fitting.append(part)
            continue
        error = SpecbenchError(
            f"{part.name}: {decimal(size)} do not fit into {existing}, {decimal(free)} are free",
            "free space, or set HF_HOME and SPECBENCH_CACHE to another disk",
            MISSING_PREREQUISITE,
        )
        if failed is None:
            raise error
        failed[part] = error
    return fitting


def fetch_file(remote: Remote, target: Path, progress: Progress | None = None, forbidden: bool = False) -> Path:
    """Download to `target` unless the correct file exists; resume a partial download. `forbidden`: do not use the
    network, as in offline mode."""
    if target.is_file() and matches(target, remote):
        return target
    if forbidden or offline():
        what = f"{target.name} is not on this disk, and downloads are disabled"
        raise SpecbenchError(what, f"go online, {remote.by_hand}", MISSING_PREREQUISITE)
    from specbench.system.files import FULL, lock_when_free

    part = target.with_name(target.name + ".part")
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        lock = lock_when_free(target.with_name(f".{target.name}.lock"), target.name)
        try:
            if not (target.is_file() and matches(target, remote)):  # another process may have downloaded it
                _complete(remote, part, progress)
                os.replace(part, target)
        finally:
            os.close(lock)
    except OSError as error:
        again = "free some space and run the same command again to resume" if error.errno in FULL else ""
        code = FAILURE if again else BAD_INPUT
        raise SpecbenchError(f"cannot write {target}: {error.strerror or error}", again, code) from error
    return target


def matches(path: Path, remote: Remote) -> bool:
    """Return whether a local file has the published size and digest."""
    if remote.size is not None and path.stat().st_size != remote.size:
        return False
    return not remote.digest or _digest(path, remote) == remote.digest


def mismatch(path: Path, remote: Remote) -> str:
    """Describe how a local file differs from the published file."""
    size = path.stat().st_size
    if remote.size is not None and size != remote.size:
        return f"{size:,} bytes instead of {remote.size:,}"
    kind, _, digest = _digest(path, remote).partition(":")
    return f"its {kind} is {digest[:16]}..., not {remote.digest.partition(':')[2][:16]}..."


def _digest(path: Path, remote: Remote) -> str:
    kind = remote.digest.partition(":")[0]
    return f"sha256:{sha256_of(path)}" if kind == "sha256" else digest_of(path, kind)


def size_of(remote: Remote) -> int | None:
    """Return the size of a published file in bytes; if not recorded, request it from the server. None if unknown."""
    if remote.size is not None or offline():
        return remote.size
    with suppress(*TRANSIENT, ValueError), _open_url(remote.url, {}, "HEAD") as response:
        length = response.headers.get("Content-Length")
        return int(length) if length else None
    return None


def require_certificates() -> None:
    """Raise an error if SSL_CERT_FILE contains no certificates, because no server could then be verified."""
    if path := os.environ.get("SSL_CERT_FILE"):
        try:
            _read_certificates(path)
        except OSError as error:
            reason = "no certificates in it" if isinstance(error, ssl.SSLError) else error.strerror
            fix = "give the path of your CA bundle; 'python -m certifi' prints one"
            raise SpecbenchError(f"SSL_CERT_FILE={path}: {reason}", fix) from None


@functools.cache
def _read_certificates(path: str) -> None:
    """Read a file of certificates; cached, because this takes 20 ms and a plan checks several downloads."""
    ssl.create_default_context(cafile=path)


def asked_wait(headers: Any) -> tuple[str, bool]:
    """Return the wait that a server requests, as text that ends a message, and whether it exceeds `PATIENCE_S`."""
    limit = re.search(r"\bt=(\d+)", headers.get("RateLimit") or "")
    after = headers.get("Retry-After") or (limit[1] if limit else "")
    if after.isdecimal():
        return f"; it asks to wait {after:.9} s", len(after) > 9 or int(after) > PATIENCE_S
    return (f"; it asks to wait until {after:.40}", True) if after else ("", False)


def offline() -> bool:
    """Return whether one of `OFFLINE_VARIABLES` disables the network."""
    return any(map(is_on, OFFLINE_VARIABLES))


def is_on(variable: str) -> bool:
    """Return whether an environment variable is set and not empty, 0, false, no or off."""
    return os.environ.get(variable, "").lower() not in ("", "0", "false", "no", "off")


def _complete(remote: Remote, part: Path, progress: Progress | None) -> None:
    """Download the rest of `part` and verify it. If a resumed file is wrong, restart once."""
    resumed = part.exists()
    _receive(remote, part, progress)
    if matches(part, remote):
        return
    problem = mismatch(part, remote)
    part.unlink()
    if not resumed:
        raise _altered(f"{remote.place} is not the expected file: {problem}")
    _complete(remote, part, progress)  # the partial file may have belonged to another version


def _receive(remote: Remote, part: Path, progress: Progress | None) -> None:
    """Request the rest of `part` until it is complete, or `DOWNLOAD_ATTEMPTS` requests in a row have added no bytes."""
    idle = 0
    while True:
        before = part.stat().st_size if part.exists() else 0
        try:
            return _stream(remote, part, progress)
        except TRANSIENT as error:
            reason = _transient_reason(remote, error)
        idle = 0 if part.exists() and part.stat().st_size > before else idle + 1
        if idle == DOWNLOAD_ATTEMPTS:
            raise SpecbenchError(f"{remote.place}: {reason}", f"run the same command again, {remote.by_hand}", FAILURE)
        time.sleep(PAUSE_S * max(1, idle))


def _altered(what: str) -> SpecbenchError:
    return SpecbenchError(what, "the published file changed, or a proxy altered it; nothing was stored", FAILURE)


def _stream(remote: Remote, part: Path, progress: Progress | None) -> None:
    """Send one request for the bytes after the end of `part`, and append them."""
    start = part.stat().st_size if part.exists() else 0
    if remote.size is not None and start >= remote.size:
        return
    try:
        response = _open_url(remote.url, {"Range": f"bytes={start}-"} if start else {})
    except urllib.error.HTTPError as error:
        if error.code == 416 and start:  # the file is complete; the caller verifies its digest
            return
        raise
    with response:
        if response.status != 206:
            start = 0
        if not remote.digest and response.headers.get_content_type() == "text/html":
            raise _altered(f"{remote.place}: a web page came instead, perhaps the login page of this network")
        length = response.length  # None if the header is not a number
        total = remote.size or (start + length if length else None)
        with part.open("ab" if start else "wb") as file:
            done = start
            while chunk := response.read1(_CHUNK):
                done += len(chunk)
                if done > (remote.size or _MAX_BYTES):
                    part.unlink()
                    raise _altered(f"{remote.place} is larger than the expected {remote.size or _MAX_BYTES:,} bytes")
                file.write(chunk)
                if progress:
                    progress(done, total)
        if length and done < start + length:
            raise ConnectionError(f"cut off after {done:,} bytes")


def _open_url(url: str, headers: Mapping[str, str], method: str = "GET") -> http.client.HTTPResponse:
    """Send one request, over TLS unless the server is on this machine. Raises urllib's error if the request fails."""
    _require_tls(url)
    return send(urllib.request.Request(url, method=method, headers=dict(headers)), TIMEOUT_S)


def send(request: urllib.request.Request, timeout: float) -> http.client.HTTPResponse:
    """Send a request, without a proxy to servers on this machine. Raises urllib's error if the request fails."""
    request.add_header("User-Agent", f"specbench/{__version__}")
    return _opener(urllib.parse.urlsplit(request.full_url).hostname in _HERE).open(request, timeout=timeout)


def _require_tls(url: str) -> None:
    """Reject addresses without TLS, except servers on this machine."""
    parts = urllib.parse.urlsplit(url)
    chosen = url.startswith(os.environ.get("HF_ENDPOINT") or HUB)  # http is allowed: digests are checked
    if parts.scheme != "https" and not (parts.scheme == "http" and (chosen or parts.hostname in _HERE)):
        raise SpecbenchError(f"{url:.100}: not an https address", "name an https address")


class _Redirects(urllib.request.HTTPRedirectHandler):
    def redirect_request(self, req: Any, fp: Any, code: int, msg: str, headers: Any, newurl: str) -> Any:
        _require_tls(newurl)
        return super().redirect_request(req, fp, code, msg, headers, newurl)


@functools.cache
def _opener(direct: bool) -> urllib.request.OpenerDirector:
    """Make an opener that also trusts certifi's certificates (some Pythons have none), if SSL_CERT_FILE is unset."""
    import certifi

    require_certificates()
    context = ssl.create_default_context()
    if not os.environ.get("SSL_CERT_FILE"):
        context.load_verify_locations(certifi.where())
    proxies = [urllib.request.ProxyHandler({})] if direct else []
    return urllib.request.build_opener(_Redirects, urllib.request.HTTPSHandler(context=context), *proxies)


def _transient_reason(remote: Remote, error: Exception) -> str:
    """Describe why a request failed. Raise a SpecbenchError if another request would fail in the same way."""
    if isinstance(error, urllib.error.HTTPError):
        text = str(error.reason).partition("\n")[0]  # urllib's reason may have three lines
        wait, too_long = asked_wait(error.headers)
        reason = f"it answers {error.code} {text}{wait}"
        if too_long or (error.code < 500 and error.code not in (408, 429)):
            raise SpecbenchError(f"{remote.place}: {reason}", remote.by_hand.removeprefix("or "), FAILURE) from None
        return reason
    cause = getattr(error, "reason", "") or error
    if isinstance(cause, ssl.SSLCertVerificationError):
        what = f"{remote.place}: the server's certificate cannot be verified"
        fix = "set SSL_CERT_FILE to your CA bundle; 'python -m certifi' prints one"
        raise SpecbenchError(what, fix, FAILURE) from None
    return str(getattr(cause, "strerror", "") or cause) or type(error).__name__
