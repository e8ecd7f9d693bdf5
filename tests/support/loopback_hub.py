"""A Hugging Face hub on the loopback, for the real client: repositories are folders, commits are named by the test."""

import json
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler
from pathlib import Path

from served import serving

from specbench.system.digests import digest_of


@dataclass
class Hub:
    """Content of the hub.

    Attributes:
        commits: per repository its commits with their folders; the last one is `main`.
        refusals: HTTP status and headers to answer with, by the beginning of a path.
        asked: paths that were asked for.
        files: other published files, by path.
        cut_after: bytes of a file's body after which the connection is cut.
        spoil: makes the sent body of the true body of a path; the stated length is the sent body's.
        content: one file that is served under every path.
        parts: `Range` of each request for it.
        statuses: HTTP statuses of the next answers about it.
        cuts: `cut_after` of the next answers about it.
        ranges: whether parts of a file are served.
        stall_s: seconds until an answer about it."""

    commits: dict[str, dict[str, Path]] = field(default_factory=dict)
    refusals: dict[str, tuple[int, dict[str, str]]] = field(default_factory=dict)
    asked: list[str] = field(default_factory=list)
    files: dict[str, Path] = field(default_factory=dict)
    cut_after: int | None = None
    spoil: Callable[[str, bytes], bytes] = lambda path, data: data
    content: bytes | None = None
    parts: list[str | None] = field(default_factory=list)
    statuses: list[int] = field(default_factory=list)
    cuts: list[int] = field(default_factory=list)
    ranges: bool = True
    stall_s: float = 0.0
    address: str = ""

    def put(self, repo: str, commit: str, folder: Path) -> None:
        self.commits.setdefault(repo, {})[commit] = folder

    def env(self, home: Path) -> dict[str, str]:
        """Variables of a user whose hub this is and whose home folder is empty."""
        return {
            "HF_ENDPOINT": self.address, "HF_HOME": str(home / "hf"), "SPECBENCH_CACHE": str(home / "specbench"),
            "HF_HUB_OFFLINE": "0", "HF_HUB_DISABLE_XET": "1", "NO_PROXY": "127.0.0.1",
        }  # fmt: skip


_LARGE = (".safetensors", ".bin", ".pt", ".pth", ".ckpt", ".jit")


def _digests(path: Path) -> list[str]:
    """Git's id of a file's content, and its SHA-256."""
    return [digest_of(path, kind).partition(":")[2] for kind in ("git", "sha256")]


def _lfs(name: str, size: int, sha256: str, key: str) -> dict[str, object]:
    return {"lfs": {key: sha256, "size": size, "pointerSize": 134}} if name.endswith(_LARGE) else {}


class _Answers(BaseHTTPRequestHandler):
    hub: Hub
    protocol_version = "HTTP/1.1"

    def log_message(self, *_) -> None: ...

    def do_HEAD(self) -> None:
        self._answer(body=False)

    def do_GET(self) -> None:
        self._answer(body=True)

    def _answer(self, body: bool) -> None:
        path = self.path.partition("?")[0]
        self.hub.asked.append(f"{self.command} {path}")
        for start, (status, headers) in self.hub.refusals.items():
            if path.startswith(start):
                return self._send(status, json.dumps({"error": "refused"}).encode(), body, headers)
        if path in self.hub.files:
            return self._content(self.hub.files[path].read_bytes(), {}, body)
        if self.hub.content is not None:
            return self._any(self.hub.content)
        parts = path.strip("/").split("/")
        if parts[:2] == ["api", "models"]:
            return self._api("/".join(parts[2:4]), parts[4:], body)
        if "resolve" in parts:
            return self._file("/".join(parts[:2]), parts[3], "/".join(parts[4:]), body)
        self._send(404, b"{}", body)

    def _any(self, content: bytes) -> None:
        self.hub.parts.append(self.headers.get("Range"))
        time.sleep(self.hub.stall_s)
        if self.hub.statuses:
            return self._send(self.hub.statuses.pop(0), b"", True)
        self.hub.cut_after = self.hub.cuts.pop(0) if self.hub.cuts else None
        self._content(content, {}, True)

    def _commit(self, repo: str, revision: str) -> str | None:
        commits = self.hub.commits.get(repo, {})
        return next(reversed(commits), None) if revision == "main" else revision if revision in commits else None

    def _api(self, repo: str, rest: list[str], body: bool) -> None:
        commit = self._commit(repo, rest[1] if rest[:1] in (["revision"], ["tree"]) else "main")
        if commit is None:
            code = "RevisionNotFound" if repo in self.hub.commits else "RepoNotFound"
            return self._send(404, b"{}", body, {"X-Error-Code": code})
        folder = self.hub.commits[repo][commit]
        files = [path for path in sorted(folder.rglob("*")) if path.is_file()]
        names = [(path.relative_to(folder).as_posix(), path.stat().st_size, *_digests(path)) for path in files]
        if rest[:1] == ["tree"]:
            answer: object = [
                {"type": "file", "path": name, "size": size, "oid": git} | _lfs(name, size, sha256, "oid")
                for name, size, git, sha256 in names
            ]
        else:
            siblings = [
                {"rfilename": name, "size": size, "blobId": git} | _lfs(name, size, sha256, "sha256")
                for name, size, git, sha256 in names
            ]
            answer = {"id": repo, "modelId": repo, "sha": commit, "private": False, "siblings": siblings}
        self._send(200, json.dumps(answer).encode(), body, {"Content-Type": "application/json"})

    def _file(self, repo: str, revision: str, name: str, body: bool) -> None:
        commit = self._commit(repo, revision)
        path = self.hub.commits.get(repo, {}).get(commit or "", Path("/nowhere")) / name
        if not path.is_file():
            return self._send(404, b"", body, {"X-Error-Code": "EntryNotFound"})
        etag = _digests(path)[path.suffix in _LARGE]
        self._content(
            path.read_bytes(), {"ETag": f'"{etag}"', "X-Repo-Commit": str(commit), "Accept-Ranges": "bytes"}, body
        )

    def _content(self, data: bytes, headers: dict[str, str], body: bool) -> None:
        status = 200
        if self.hub.ranges and (asked := self.headers.get("Range")):
            start = int(asked.removeprefix("bytes=").partition("-")[0])
            headers["Content-Range"] = f"bytes {start}-{len(data) - 1}/{len(data)}"
            data, status = data[start:], 206
        self._send(status, data, body, headers)

    def _send(self, status: int, data: bytes, body: bool, headers: dict[str, str] | None = None) -> None:
        data = self.hub.spoil(self.path, data)
        self.send_response(status)
        for name, value in {"Content-Length": str(len(data)), **(headers or {})}.items():
            self.send_header(name, value)
        self.end_headers()
        cut = self.hub.cut_after
        if body and cut is not None and len(data) > cut:
            self.wfile.write(data[:cut])
            self.wfile.flush()
            self.close_connection = True
        elif body:
            self.wfile.write(data)


@contextmanager
def loopback_hub() -> Iterator[Hub]:
    """Serve a hub until the block ends."""
    hub = Hub()
    with serving(type("Answers", (_Answers,), {"hub": hub})) as hub.address:
        yield hub
